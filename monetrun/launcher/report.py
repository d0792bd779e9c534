"""What monetrun prints about a plan before training, and about a run after it. Reports go to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from monetrun.core import codec
from monetrun.core.budget import format_budget, format_bytes, format_percent
from monetrun.core.clocks import StepClocks
from monetrun.core.errors import BudgetExceeded, StorageFailed
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import Plan, Pool
from monetrun.core.sharding import CollectiveSeconds
from monetrun.core.step import StepRecord
from monetrun.launcher import rank_figures
from monetrun.launcher.process import Stopped
from monetrun.launcher.rank_figures import RankFigures
from monetrun.planning.coverage import coverage
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals
from monetrun.planning.summary import MEASURE_AGAIN, planned_bytes, summary_lines
from monetrun.planning.summary import share as share

_LEAST_WIDTH = 200
_TIMED_FROM = 3  # of each graph, the call from which on some are timed (``runtime.call_timing``)
# Measured extra work that differs from the planned by more than this many times the smaller one, and this share of the
# step, says that costs are not what they were.
_FAR_OFF, _NEAR = 1.0, 0.05
_NO_END = "(did the script end with os._exit?)"


class _PipeConsole(Console):
    """A console whose reader may go away: rich would end the process then, with 1."""

    def on_broken_pipe(self) -> None:
        """Of stdout, raise ``BrokenPipeError``, as ``print`` does; of stderr, print nothing from now on."""
        self.quiet = True
        if not self.stderr:
            raise  # rich calls this where it has caught the error


def stderr_console(file: TextIO | None = None) -> Console:
    """The console for reports: stderr or ``file``, without color if that is no terminal or ``NO_COLOR`` is set."""
    return _PipeConsole(file=file, stderr=file is None, highlight=False, soft_wrap=True)


def stdout_console() -> Console:
    """The console for a command's result: stdout. A narrow terminal wraps what is wider; nothing is cut."""
    console = _PipeConsole(highlight=False, soft_wrap=True)
    console.width = max(console.width, _LEAST_WIDTH) if console.is_terminal else _LEAST_WIDTH
    return console


def warn(message: str) -> None:
    """Print a warning on stderr, also with ``--quiet``."""
    print(f"monetrun: warning: {message}", file=sys.stderr, flush=True)


def print_last(text: str) -> None:
    """Print to stdout after training. Where that fails, nothing changes of how training has ended: it is told."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave_stdout()
        warn("the report on stdout has no reader any more")
    except (OSError, StorageFailed) as error:
        leave_stdout()
        warn(f"the report on stdout is lost: {error.message if isinstance(error, StorageFailed) else error.strerror}")


def leave_stdout() -> None:
    """Print nothing to stdout from now on: it cannot be written, and the interpreter must not fail at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def table(*columns: str) -> Table:
    """An empty table without rules. Columns are right-aligned unless their heading begins with ``<``."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        left = column.startswith("<")
        made.add_column(column.removeprefix("<"), justify="left" if left else "right", no_wrap=True)
    return made


# ---- before training


def plan_lines(plan: Plan, title: str, record: StepRecord | None = None) -> list[str]:
    """``summary_lines`` for the console, with what is planned of a model in parts; workers tell that themselves."""
    parts = coverage(record) if record is not None else ""
    first, *others = map(escape, [*summary_lines(plan, title, record), *([f"  {parts}"] if parts else [])])
    return [f"[bold]{first}[/bold]", *others]


def allocated_line(plain_bytes: int, planned_bytes: int) -> str:
    """On CUDA, where the peaks above are of reserved bytes: those of allocated ones."""
    plain, planned = format_bytes(plain_bytes), format_bytes(planned_bytes)
    return f"  reserved on the device; of it allocated: plain {plain}, planned {planned}"


def plain_lines(plain: PlainPeaks, budget_bytes: int, script: str) -> list[str]:
    """What is printed where the plain run fits the budget."""
    return [
        f"[bold]monetrun  {escape(script)}[/bold]",
        f"  plain peak {format_bytes(plain.reserved_bytes)} reserved, {format_bytes(plain.allocated_bytes)} allocated |"
        f" budget {format_bytes(budget_bytes)} | fits: nothing to plan, the script runs as it is",
    ]


def clock_lines(plain: StepClocks, planned: StepClocks, ranks: int, link: str, *, sharded: bool = False) -> list[str]:
    """How long a step takes on several ranks, the optimizer's and the script's own work left out."""
    if not planned.buckets:
        return [
            f"  on {ranks} ranks nothing is reduced: the model is neither in DistributedDataParallel nor under FSDP2"
        ]
    what, many, behind = ("all-reduce", "buckets", "the backward")
    if sharded:
        what, many, behind = ("communication", "all-gathers and reduce-scatters", "computation")
    lines = [f"  on {ranks} ranks over {link}, without the optimizer's and the script's own work:"]
    for name, clocks in (("plain", plain), ("planned", planned)):
        lines.append(
            f"    {name:8} step {clocks.step_seconds:.4g} s = compute {clocks.compute_seconds:.4g} s + {what} "
            f"{clocks.communication_seconds:.4g} s in {clocks.buckets} {many} - {clocks.hidden_seconds:.4g} s of it "
            f"hidden behind {behind}"
        )
    return [*lines, f"    overhead {_more(plain, planned):+.1%}"]


def clock_json(plain: StepClocks, planned: StepClocks, ranks: int, link: str) -> dict[str, Any]:
    """The same figures, for ``--json``."""
    sides = {
        name: {**codec.to_plain(clocks), "hidden_seconds": clocks.hidden_seconds}
        for name, clocks in (("plain", plain), ("planned", planned))
    }
    return {"ranks": ranks, "link": link, **sides, "overhead": _more(plain, planned)}


def _more(plain: StepClocks, planned: StepClocks) -> float:
    return planned.step_seconds / plain.step_seconds - 1 if plain.step_seconds else 0.0


# ---- after training


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks measured, together.

    Attributes:
        plan: the plan they ran last, if any; where ranks differ, that of the one whose plain run takes most.
        measured_peak_bytes: the most that any rank allocated in a training step; None if that was not counted.
        measured_reserved_bytes: the most that any rank's CUDA allocator reserved; None on a CPU.
        retries: how often an allocator gave cached memory back in settled steps; None on a CPU.
        excess_bytes: what planned steps reserved beyond what is derived from their schedules.
        enforced: every step was held to the budget.
        unplanned: why there is no plan, where no warning has said it.
        collectives: what those of sharded modules took, where that was measured.
        measured_overhead: seconds of recomputation, and of slower implementations what they take longer, over all other
            seconds of the timed calls, the largest of all ranks; None if not measured.
        planned_extra_work: the same by the plan's costs; None where the plan's step is not known.
        steps: training steps of rank 0.
        warnings: of all ranks.
        measured_step: planned and measured bytes of one settled step; None if no rank measured them.
        needed_bytes: where memory has run out: the least budget that the failed allocation needs; 0 if not known.
        held: then, by kind, in the rank that needed most.
        most_planned: allocated bytes, and those that the budget bounds, the most that a plan had under which they
            trained: a step for which more is held is planned again.
        ranks: the figures of each.
        evaluating: a run without a plan has ended in an evaluation.
        interim: a worker has left no report at its end, only one before.
    """

    plan: Plan | None
    measured_peak_bytes: int | None
    measured_reserved_bytes: int | None
    retries: int | None
    excess_bytes: int
    measured_overhead: float | None
    steps: int
    warnings: tuple[str, ...]
    measured_step: MeasuredStep | None
    needed_bytes: int = 0
    held: Mapping[str, int] = field(default_factory=dict)
    most_planned: tuple[int, int] = (0, 0)
    planned_extra_work: float | None = None
    ranks: tuple[RankFigures, ...] = ()
    collectives: CollectiveSeconds = ()
    enforced: bool = True
    unplanned: str = ""
    evaluating: bool = False
    interim: bool = False

    def planned(self, plan: Plan) -> tuple[int, int]:
        """``most_planned``, and at least what ``plan`` has."""
        return max(plan.planned_peak_bytes, self.most_planned[0]), max(planned_bytes(plan), self.most_planned[1])


def read_outcome(folder: Path) -> Outcome:
    """Combine the reports that the ranks left in ``folder``.

    Raises:
        ValueError: a report is not one that a worker writes.
    """
    reports: list[Mapping[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    plans = [codec.from_plain(Plan, r["plan"]) for r in reports if r.get("plan")]
    peaks = [int(r["measured_peak_bytes"]) for r in reports if r.get("exact") and r.get("measured_peak_bytes")]
    reserved = [int(r["measured_reserved_bytes"]) for r in reports if r.get("measured_reserved_bytes")]
    overheads = [float(r["measured_overhead"]) for r in reports if r.get("measured_overhead") is not None]
    extra = [float(r["planned_extra_work"]) for r in reports if r.get("planned_extra_work") is not None]
    warnings = sorted({w for r in reports for w in r.get("warnings", ())})
    shortages: list[Mapping[str, Any]] = [r["short"] for r in reports if r.get("short")]
    short = max(shortages, key=lambda s: int(s.get("needed_bytes", 0)), default={})
    return Outcome(
        plan=max(plans, key=lambda p: p.plain_peak_bytes, default=None),  # of the rank that takes most
        measured_peak_bytes=max(peaks) if peaks else None,
        measured_reserved_bytes=max(reserved) if reserved else None,
        retries=max(int(r.get("allocation_retries", 0)) for r in reports) if reserved else None,
        excess_bytes=max((int(r.get("excess_bytes", 0)) for r in reports), default=0),
        collectives=codec.from_plain(CollectiveSeconds, max((r.get("collectives", []) for r in reports), default=[])),
        measured_overhead=max(overheads) if overheads else None,
        planned_extra_work=max(extra) if extra else None,
        enforced=all(r.get("exact") and not r.get("unbounded_steps") for r in reports),
        steps=max((int(r.get("steps", 0)) for r in reports), default=0),
        warnings=tuple(warnings),
        measured_step=_measured_step(reports),
        needed_bytes=int(short.get("needed_bytes", 0)),
        held=short.get("held", {}),
        unplanned=next((str(r["unplanned"]) for r in reports if r.get("unplanned")), ""),
        evaluating=any(r.get("evaluating") for r in reports),
        interim=any(r.get("interim") for r in reports),
        most_planned=_most_planned(reports),
        ranks=tuple(sorted(map(rank_figures.of_report, reports), key=lambda figures: figures.rank)),
    )


def _most_planned(reports: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    found = [r["most_planned"] for r in reports if r.get("most_planned")]
    return max((int(a) for a, _ in found), default=0), max((int(r) for _, r in found), default=0)


def _measured_step(reports: Sequence[Mapping[str, Any]]) -> MeasuredStep | None:
    ranks = [
        RankIntervals(int(r["rank"]), codec.from_plain(tuple[Interval, ...], r["intervals"]))
        for r in sorted(reports, key=lambda r: int(r["rank"]))
        if r.get("intervals")
    ]
    return MeasuredStep(tuple(ranks)) if ranks else None


def outcome_lines(outcome: Outcome, exit_code: int, *, planned: bool = False) -> list[str]:
    """The report at the end of a run: planned and measured figures; of a failed run, only why memory ran out.

    One that was stopped (Ctrl-C, SIGTERM) has not failed: its figures are those so far.

    Args:
        outcome: of the run.
        exit_code: of the launch.
        planned: the workers were given a plan.
    """
    plan = outcome.plan
    if exit_code == BudgetExceeded.exit_code and plan is not None:
        return _out_of_memory_lines(outcome, plan)
    stopped = isinstance(exit_code, Stopped)
    if exit_code != 0 and not (stopped and plan is not None):
        return []
    if planned and not outcome.ranks:
        return [f"[bold]monetrun[/bold]: the workers left no report {_NO_END}"]
    if plan is None:
        why = f": {outcome.unplanned}" if outcome.unplanned else ""
        return [f"[bold]monetrun[/bold]: nothing was planned{why}{_held(outcome)}"]
    if plan.pool is not None:
        return _cuda_lines(outcome, plan, plan.pool, stopped)
    measured = outcome.measured_peak_bytes
    peak = "not counted (see monetrun doctor)" if measured is None else format_bytes(measured)
    if measured is not None:
        peak += f" ({share(measured, plan.plain_peak_bytes)})"
    planned_peak, _ = outcome.planned(plan)
    return [
        _heading(outcome, stopped),
        f"  plain peak     {format_bytes(plan.plain_peak_bytes)}",
        f"  budget         {format_bytes(plan.budget_bytes)}{_budget_notes(outcome, plan, plan.plain_peak_bytes)}",
        f"  planned peak   {format_bytes(planned_peak)} ({share(planned_peak, plan.plain_peak_bytes)})",
        f"  measured peak  {peak}",
        _overhead_line(outcome, plan),
        *rank_figures.lines(outcome.ranks, outcome.steps),
    ]


def _budget_notes(outcome: Outcome, plan: Plan, plain: int) -> str:
    """The budget's share of the plain peak, where it is no more than that; whether it was enforced."""
    of_plain = f" ({share(plan.budget_bytes, plain)})" if plan.budget_bytes <= plain else ""
    return of_plain + ("" if outcome.enforced else ", not enforced in every step")


def _out_of_memory_lines(outcome: Outcome, plan: Plan) -> list[str]:
    """How much was needed, planned and held, and what to do."""
    planned, budget = format_bytes(planned_bytes(plan)), format_bytes(plan.budget_bytes)
    line = f"monetrun: out of memory: planned {planned}, budget {budget}"
    if not outcome.needed_bytes:
        return [f"{line}; memory outside the plan grew: give a larger --budget, or hold less between steps"]
    return [
        f"{line}, needed at least {format_bytes(outcome.needed_bytes)}",
        f"  held: {', '.join(f'{name} {format_bytes(nbytes)}' for name, nbytes in outcome.held.items() if nbytes)}",
        f"  give that much or more: --budget {format_budget(outcome.needed_bytes)}",
    ]


def _heading(outcome: Outcome, stopped: bool) -> str:
    by_then = f", as far as it was told: the workers left no report at their end {_NO_END}" * outcome.interim
    if stopped:
        by_then = ", and maybe more: the workers left no report at their end" if outcome.interim else ", then stopped"
    return f"[bold]monetrun[/bold]  {_steps(outcome.steps)}{by_then}"


def _steps(number: int) -> str:
    return f"{number} training step{'s' * (number != 1)}"


def _held(outcome: Outcome) -> str:
    """What the allocator held in a run without a plan."""
    if outcome.measured_reserved_bytes is None or outcome.measured_peak_bytes is None:
        return ""
    reserved, allocated = format_bytes(outcome.measured_reserved_bytes), format_bytes(outcome.measured_peak_bytes)
    return f"; {_steps(outcome.steps)} took {reserved} of the device ({allocated} allocated)"


def _cuda_lines(outcome: Outcome, plan: Plan, pool: Pool, stopped: bool) -> list[str]:
    """The report of a run on CUDA: reserved and allocated bytes."""
    plain = pool.plain_bytes
    planned_allocated, planned_reserved = outcome.planned(plan)

    def row(name: str, reserved: int | None, allocated: int | None) -> str:
        if reserved is None or allocated is None:
            return f"  {name:<15}not counted"
        held = f"{format_bytes(reserved)} reserved ({share(reserved, plain)})"
        return f"  {name:<15}{held}, {format_bytes(allocated)} allocated"

    retries = f"; {outcome.retries} allocation retries in settled steps" if outcome.retries else ""
    return [
        _heading(outcome, stopped),
        row("plain peak", plain, plan.plain_peak_bytes) + (", estimated" if pool.plain_is_estimated else ""),
        f"  {'budget':<15}{format_bytes(plan.budget_bytes)} reserved{_budget_notes(outcome, plan, plain)}",
        row("planned peak", planned_reserved, planned_allocated),
        row("measured peak", outcome.measured_reserved_bytes, outcome.measured_peak_bytes) + retries,
        _overhead_line(outcome, plan),
        *rank_figures.lines(outcome.ranks, outcome.steps),
    ]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """The same figures, for ``--json``."""
    plan = outcome.plan
    return {
        "plain_peak_bytes": plan and plan.plain_peak_bytes,
        "budget_bytes": plan and plan.budget_bytes,
        "budget_enforced": plan and outcome.enforced,
        "planned_peak_bytes": plan and outcome.planned(plan)[0],
        "measured_peak_bytes": outcome.measured_peak_bytes,
        "plain_reserved_bytes": plan and plan.pool and plan.pool.plain_bytes,
        "planned_reserved_bytes": plan and plan.pool and outcome.planned(plan)[1],
        "measured_reserved_bytes": outcome.measured_reserved_bytes,
        "allocation_retries": outcome.retries,
        "planned_overhead": plan and plan.overhead,
        "bound": plan and plan.bound,
        "planned_extra_work": outcome.planned_extra_work,
        "measured_recomputation": outcome.measured_overhead,
        "steps": outcome.steps,
        "warnings": list(outcome.warnings),
        "ranks": [codec.to_plain(figures) for figures in outcome.ranks],
    }


def _overhead_line(outcome: Outcome, plan: Plan) -> str:
    found, few = outcome.measured_overhead, " in so few steps" * (outcome.steps < _TIMED_FROM)
    measured = f"not measured{few}" if found is None else f"{format_percent(found, signed=True)} measured"
    expected = outcome.planned_extra_work
    planned = "" if expected is None else f"{format_percent(expected, signed=True)} planned, "
    line = f"  {'overhead':<15}{format_percent(plan.overhead, signed=True)} planned; extra work {planned}{measured}"
    if found is None or expected is None or abs(found - expected) <= _FAR_OFF * min(found, expected) + _NEAR:
        return line
    return f"{line}\n  costs are far off, or the machine was busy: {MEASURE_AGAIN}"
