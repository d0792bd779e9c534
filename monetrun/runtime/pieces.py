"""Plans for steps whose memory lies in pieces: see ``layout``."""

from __future__ import annotations

import logging

from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.step_changes import with_excess
from monetrun.planning import planner
from monetrun.planning.summary import rounding_note
from monetrun.runtime.layout import Scattered
from monetrun.runtime.moved_memory import options_within_a_step
from monetrun.runtime.running_plan import RunningPlan

_log = logging.getLogger("monetrun")


def plan_again(running: RunningPlan, found: Scattered) -> None:
    """Plan again with so much less; where no plan is found the present one runs, and the allocator decides."""
    record, plan = running.record, running.plan
    assert record is not None
    assert record.memory is not None
    page = record.memory.settings.large_segment_bytes
    excess = record.memory.excess_bytes + -(-found.beyond_bytes // page) * page
    options = options_within_a_step(running.settings)
    base, starts = planner.baseline(record, running._frugal), [tuple(g.schedule for g in plan.graphs)]
    more = with_excess(record, excess)
    try:
        made = planner.plan_step(more, plan.budget_bytes, running.settings.algorithm, options, base, starts)
    except (InfeasibleBudget, NoPlanInTime) as failure:
        _log.info("no other plan for a step whose memory lies in pieces: %s", failure.message)
        running.layout.stays_as_it_is()
        return
    running.record, running.excess_bytes = more, excess
    running.follow(made)
    running.note(
        f"what the script holds lies where a step has its memory: planned again within"
        f" {format_bytes(plan.budget_bytes)}, overhead {made.overhead:+.1%}{rounding_note(made, more)}"
    )
