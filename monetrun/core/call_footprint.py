"""What one call of a graph allocates under a schedule, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.freed import freed_bytes
from monetrun.core.graph import Costs, Graph
from monetrun.core.plan import Schedule
from monetrun.core.simulate import simulate


@dataclass(frozen=True, slots=True)
class CallFootprint:
    """What a graph's forward and backward do to the bytes allocated, under one schedule.

    Attributes:
        forward_peak_bytes: the most during the forward, less at its start.
        saved_bytes: allocated at the forward's end (saved values and outputs), less at its start.
        backward_peak_bytes: the most during the backward, less at its start.
        backward_delta_bytes: allocated at the backward's end, less at its start (negative: it frees).
        peak_steps: where the two peaks are, as indices of the whole schedule.
        seconds: of both.
    """

    forward_peak_bytes: int
    saved_bytes: int
    backward_peak_bytes: int
    backward_delta_bytes: int
    peak_steps: tuple[int, int]
    seconds: float


def call_footprint(graph: Graph, costs: Costs, schedule: Schedule, released: Sequence[int] = ()) -> CallFootprint:
    """Simulate ``schedule``; tensors ``released`` in the backward are freed there (see ``freed_after``).

    Raises:
        ScheduleError: the schedule is not valid for the graph.
    """
    timeline = simulate(graph, costs, schedule)
    cut = len(schedule.forward)
    saved = timeline.after_bytes[cut - 1] if cut else 0
    freed = freed_bytes(graph, schedule, released)
    forward = timeline.during_bytes[:cut]
    backward = [high - before for high, before in zip(timeline.during_bytes[cut:], freed, strict=False)]
    high = (max(forward, default=0), max(backward, default=0))
    steps = (
        forward.index(high[0]) if forward else -1,
        cut + backward.index(high[1]) if backward else -1,
    )
    end = timeline.after_bytes[-1] if timeline.after_bytes else 0
    return CallFootprint(high[0], saved, high[1] - saved, end - saved - freed[-1], steps, timeline.seconds)
