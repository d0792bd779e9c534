"""What a training step allocates from each of its forward passes on: so much must be free when that begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.graph import FORWARD
from monetrun.core.last_outputs import is_drop
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Schedule
from monetrun.core.step import StepRecord, replay


@dataclass(frozen=True, slots=True)
class ForwardNeed:
    """Allocated bytes of a step, seen from the beginning of one of its forward passes.

    Attributes:
        held_bytes: allocated when it begins.
        planned_bytes: the most that is allocated from then to the step's end, less ``held_bytes``.
        plain_bytes: the same of the plain step.
        last_outputs_bytes: part of ``held_bytes``: outputs of the last step, which the script drops later in this one.
    """

    held_bytes: int
    planned_bytes: int
    plain_bytes: int
    last_outputs_bytes: int = 0


def forward_needs(record: StepRecord, schedules: Sequence[Schedule]) -> dict[int, tuple[ForwardNeed, ...]]:
    """Of each graph of ``record``, by its index: the needs of its calls in a step, in order.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    planned = replay(record, schedules)
    plain = replay(*plain_step(record))
    needs: dict[int, tuple[ForwardNeed, ...]] = {}
    most_planned = most_plain = dropped = 0
    for i in reversed(range(len(record.events))):
        event = record.events[i]
        most_planned, most_plain = max(most_planned, planned.high_bytes[i]), max(most_plain, plain.high_bytes[i])
        dropped -= event.delta_bytes if is_drop(event) else 0
        if event.kind == FORWARD:
            held = planned.start_bytes[i]
            need = ForwardNeed(held, most_planned - held, most_plain - plain.start_bytes[i], dropped)
            needs[event.graph] = (need, *needs.get(event.graph, ()))
    return needs
