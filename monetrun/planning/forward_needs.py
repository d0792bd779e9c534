"""What a training step allocates from each of its forward passes on: so much must be free when that begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.event import is_optimizer_step
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.last_outputs import is_drop
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, StepRecord, StepTimeline, replay


@dataclass(frozen=True, slots=True)
class ForwardNeed:
    """Allocated bytes of a step, seen from the beginning of one of its forward passes.

    Attributes:
        held_bytes: allocated when it begins.
        planned_bytes: the most that is allocated from then to the step's end, less ``held_bytes``.
        plain_bytes: the same of the plain step.
        last_outputs_bytes: part of ``held_bytes``: outputs of the last step, which the script drops later in this one.
        saved_bytes: what the pass leaves allocated: its outputs, and what is saved for its backward.
        plain_saved_bytes: the same of the plain step.
        plain_forward_bytes: ``plain_bytes`` until the next backward begins.
    """

    held_bytes: int
    planned_bytes: int
    plain_bytes: int
    last_outputs_bytes: int = 0
    saved_bytes: int = 0
    plain_saved_bytes: int = 0
    plain_forward_bytes: int = 0


def forward_needs(record: StepRecord, schedules: Sequence[Schedule]) -> dict[int, tuple[ForwardNeed, ...]]:
    """Of each graph of ``record``, by its index: the needs of its calls in a step, in order.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    planned = replay(record, schedules)
    plain = replay(*plain_step(record))
    needs: dict[int, tuple[ForwardNeed, ...]] = {}
    most_planned = most_plain = forward_plain = dropped = 0
    for i in reversed(range(len(record.events))):
        event = record.events[i]
        most_planned, most_plain = max(most_planned, planned.high_bytes[i]), max(most_plain, plain.high_bytes[i])
        forward_plain = 0 if event.kind == BACKWARD else max(forward_plain, plain.high_bytes[i])
        dropped -= event.delta_bytes if is_drop(event) else 0
        if event.kind == FORWARD:
            held = planned.start_bytes[i]
            start = plain.start_bytes[i]
            saved, plain_saved = (_left(t, i) for t in (planned, plain))
            more = dropped, saved, plain_saved, forward_plain - start
            need = ForwardNeed(held, most_planned - held, most_plain - start, *more)
            needs[event.graph] = (need, *needs.get(event.graph, ()))
    return needs


def needs_by_place(record: StepRecord, schedules: Sequence[Schedule]) -> dict[int, tuple[ForwardNeed, ...]] | None:
    """Of a step that accumulates gradients of several graphs (lengths of a batch), which may come in any order.

    Returns:
        Of each graph, by its index: its needs as the first pass of a step, as the second, and so on. Later passes hold
        the gradients of earlier ones. None where the step is not of passes that each are a forward and its backward.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    calls = [i for i, event in enumerate(record.events) if event.kind != OUTSIDE]
    passes = list(zip(calls[::2], calls[1::2], strict=False))
    of = [(record.events[i], record.events[j]) for i, j in passes]
    if len(calls) % 2 or any((f.kind, b.kind) != (FORWARD, BACKWARD) or f.graph != b.graph for f, b in of):
        return None
    if len({forward.graph for forward, _ in of}) < 2:
        return None  # in any order they are the same
    if any(is_optimizer_step(e.kind, e.name) for e in record.events[: calls[-1]]):
        return None
    planned, plain = replay(record, schedules), replay(*plain_step(record))
    drops = [-event.delta_bytes if is_drop(event) else 0 for event in record.events]
    own: dict[int, list[int]] = {}
    for i, j in passes:
        k = record.events[i].graph
        saved = (_left(t, i) for t in (planned, plain))
        of_it = [_most(planned, i, j), _most(plain, i, j), *saved, _most(plain, i, j - 1)]
        own[k] = list(map(max, own.get(k, of_it), of_it))
    found: dict[int, tuple[ForwardNeed, ...]] = {k: () for k in own}
    for i, j in passes:
        held = planned.start_bytes[i]
        later, later_plain = (max(t.high_bytes[j + 1 :], default=0) - t.start_bytes[i] for t in (planned, plain))
        for k, (most, most_plain, *more) in own.items():
            need = ForwardNeed(held, max(most, later), max(most_plain, later_plain), sum(drops[i:]), *more)
            found[k] = (*found[k], need)
    return found


def _left(timeline: StepTimeline, event: int) -> int:
    """What an event leaves allocated; 0 of the last one, for which that is not told."""
    start = timeline.start_bytes
    return int(start[event + 1] - start[event]) if event + 1 < len(start) else 0


def _most(timeline: StepTimeline, first: int, last: int) -> int:
    """The most that is allocated from one event to another, beyond what is held before."""
    return int(max(timeline.high_bytes[first : last + 1]) - timeline.start_bytes[first])
