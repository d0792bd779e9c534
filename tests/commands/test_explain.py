"""What `monetrun explain` prints."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from monetrun.commands import explain_measured
from monetrun.commands import main as cli
from monetrun.commands.explain import show
from monetrun.core.budget import format_bytes
from monetrun.core.options import Options
from monetrun.core.plan import Plan, Pool
from monetrun.core.step import replay
from monetrun.launcher.kept import keep_measured_step
from monetrun.launcher.keys import measured_key
from monetrun.launcher.plan_file import write_plan
from monetrun.machine.store import Store
from monetrun.planning import planner
from monetrun.planning.explain import ACTIVATIONS, explain
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals
from support.step_records import chain_record

RECORD = chain_record(64)


def test_the_peaks_operator_and_the_totals_are_printed():
    base = planner.baseline(RECORD)
    budget = int(base.frugal.peak_bytes + 0.3 * (base.plain.peak_bytes - base.frugal.peak_bytes))
    plan = planner.plan_step(RECORD, budget, "greedy", Options(seconds=1.0), base)
    out = io.StringIO()
    show(explain(plan, RECORD), "p.json", Console(file=out, width=160, highlight=False))
    text = out.getvalue()
    assert replay(RECORD, [g.schedule for g in plan.graphs]).peak_name in text
    assert f"{plan.overhead:+.1%} (bound {plan.bound:.1%}" in text
    assert ACTIVATIONS in text
    assert "block0" in text
    assert "\x1b" not in text


def test_on_a_device_peaks_are_reserved_as_the_budget_is_and_the_allocated_ones_stand_below():
    found = explain(planner.plan_step(RECORD, 10**9, "greedy", Options(seconds=1.0)), RECORD)
    allocated = format_bytes(found.plain_peak_bytes), format_bytes(found.planned_peak_bytes)
    on_device = replace(found, budget_bytes=9 << 20, plain_reserved_bytes=16 << 20, planned_reserved_bytes=8 << 20)
    out = io.StringIO()
    show(on_device, "p.json", Console(file=out, width=160, highlight=False))
    lines = out.getvalue().splitlines()
    assert lines[1].startswith("  plain peak 16.0 MiB | budget 9.0 MiB | planned 8.0 MiB (0.50x) | overhead")
    assert lines[2] == "  reserved on the device; of it allocated: plain {}, planned {}".format(*allocated)
    assert "Memory over the step, allocated" in lines
    out = io.StringIO()
    show(found, "p.json", Console(file=out, width=160, highlight=False))
    assert "reserved" not in out.getvalue()
    assert "Memory over the step" in out.getvalue().splitlines()


@pytest.mark.parametrize(("encoding", "highest"), [("utf-8", "█"), ("ascii", "#"), ("latin-1", "#")])
def test_memory_is_drawn_with_what_the_terminal_can_show(encoding, highest):
    found = explain(planner.plan_step(RECORD, 10**9, "greedy", Options(seconds=1.0)), RECORD)
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    show(found, "p.json", Console(file=out, width=160, highlight=False))
    out.flush()
    lines = raw.getvalue().decode(encoding).splitlines()
    (plain,) = (line for line in lines if line.startswith("  plain   "))
    assert highest in plain


def test_both_steps_are_drawn_as_wide_as_the_longer_one():
    base = planner.baseline(RECORD)
    found = explain(planner.plan_step(RECORD, base.frugal.peak_bytes, "greedy", Options(seconds=1.0), base), RECORD)
    assert len(found.plain_profile) < len(found.planned_profile)
    out = io.StringIO()
    show(found, "p.json", Console(file=out, width=160, highlight=False))
    lines = out.getvalue().splitlines()
    plain, planned = (next(x for x in lines if x.startswith(f"  {name:8}")) for name in ("plain", "planned"))
    assert plain.rindex("  ") == planned.rindex("  ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--json", "--html", "p.html"], "--html writes a file in place of what --json would print"),
        (["--measured", "--html", "p.html"], "--html writes a file in place of what --measured would print"),
        (
            ["--json", "--measured", "--snapshot", "-"],
            "--snapshot writes a file in place of what --json and --measured",
        ),
        (["--html", "-", "--snapshot", "-"], "--html - and --snapshot - both go to stdout"),
    ],
)
def test_options_of_which_one_would_be_dropped_are_refused(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", *words, "p.json"]) == 2
    assert said in capsys.readouterr().err


def test_a_page_goes_to_stdout_or_into_a_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    Store(tmp_path / "kept").put("probe", "r", RECORD)
    write_plan(planner.plan_step(RECORD, 10**9, "greedy", Options(seconds=1.0)), "p.json")
    assert cli.main(["explain", "--html", "-", "p.json"]) == 0
    page = capsys.readouterr().out
    assert page.lower().startswith("<!doctype html>")
    assert cli.main(["explain", "--html", "p.html", "p.json"]) == 0
    assert capsys.readouterr().out == "p.html\n"
    assert (tmp_path / "p.html").read_text() == page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "p.html", "p.json"]


KIB = 1 << 10
PLAN = Plan((), 2000 * KIB, 3000 * KIB, 1900 * KIB, 0.1, 0.05, "feasible", "ilp", "cpu", "2")
FIRST = RankIntervals(
    0,
    (
        Interval("forward", "ResNet", 100 * KIB, 1500 * KIB, 100 * KIB, 1503 * KIB),
        Interval("outside", "", 1400 * KIB, 1400 * KIB, 1400 * KIB, 1400 * KIB),
        Interval("backward", "ResNet", 1400 * KIB, 1900 * KIB, 1400 * KIB, 1898 * KIB),
        Interval("outside", "SGD.step", 200 * KIB, 300 * KIB, 200 * KIB, 300 * KIB),
    ),
)
SECOND = RankIntervals(1, (FIRST.intervals[0], replace(FIRST.intervals[1], measured_peak_bytes=1393 * KIB)))
STEP = MeasuredStep((FIRST, SECOND))


def test_measured_prints_a_row_for_each_interval_of_rank_0_and_a_line_for_each_further_rank():
    out = io.StringIO()
    explain_measured.show(PLAN, STEP, "p.json", Console(file=out, width=160, highlight=False))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines == [
        "p.json",
        "budget 2.0 MiB | planned peak 1.9 MiB | measured peak 1.9 MiB, in one settled step of rank 0",
        "interval planned start planned peak measured start measured peak difference",
        "ResNet forward 100.0 KiB 1.5 MiB 100.0 KiB 1.5 MiB +3.0 KiB +0.20% largest difference",
        "between calls 1.4 MiB 1.4 MiB 1.4 MiB 1.4 MiB 0 bytes +0.00%",
        "ResNet backward 1.4 MiB 1.9 MiB 1.4 MiB 1.9 MiB -2.0 KiB -0.11% largest measured peak",
        "SGD.step 200.0 KiB 300.0 KiB 200.0 KiB 300.0 KiB 0 bytes +0.00%",
        "start: allocated when the interval begins; difference: measured peak minus planned peak",
        "rank 1: largest difference -7.0 KiB (-0.50%), between calls",
    ]


def test_on_a_device_measured_bytes_stand_beside_planned_ones_of_their_kind():
    out = io.StringIO()
    plan = replace(PLAN, pool=Pool(4000 * KIB, 512 * KIB, 2048 * KIB))
    explain_measured.show(plan, STEP, "p.json", Console(file=out, width=160, highlight=False))
    assert out.getvalue().splitlines()[1:3] == [
        "  budget 2.0 MiB | planned peak 2.5 MiB, reserved on the device",
        "  of it allocated: planned peak 1.9 MiB | measured peak 1.9 MiB, in one settled step of rank 0",
    ]


def test_a_step_measured_exactly_as_planned_has_no_largest_difference():
    exact = RankIntervals(0, FIRST.intervals[1:2])
    out = io.StringIO()
    explain_measured.show(PLAN, MeasuredStep((exact,)), "p.json", Console(file=out, width=160, highlight=False))
    assert "largest measured peak" in out.getvalue()
    assert "largest difference" not in out.getvalue()


def test_measured_is_read_from_the_cache_by_the_plan(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "kept"))
    store = Store(tmp_path / "kept")
    store.put("measured", measured_key(PLAN), STEP)
    assert store.get("measured", measured_key(PLAN), MeasuredStep) == STEP
    plan_file = str(tmp_path / "p.json")
    write_plan(PLAN, plan_file)
    assert cli.main(["explain", "--measured", "--json", plan_file]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["budget_bytes"], found["planned_peak_bytes"]) == (2000 * KIB, 1900 * KIB)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    first = found["ranks"][0]
    assert (first["largest_measured_peak"], first["largest_difference"]) == (2, 0)
    assert first["intervals"][2] == {
        "kind": "backward",
        "name": "ResNet",
        "label": "ResNet backward",
        "planned_start_bytes": 1400 * KIB,
        "planned_peak_bytes": 1900 * KIB,
        "measured_start_bytes": 1400 * KIB,
        "measured_peak_bytes": 1898 * KIB,
        "difference_bytes": -2 * KIB,
        "difference": pytest.approx(-2 / 1900),
    }
    assert cli.main(["explain", "--measured", plan_file]) == 0
    assert "ResNet backward" in capsys.readouterr().out
    assert cli.main(["cache", "list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["measured", measured_key(PLAN)]


def test_a_plan_without_measurements_is_refused_with_the_launch_that_makes_them(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "kept"))
    plan_file = str(tmp_path / "p.json")
    write_plan(PLAN, plan_file)
    Store(tmp_path / "kept").put("measured", measured_key(replace(PLAN, budget_bytes=1)), STEP)
    assert cli.main(["explain", "--measured", plan_file]) == 83
    printed = capsys.readouterr().err
    assert f"no measurements of a step under the plan {plan_file}" in printed
    assert f"monetrun --plan {plan_file} train.py" in printed


def test_a_step_under_a_plan_that_was_made_while_training_is_found_by_the_plan_that_was_launched(tmp_path):
    store, again = Store(tmp_path), replace(PLAN, planned_peak_bytes=PLAN.planned_peak_bytes - 4 * KIB)
    keep_measured_step(store, (None, PLAN, again), None)
    assert store.get("measured", measured_key(PLAN), MeasuredStep) is None
    lower = RankIntervals(
        0, tuple(replace(i, planned_peak_bytes=i.planned_peak_bytes - 4 * KIB) for i in FIRST.intervals)
    )
    keep_measured_step(store, (PLAN, again), MeasuredStep((lower,)))
    for plan in (PLAN, again):
        found = explain_measured.find_measured_step(plan, store, "p.json")
        out = io.StringIO()
        explain_measured.show(plan, found, "p.json", Console(file=out, width=160, highlight=False))
        assert ("planned again while training" in out.getvalue()) == (plan is PLAN)
