"""A plan in a few lines: its peak, what that consists of, its overhead, and what the plan does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from monetrun.core.budget import format_bytes, format_overhead
from monetrun.core.event import calls_of_graphs
from monetrun.core.graph import Implementation
from monetrun.core.plan import Plan, Schedule, each_once
from monetrun.core.step import StepRecord
from monetrun.planning.ledger import ledger_line

# the end of a line about implementations that do not give eager's bits
ROUNDING = "differ from eager by rounding; --implementations exact leaves them out"

CHECK = "monetrun check compares each parameter"

# how costs that a busy machine has spoilt are made anew
MEASURE_AGAIN = "monetrun cache clear --kind costs --kind probe has the next launch measure them again"


def summary_lines(plan: Plan, title: str, record: StepRecord | None = None) -> list[str]:
    """A plan's peak, its ledger (the parts add up to the planned peak), and what the plan does.

    Args:
        plan: the plan.
        title: the first line.
        record: of the planned step; with it, other implementations are counted by kind, and runs over the whole step.
    """
    plain, planned = plain_bytes(plan), planned_bytes(plan)
    lines = [
        title,
        f"  plain peak {format_bytes(plain)} | budget {format_bytes(plan.budget_bytes)} | "
        f"planned {format_bytes(planned)} ({share(planned, plain)}) | "
        f"overhead {format_overhead(plan.overhead, plan.bound)}",
        *_allocated_lines(plan),
        f"  {ledger_line(plan.ledger)}",
    ]
    schedules = [graph.schedule for graph in plan.graphs]
    chosen = _chosen(plan, record)
    kinds = Counter(implementation.kind for implementation in chosen)
    others = sum(step.implementation > 0 for own in schedules for step in (*own.forward, *own.backward))
    counts = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common()) or str(others)
    forwards = [s.forward for s in schedules] if record is None else [each_once(g).forward for g in record.graphs]
    total = sum(map(len, forwards))
    operators, runs = again(schedules, record)
    more = f" ({runs} runs)" if runs != operators else ""
    inexact = inexact_runs(plan, record)
    unlike = () if record is None else record.unlike_eager
    bits = ", all with eager's bits" if kinds and not inexact and not unlike else ""
    lines.append(f"  {operators} of {total} forward operators run again{more}; other implementations: {counts}{bits}")
    if not operators and plan.budget_bytes >= plain:
        lines.append("  the plain step fits the budget: a smaller one, such as 0.6x, saves memory")
    if inexact:
        lines.append(f"  {inexact} of these {ROUNDING}")
    lines += _kept_lines(plan, record)
    lines += [f"  {told} (seen in the trial run): {CHECK}" for told in unlike]
    if record is not None and record.others_share:
        lines.append(
            f"  overhead and bound may be far off: other processes took {record.others_share:.0%} of the CPU while"
            f" operators were measured; {MEASURE_AGAIN}"
        )
    return lines


def _chosen(plan: Plan, record: StepRecord | None) -> list[Implementation]:
    """The implementations other than the default ones that the plan runs, each as often as it does."""
    return [
        graph.operators[step.operator].implementations[step.implementation]
        for graph, own in zip(() if record is None else record.graphs, plan.graphs, strict=False)
        for step in (*own.schedule.forward, *own.schedule.backward)
        if step.implementation
    ]


def inexact_runs(plan: Plan, record: StepRecord | None) -> int:
    """How often the plan runs an implementation that does not give eager's bits; 0 if the step is not known."""
    return sum(not implementation.exact for implementation in _chosen(plan, record))


def rounding_note(plan: Plan, record: StepRecord | None) -> str:
    """The end of a line about a plan: how much of what it runs does not give eager's bits; empty: all does."""
    inexact = inexact_runs(plan, record)
    return f"; {inexact} implementations in it {ROUNDING}" if inexact else ""


def _kept_lines(plan: Plan, record: StepRecord | None) -> list[str]:
    """How many sharded modules (FSDP2) keep their parameters, where that was chosen."""
    if not plan.keeps_parameters:
        return []
    kept = {name for name, keeps in plan.keeps_parameters.items() if keeps}
    line = f"  {len(kept)} of {len(plan.keeps_parameters)} sharded modules keep their parameters after the forward"
    if record is None or record.sharding is None:
        return [line]
    modules = [m for m in record.sharding.modules if m.choice]
    held = sum(m.nbytes for m in modules if m.name in kept)
    scripted = sum(m.kept for m in modules)
    return [f"{line} ({format_bytes(held)}; in the script {scripted})"]


def again(schedules: Sequence[Schedule], record: StepRecord | None) -> tuple[int, int]:
    """How many forward operators run again in the backward pass, and how many runs that are.

    Args:
        schedules: of a plan's graphs.
        record: of the planned step; without it, each graph is taken to be called once.
    """
    calls = calls_of_graphs(record.events) if record is not None else None
    counts = [schedule.runs_again() for schedule in schedules]
    times = [1 if calls is None else calls[k] for k in range(len(counts))]
    return sum(map(len, counts)), sum(n * sum(own.values()) for n, own in zip(times, counts, strict=True))


def share(nbytes: int, whole: int) -> str:
    """``"0.50x"``."""
    return f"{nbytes / whole:.2f}x" if whole else ""


def plain_bytes(plan: Plan) -> int:
    """The plain step's peak, in the bytes that the budget bounds."""
    return plan.plain_peak_bytes if plan.pool is None else plan.pool.plain_bytes


def planned_bytes(plan: Plan) -> int:
    """The planned step's peak, in the bytes that the budget bounds."""
    return plan.planned_peak_bytes if plan.pool is None else plan.pool.planned_bytes


def _allocated_lines(plan: Plan) -> list[str]:
    """On CUDA, where the peaks above are of reserved bytes: those of allocated ones."""
    if plan.pool is None:
        return []
    plain, planned = format_bytes(plan.plain_peak_bytes), format_bytes(plan.planned_peak_bytes)
    return [f"  reserved on the device; of it allocated: plain {plain}, planned {planned}"]
