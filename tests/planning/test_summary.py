"""What is said of a plan in a few lines, and that `explain` counts the same."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from monetrun.commands.explain import show
from monetrun.core.options import Options
from monetrun.core.plan import GraphPlan, Step
from monetrun.launcher.report import plan_lines
from monetrun.planning import planner
from monetrun.planning.explain import explain
from monetrun.planning.ledger import ledger_line
from monetrun.planning.summary import rounding_note, summary_lines
from support.step_records import chain_record

RECORD = chain_record(64)


def plan_at(share, algorithm="greedy"):
    base = planner.baseline(RECORD)
    budget = int(base.frugal.peak_bytes + share * (base.plain.peak_bytes - base.frugal.peak_bytes))
    return planner.plan_step(RECORD, budget, algorithm, Options(seconds=1.0), base)


def running_again_twice(plan):
    """The plan with a second run of what it recomputes first."""
    (graph,) = plan.graphs
    again = next(s for s in graph.schedule.backward if s.operator in graph.schedule.runs_again())
    schedule = replace(graph.schedule, backward=(Step(again.operator), *graph.schedule.backward))
    return replace(plan, graphs=(GraphPlan.of(RECORD.graphs[0], schedule),))


def test_operators_that_run_again_are_counted_once_and_their_runs_beside_them():
    plan = plan_at(0.3)
    (graph,) = plan.graphs
    runs = graph.schedule.runs_again()
    operators = len(runs)
    assert operators == sum(runs.values()) > 0
    total = len(graph.schedule.forward)
    (line,) = [line for line in summary_lines(plan, "t", RECORD) if "run again" in line]
    assert line.startswith(f"  {operators} of {total} forward operators run again; other implementations: ")
    (line,) = [line for line in summary_lines(running_again_twice(plan), "t", RECORD) if "run again" in line]
    assert f"{operators} of {total} forward operators run again ({operators + 1} runs); " in line


def test_a_budget_that_the_plain_step_fits_is_told_to_be_one():
    told = [any("the plain step fits" in line for line in summary_lines(plan_at(share), "t")) for share in (1.0, 0.3)]
    assert told == [True, False]


def test_explain_counts_the_same():
    plan = running_again_twice(plan_at(0.3))
    plan = replace(plan, planned_peak_bytes=explain_peak(plan))
    out = io.StringIO()
    show(explain(plan, RECORD), "p.json", Console(file=out, width=160, highlight=False))
    operators = len(plan.graphs[0].schedule.runs_again())
    assert f"By module: {operators} operators run again ({operators + 1} runs); with other" in out.getvalue()


def explain_peak(plan):
    from monetrun.core.step import replay

    return replay(RECORD, [g.schedule for g in plan.graphs]).peak_bytes


def test_a_ledger_is_printed_in_one_order():
    rows = {"script (data, buffers, ...)": 3 << 20, "optimizer state": 2 << 20, "parameters": 1 << 20}
    rows |= {"fragmentation": 5 << 20, "activations and workspace": 4 << 20}
    expected = (
        "parameters 1.0 MiB + optimizer state 2.0 MiB + script (data, buffers, ...) 3.0 MiB"
        " + activations and workspace 4.0 MiB + fragmentation 5.0 MiB"
    )
    assert ledger_line(rows) == ledger_line(dict(reversed(rows.items()))) == expected


def test_the_console_shows_brackets_as_they_are():
    lines = plan_lines(plan_at(1.0), "monetrun  [red]train.py", RECORD)
    assert lines[0] == r"[bold]monetrun  \[red]train.py[/bold]"


def test_what_does_not_give_eagers_bits_is_counted_and_a_plan_made_later_says_so_too():
    graph = RECORD.graphs[0]
    rounding = [
        replace(op, implementations=(op.implementations[0], *(replace(i, exact=False) for i in op.implementations[1:])))
        for op in graph.operators
    ]
    record = replace(RECORD, graphs=(replace(graph, operators=tuple(rounding)),))
    plan = plan_at(0.3)
    schedule = plan.graphs[0].schedule
    runs = sum(step.implementation > 0 for step in (*schedule.forward, *schedule.backward))
    assert runs > 0
    assert any(line.startswith(f"  {runs} of these differ from eager") for line in summary_lines(plan, "t", record))
    assert rounding_note(plan, record).startswith(f"; {runs} implementations in it differ from eager by rounding")
    assert rounding_note(plan, RECORD) == rounding_note(plan, None) == ""


def test_what_the_trial_has_found_unlike_eager_is_a_line():
    record = replace(RECORD, unlike_eager=("Net: 1 of 1 results differ from eager's",))
    (line,) = [line for line in summary_lines(plan_at(1.0), "t", record) if "Net:" in line]
    assert line == (
        "  Net: 1 of 1 results differ from eager's (seen in the trial run): monetrun check compares each parameter"
    )
