"""What is shown while a solver runs: overhead, bound and gap of the whole step, in a terminal and in a pipe."""

import io
import math
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from monetrun.core.options import Options
from monetrun.launcher import progress as progress_module
from monetrun.launcher.progress import SolverProgress, status
from monetrun.planning import planner
from monetrun.planning.round_bounds import disjoint_sum
from monetrun.solve import timing
from support.step_records import chain_record


def pipe():
    return Console(file=io.StringIO(), width=100, highlight=False)


def lines(console):
    return console.file.getvalue().splitlines()


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only where a test says so."""
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def test_a_pipe_gets_a_line_for_a_better_plan_and_a_last_line(clock):
    """With the seconds that have passed, not those that a solver counts."""
    console = pipe()
    with SolverProgress(console, 10.0) as progress:
        progress(0.1, math.inf, 0.0)
        clock(0.5)
        progress(0.2, 12.0, 10.5)
        clock(0.6)
        progress(0.3, 12.0, 11.0)  # only the bound
        clock(0.9)
        progress(0.5, 11.5, 11.0)
        clock(0.25)
        progress(0.6, 11.4, 11.2)  # too soon
        clock(0.15)
        progress(0.7, 11.3, 11.2)
        clock(1.8)
    assert lines(console) == [
        "monetrun: planning: +20.0% (bound 5.0%, gap 15.0%) 0.5 s",
        "monetrun: planning: +15.0% (bound 10.0%, gap 5.0%) 2.0 s",
        "monetrun: planning: +13.0% (bound 12.0%, gap 1.0%) 4.2 s",
    ]


def test_what_takes_long_says_so_in_a_pipe_until_it_ends(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_SIGNS", 0.05)
    with status(pipe(), "trial run"):
        time.sleep(0.5)
    first, *signs = capsys.readouterr().err.splitlines()
    assert first == "monetrun: trial run"
    assert signs
    assert all(re.fullmatch(r"monetrun: trial run: \d+ s so far", sign) for sign in signs)
    time.sleep(0.2)
    with status(pipe(), "trial run", shown=False):
        time.sleep(0.2)
    assert not capsys.readouterr().err


def test_the_last_line_is_of_the_plan_that_is_taken():
    console = pipe()
    with SolverProgress(console, 10.0) as progress:
        progress(0.5, 12.0, 10.5)
        progress.found(0.25, 0.1)
    assert lines(console)[-1] == "monetrun: planning: +25.0% (bound 10.0%, gap 15.0%) 0.0 s"


@pytest.mark.parametrize(
    ("taken", "last"),
    [
        (0.2, ["monetrun: planning, bit for bit: +20.0% (bound 10.0%, gap 10.0%) 1.2 s"]),
        (0.1, ["monetrun: planning: +10.0% (bound 10.0%, gap 0.0%) 1.2 s"]),
    ],
)
def test_a_second_search_of_the_same_budget_has_its_name_which_stays_where_its_plan_is_taken(clock, taken, last):
    console = pipe()
    with SolverProgress(console, 10.0) as progress:
        clock(0.5)
        progress(0.5, 11.0, 10.5)
        progress.search("bit for bit")
        clock(0.25)
        progress(0.25, 12.0, 10.5)
        clock(0.5)
        progress.found(taken, 0.1)
    assert lines(console) == ["monetrun: planning: +10.0% (bound 5.0%, gap 5.0%) 0.5 s", *last]


def test_that_a_search_was_interrupted_is_said(monkeypatch):
    console = pipe()
    with SolverProgress(console, 10.0) as progress:
        progress(0.5, 11.0, 10.5)
        with timing.one_plan():
            timing.interrupt()
        progress.found(0.1, 0.05)
    assert "monetrun: interrupted: the best plan so far is taken" in lines(console)


def test_a_search_that_finds_nothing_for_long_says_that_it_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_SIGNS", 0.05)
    with SolverProgress(pipe(), 10.0):
        time.sleep(0.3)
    signs = capsys.readouterr().err.splitlines()
    assert signs
    assert all(re.fullmatch(r"monetrun: planning: \d+ s so far", sign) for sign in signs)
    time.sleep(0.2)
    assert not capsys.readouterr().err


def test_a_terminal_shows_what_is_done_and_for_how_long():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    with status(console, "trial run"):
        time.sleep(0.3)
    assert "monetrun: trial run 0 s" in console.file.getvalue()
    assert console.file.getvalue().endswith("\x1b[2K")


def test_another_budget_starts_again(clock):
    console = pipe()
    with SolverProgress(console, 10.0) as progress:
        progress.begin(3 << 20)
        clock(0.5)
        progress(0.5, 11.0, 10.0)
        progress.begin(4 << 20)
        clock(0.25)
        progress(0.25, 12.0, 10.0)
    assert lines(console) == [
        "monetrun: planning 3.0 MiB: +10.0% (bound 0.0%, gap 10.0%) 0.5 s",
        "monetrun: planning 4.0 MiB: +20.0% (bound 0.0%, gap 20.0%) 0.2 s",
    ]


@pytest.mark.parametrize("console", [pipe(), Console(file=io.StringIO(), force_terminal=True)])
def test_nothing_is_shown_if_shown_is_false(console):
    with SolverProgress(console, 10.0, shown=False) as progress:
        progress(0.5, 11.0, 10.0)
    assert lines(console) == []


def test_a_terminal_has_one_line_that_is_erased_at_the_end(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    with SolverProgress(console, 10.0) as progress:
        progress(0.5, 12.0, 11.0)
        progress(0.6, 11.5, 11.0)
        progress._live.refresh()
    text = console.file.getvalue()
    assert "+15.0% (bound 10.0%, gap 5.0%)" in text
    assert "\x1b[3" not in text.replace("\x1b[?", "")  # no colour
    assert text.endswith("\x1b[2K")  # the line has been erased


def test_a_bound_above_the_plan_is_shown_as_the_plan():
    progress = SolverProgress(pipe(), 10.0, shown=False)
    assert progress.text() == "no plan yet"
    progress(0.1, math.inf, 10.5)
    assert progress.text() == "no plan yet (bound 5.0%)"
    progress(0.2, 11.0, 11.5)
    assert progress.text() == "+10.0% (bound 10.0%, gap 0.0%)"


def twice(record):
    """Two micro-batches: the graph is called, and called back, twice."""
    first = [replace(e, delta_bytes=0, name="") if e.name == "" and e.kind == "outside" else e for e in record.events]
    return replace(record, events=(*first[:4], *record.events))


@pytest.mark.parametrize("make", [lambda r: r, twice])
def test_progress_and_bound_are_of_the_whole_step(make):
    record = make(chain_record(64))
    base = planner.baseline(record)
    budget = (base.plain.peak_bytes + base.frugal.peak_bytes) // 2
    reported = []
    options = Options(seconds=1.0, on_progress=lambda *figures: reported.append(figures))
    plan = planner.plan_step(record, budget, "hierarchical", options, base)
    plain = base.plain.seconds
    best = min(seconds for _, seconds, _ in reported)
    assert plan.overhead > 0
    assert best / plain - 1 == pytest.approx(plan.overhead)
    assert max(bound for _, _, bound in reported) / plain - 1 == pytest.approx(plan.bound, abs=1e-9)


def test_rounds_that_share_a_graph_share_what_it_costs_more():
    assert disjoint_sum({(0,): 2.0, (1, 2): 1.0}, [0.0] * 3) == 3.0
    assert disjoint_sum({(0, 1): 2.0, (1, 2): 1.5, (2,): 1.0}, [0.0] * 3) == 3.0
    assert disjoint_sum({}, []) == 0.0
    assert disjoint_sum({(0, 1): 2.0, (1, 2): -1.5}, [-1.0, -1.0, -3.0]) == -1.0  # of graph 2 its own
