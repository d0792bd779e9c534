"""Two searches for one budget, since implementations that are not bitwise identical to eager have to be worth it.

One may use all implementations, the other one those that give eager's bits. The first one's plan is taken only where it
saves ``INEXACT_MUST_SAVE`` of the step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from monetrun.core.graph import EXACT, KINDS, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.step import StepRecord, replay
from monetrun.planning.device_budget import Found
from monetrun.solve import timing

INEXACT_MUST_SAVE = 0.05


def offers_inexact(graph: Graph, options: Options) -> bool:
    """Whether the options allow an implementation that is not bitwise identical to eager."""
    implementations = (i for op in graph.operators for i in op.implementations)
    return any(not i.exact and i.allowed_by(options.implementations) for i in implementations)


def allowed(record: StepRecord, schedules: Sequence[Schedule], options: Options) -> bool:
    """Whether the options allow what the schedules recompute and all implementations they use."""
    for graph, schedule in zip(record.graphs, schedules, strict=True):
        if not options.recompute and any(s.operator < graph.forward_count for s in schedule.backward):
            return False
        for step in (*schedule.forward, *schedule.backward):
            implementation = graph.operators[step.operator].implementations[step.implementation]
            if not implementation.allowed_by(options.implementations):
                return False
    return True


def exact_where_nearly_as_fast(
    record: StepRecord, budget_bytes: int, options: Options, solved: Callable[..., Found]
) -> Found:
    """What ``solved`` gives for ``options`` or, the second time, with exact implementations only."""
    kinds = KINDS if options.implementations is None else options.implementations
    options.on_search("")
    half = replace(options, seconds=options.seconds / 2)
    exact = replace(half, implementations=(*kinds, EXACT))
    found = solved(half)
    is_exact = allowed(record, found.schedules, exact)
    if is_exact and found.status == "optimal":
        return found
    first = replay(record, found.schedules)
    if timing.interrupted() and first.peak_bytes <= budget_bytes:
        return found
    options.on_search("bit for bit")
    other = solved(exact, [found.schedules] if is_exact else ())
    timeline = replay(record, other.schedules)
    if timeline.peak_bytes > budget_bytes or not allowed(record, other.schedules, exact):
        return found
    as_fast = timeline.seconds <= first.seconds * (1 if is_exact else 1 + INEXACT_MUST_SAVE)
    if first.peak_bytes <= budget_bytes and not as_fast:
        return found
    bound_seconds = found.bound_seconds
    if timeline.seconds <= bound_seconds * (1 + INEXACT_MUST_SAVE):  # no other one can save enough
        bound_seconds = max(bound_seconds, min(other.bound_seconds, timeline.seconds))
    proven = timeline.seconds <= bound_seconds * (1 + options.gap)
    return Found(other.schedules, bound_seconds, found.status if proven else "feasible")
