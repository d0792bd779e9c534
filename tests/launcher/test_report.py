"""What the launcher reads from the ranks' reports, and what it keeps of them."""

from __future__ import annotations

import json
import signal
from dataclasses import replace

import pytest

from monetrun.core import codec
from monetrun.core.plan import GraphPlan, Plan, Pool, Schedule, parse_plan
from monetrun.launcher import keys
from monetrun.launcher.job import open_job
from monetrun.launcher.parser import launch_parser
from monetrun.launcher.process import Stopped
from monetrun.launcher.report import outcome_json, outcome_lines, read_outcome, stdout_console, table
from monetrun.machine.store import Store, default_root
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals

PLAN = Plan((GraphPlan("f", "s", Schedule((), ()), ()),), 5, 9, 4, 0.1, 1 / 3, "feasible", "ilp", "cpu", "2")


def interval(measured_bytes):
    return Interval("forward", "Net", 10, 100, 11, measured_bytes)


def write_report(folder, rank, *intervals, plan=PLAN, **more):
    found = {"rank": rank, "plan": plan and codec.to_plain(plan), "intervals": codec.to_plain(intervals)}
    found |= {"exact": True, **more}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def test_workers_that_leave_no_report_under_a_plan_are_not_said_to_have_none(tmp_path):
    nothing = read_outcome(tmp_path)
    assert outcome_lines(nothing, 0, planned=True) == [
        "[bold]monetrun[/bold]: the workers left no report (did the script end with os._exit?)"
    ]
    assert outcome_lines(nothing, 0) == ["[bold]monetrun[/bold]: nothing was planned"]
    assert outcome_lines(nothing, 1, planned=True) == []
    write_report(tmp_path, 0, steps=3, interim=True)
    told = "3 training steps, as far as it was told: the workers left no report at their end (did the script end with"
    assert told in outcome_lines(read_outcome(tmp_path), 0, planned=True)[0]
    write_report(tmp_path, 0, steps=5)
    assert outcome_lines(read_outcome(tmp_path), 0, planned=True)[0] == "[bold]monetrun[/bold]  5 training steps"


@pytest.mark.parametrize("pool", [None, Pool(9 << 20, 1 << 20, 3 << 20)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_was_stopped_has_the_figures_so_far(number, pool, tmp_path):
    stopped = Stopped(128 + number)
    assert outcome_lines(read_outcome(tmp_path), stopped, planned=True) == []
    write_report(tmp_path, 0, steps=3, plan=replace(PLAN, pool=pool))
    lines = outcome_lines(read_outcome(tmp_path), stopped, planned=True)
    assert lines[0] == "[bold]monetrun[/bold]  3 training steps, then stopped"
    assert any(line.startswith("  planned peak") for line in lines)
    assert outcome_lines(read_outcome(tmp_path), 128 + number, planned=True) == []  # a worker's, not the launcher's
    write_report(tmp_path, 0, steps=3, plan=PLAN, interim=True)
    assert "3 training steps, and maybe more" in outcome_lines(read_outcome(tmp_path), stopped, planned=True)[0]


def test_the_intervals_of_all_ranks_that_measured_them_are_read_by_rank(tmp_path):
    write_report(tmp_path, 10, interval(110))
    write_report(tmp_path, 2, interval(102))
    write_report(tmp_path, 3)
    expected = MeasuredStep((RankIntervals(2, (interval(102),)), RankIntervals(10, (interval(110),))))
    assert read_outcome(tmp_path).measured_step == expected


def test_without_intervals_nothing_was_measured(tmp_path):
    assert read_outcome(tmp_path).measured_step is None
    write_report(tmp_path, 0)
    assert read_outcome(tmp_path).measured_step is None


@pytest.mark.parametrize(
    ("words", "plan", "kept"),
    [([], PLAN, ["measured"]), (["--no-cache"], PLAN, []), ([], None, [])],
)
def test_what_was_measured_under_a_plan_is_kept_unless_the_cache_is_not_used(words, plan, kept, monkeypatch, tmp_path):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path))
    options, _ = launch_parser().parse_launch([*words, "--quiet", "train.py"])
    with open_job(options) as job:
        write_report(job._reports, 0, interval(101), plan=plan)
        job.finish(0)
    store = Store(default_root())
    assert [entry.kind for entry in store.entries()] == kept
    if kept:
        read_from_a_file = parse_plan(codec.dumps(PLAN))
        found = store.get("measured", keys.measured_key(read_from_a_file), MeasuredStep)
        assert found == MeasuredStep((RankIntervals(0, (interval(101),)),))


def test_a_table_that_is_wider_than_the_terminal_is_not_cut(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    console = stdout_console()
    assert console.is_terminal
    rows = table("<name", "difference")
    rows.add_row("x" * 40, "1.2e-07")
    console.print(rows)
    assert "1.2e-07" in capsys.readouterr().out


@pytest.mark.parametrize("pool", [None, Pool(9 << 20, 1 << 20, 3 << 20)])
@pytest.mark.parametrize(("budget", "said"), [(6 << 20, "(0.67x)"), (9 << 20, "(1.00x)"), (900 << 20, "")])
def test_a_budgets_share_is_left_out_where_it_is_more_than_the_plain_peak(pool, budget, said, tmp_path):
    plan = replace(PLAN, budget_bytes=budget, plain_peak_bytes=9 << 20, planned_peak_bytes=4 << 20, pool=pool)
    write_report(tmp_path, 0, plan=plan)
    (line,) = [line for line in outcome_lines(read_outcome(tmp_path), 0) if line.startswith("  budget ")]
    assert ("x)" in line) == bool(said)
    assert line.endswith(said)


@pytest.mark.parametrize("pool", [None, Pool(9 << 20, 1 << 20, 3 << 20)])
@pytest.mark.parametrize(
    ("report", "enforced"), [({}, True), ({"unbounded_steps": True}, False), ({"exact": False}, False)]
)
def test_a_budget_that_was_not_enforced_in_every_step_of_a_rank_is_said_so(pool, report, enforced, tmp_path):
    plan = replace(PLAN, budget_bytes=6 << 20, plain_peak_bytes=9 << 20, pool=pool)
    write_report(tmp_path, 0, plan=plan)
    write_report(tmp_path, 1, plan=plan, **report)
    outcome = read_outcome(tmp_path)
    (line,) = [line for line in outcome_lines(outcome, 0) if line.startswith("  budget ")]
    assert line.endswith(", not enforced in every step") == (not enforced)
    assert outcome_json(outcome)["budget_enforced"] == enforced


@pytest.mark.parametrize("pool", [None, Pool(9 << 20, 1 << 20, 3 << 20)])
def test_planned_figures_are_the_most_that_a_plan_had_in_any_rank(pool, tmp_path):
    plan = replace(PLAN, budget_bytes=8 << 20, plain_peak_bytes=9 << 20, planned_peak_bytes=4 << 20, pool=pool)
    for rank, most in enumerate([(5 << 20, 6 << 20), (4 << 20, 7 << 20), (0, 0)]):
        write_report(tmp_path, rank, plan=plan, most_planned=most)
    outcome = read_outcome(tmp_path)
    found = outcome_json(outcome)
    assert found["planned_peak_bytes"] == 5 << 20
    assert found["planned_reserved_bytes"] == (pool and 7 << 20)
    (line,) = [line for line in outcome_lines(outcome, 0) if line.startswith("  planned peak")]
    assert "5.0 MiB" in line
    assert ("7.0 MiB reserved" in line) == bool(pool)


@pytest.mark.parametrize("pool", [None, Pool(9 << 20, 1 << 20, 3 << 20)])
def test_the_ranks_peaks_and_a_slow_one_are_named(pool, tmp_path):
    plan = replace(PLAN, pool=pool)
    for rank, (peak, seconds) in enumerate([(3 << 20, 0.2), (5 << 20, 0.25), (4 << 20, 0.21)]):
        measured = {"measured_peak_bytes": peak, "measured_reserved_bytes": pool and 2 * peak, "exact": True}
        write_report(tmp_path, rank, plan=plan, most_planned=(4, 6), call_seconds=seconds, steps=20, **measured)
    outcome = read_outcome(tmp_path)
    few = replace(outcome, steps=19)
    assert not any("is slow" in line for line in outcome_lines(few, 0))  # a few calls on a busy machine
    (line,) = [line for line in outcome_lines(outcome, 0) if line.startswith("  ranks")]
    least, most = ("6.0 MiB", "10.0 MiB") if pool else ("3.0 MiB", "5.0 MiB")
    assert f"3: measured {least} (rank 0) to {most} (rank 1)" in line
    assert line.endswith("rank 1 is slow: its calls take 1.25 times as long as the fastest rank's")
    first = {"rank": 0, "planned_bytes": 6, "measured_bytes": (6 if pool else 3) << 20, "call_seconds": 0.2}
    assert outcome_json(outcome)["ranks"][0] == {**first, "measured_overhead": None}


def test_ranks_that_are_alike_are_not_called_slow_and_one_rank_has_no_line(tmp_path):
    write_report(tmp_path, 0, call_seconds=0.2, measured_peak_bytes=9, exact=True)
    assert not any(line.startswith("  ranks") for line in outcome_lines(read_outcome(tmp_path), 0))
    write_report(tmp_path, 1, call_seconds=0.21, measured_peak_bytes=9, exact=True)
    (line,) = [line for line in outcome_lines(read_outcome(tmp_path), 0) if line.startswith("  ranks")]
    assert line.split() == ["ranks", "2:", "measured", "9", "bytes", "on", "each"]


@pytest.mark.parametrize(
    ("words", "node", "seen"),
    [
        ([], 0, False),
        (["--redirects=1"], 0, False),
        (["--redirects=3"], 0, True),
        (["--redirects=3"], 1, False),
        (["--redirects=0:2,1:3"], 0, True),
        (["--redirects=1:3"], 0, False),
        (["--redirects=3", "--tee=2"], 0, False),
        (["--redirects=3", "--tee=1:3"], 0, True),
        (["--local-ranks-filter=1,2"], 0, True),
        (["--tee=3", "--local-ranks-filter=1"], 0, True),
        (["--local-ranks-filter=0,1"], 0, False),
        (["--redirects=3", "--quiet"], 0, True),
    ],
)
def test_warnings_of_workers_whose_stderr_goes_elsewhere_are_told_at_the_end(words, node, seen, capsys):
    options, _ = launch_parser().parse_launch(["--no-cache", "--nproc-per-node=2", *words, "train.py"])
    for exit_code in (0, 1):
        with open_job(options) as job:
            job.node = node
            write_report(job._reports, 0, plan=None, warnings=["Net runs without a plan: [it] has hooks"])
            job.finish(exit_code)
        line = "monetrun: warning: Net runs without a plan: [it] has hooks\n"
        assert capsys.readouterr().err.count(line) == seen


@pytest.mark.parametrize(
    ("steps", "why"), [(2, "extra work not measured in so few steps"), (9, "extra work not measured")]
)
def test_a_run_too_short_for_its_extra_work_to_be_timed_says_so(steps, why, tmp_path):
    write_report(tmp_path, 0, plan=PLAN, steps=steps)
    outcome = replace(read_outcome(tmp_path), measured_overhead=None)
    (line,) = [line for line in outcome_lines(outcome, 0) if line.startswith("  overhead")]
    assert line.endswith(why)


def test_where_ranks_differ_the_figures_are_of_the_one_whose_plain_run_takes_most(tmp_path):
    """Else a measured peak would seem to be beyond the budget: that of a rank with larger batches, which is larger."""
    larger = replace(PLAN, plain_peak_bytes=2 * PLAN.plain_peak_bytes, budget_bytes=2 * PLAN.budget_bytes)
    for rank, plan in enumerate((PLAN, larger)):
        write_report(tmp_path, rank, plan=plan, measured_peak_bytes=plan.budget_bytes, exact=True)
    found = outcome_json(read_outcome(tmp_path))
    assert found["plain_peak_bytes"] == larger.plain_peak_bytes
    assert found["measured_peak_bytes"] == found["budget_bytes"] == larger.budget_bytes
