"""A whole training step: what a trial run recorded of it, and its replay under other schedules.

A step is more than its graphs: weights and optimizer state stay allocated, the script computes a loss between a forward
and its backward, holds the batch and last step's outputs, and runs the optimizer. A ``StepRecord`` has the graphs, and
how many bytes the script allocated between their calls. ``replay`` combines the two, so that the peak of the *step*
under any schedules comes from ``simulate`` and from measured bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.core.simulate import simulate

OUTSIDE = "outside"
LAST_GRADIENTS = "last step's gradients"
LAST_OUTPUTS = "last step's outputs"
LIBRARIES = "cuBLAS workspaces"


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of a training step.

    Attributes:
        kind: ``"forward"`` or ``"backward"`` (a call of a graph), or ``"outside"`` (the script between two calls).
        graph: index of the graph, -1 outside.
        delta_bytes: outside: allocated at its end, less at its start.
        peak_bytes: outside: the most allocated during it, less at its start.
        name: for messages (``"SGD.step"``).
        released: backward: ids of the graph's external tensors (its arguments, tangents) and outputs that only its
            saved values hold by then; they are freed within the call, after their last reader.
        requests: outside, where the allocator records them (CUDA): bytes requested, in order; ``-n`` frees what the
            step's ``n``-th such request got.
    """

    kind: str
    graph: int = -1
    delta_bytes: int = 0
    peak_bytes: int = 0
    name: str = ""
    released: tuple[int, ...] = ()
    requests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks of the caching allocator that lie side by side.

    Attributes:
        small: they belong to the pool for requests of up to 1 MiB.
        blocks: bytes of each, in order: in use, or, negative, free.
    """

    small: bool
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What decides how many bytes the caching allocator reserves in a step. CUDA only.

    Attributes:
        settings: of the allocator, in planned steps.
        plain_settings: those that the user gave, for the plain step.
        device_bytes: of the device.
        base: what lies there when the first forward begins.
        library_bytes: part of ``base``: workspaces that cuBLAS keeps once it has been used, for each thread and stream.
        plain_allocated_bytes: peak of the plain run, measured; 0 where it was not.
        plain_reserved_bytes: the same of reserved bytes.
        batch: part of ``base``: inputs that each step replaces, new ones before the old ones are freed.
        excess_bytes: what planned steps were seen to reserve beyond what ``core.requests`` derives.
    """

    settings: AllocatorSettings
    plain_settings: AllocatorSettings
    device_bytes: int
    base: tuple[Segment, ...] = ()
    library_bytes: int = 0
    plain_allocated_bytes: int = 0
    plain_reserved_bytes: int = 0
    batch: tuple[int, ...] = ()
    excess_bytes: int = 0


@dataclass(frozen=True)
class StepRecord:
    """A training step in its steady state.

    Attributes:
        graphs: all graphs captured, in the order of their first calls.
        costs: of each graph.
        events: the step's stretches, in order.
        base_bytes: allocated when the first forward starts, from the second step on.
        ledger: what ``base_bytes`` and the gradients consist of, by name, in bytes.
        device: name of the device (type, and model where known).
        torch_version: of the trial run.
        exact: whether bytes were counted by the allocator.
        memory: of the device, where its allocator reserves more than it gives out; None on a CPU.
    """

    graphs: tuple[Graph, ...]
    costs: tuple[Costs, ...]
    events: tuple[Event, ...]
    base_bytes: int
    ledger: dict[str, int]
    device: str
    torch_version: str
    exact: bool = True
    memory: DeviceMemory | None = None

    @cached_property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """Ranges of events, each from where nothing is saved for a backward pass to where nothing is saved again."""
        found: list[tuple[int, int]] = []
        start: int | None = None
        pending = 0
        for i, event in enumerate(self.events):
            if event.kind == FORWARD:
                start = (i if found else 0) if start is None else start
                pending += 1
            elif event.kind == BACKWARD:
                pending -= 1
                if pending == 0 and start is not None:
                    found.append((start, i + 1))
                    start = None
        if start is not None:
            found.append((start, len(self.events)))
        return tuple(found)


def with_plain_peaks(record: StepRecord, plain: PlainPeaks) -> StepRecord:
    """The record with the measured peaks of the plain run.

    They also tell when the script drops the last step's outputs, which one recorded step does not: as soon as it has
    new ones, or not before the backward begins.
    """
    if record.memory is None:
        return record
    measured = replace(
        record.memory,
        plain_allocated_bytes=plain.allocated_bytes,
        plain_reserved_bytes=plain.reserved_bytes,
    )
    late = replace(record, memory=measured)
    early = replace(late, events=_dropping_outputs_early(record.events))

    def error(candidate: StepRecord) -> int:
        peak = replay(candidate, [plain_schedule(g) for g in candidate.graphs]).peak_bytes
        return abs(peak - plain.allocated_bytes)

    return min(late, early, key=error)


def with_excess(record: StepRecord, excess_bytes: int) -> StepRecord:
    """The record with what planned steps were seen to reserve beyond the plan; the same one where that is not more."""
    if record.memory is None or excess_bytes <= record.memory.excess_bytes:
        return record
    return replace(record, memory=replace(record.memory, excess_bytes=excess_bytes))


def _dropping_outputs_early(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events with the last step's outputs freed right after the first forward."""
    drops = [e for e in events if e.name == LAST_OUTPUTS and e.delta_bytes < 0]
    forward = next((i for i, e in enumerate(events) if e.kind == FORWARD), None)
    if not drops or forward is None:
        return tuple(events)
    rest = [e for e in events if e not in drops]
    forward = rest.index(events[forward])
    return (*rest[: forward + 1], *drops, *rest[forward + 1 :])


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """What a step allocates and costs under given schedules.

    Attributes:
        peak_bytes: of the whole step.
        peak_event: index of the event in which it is reached.
        peak_name: the operator, or the stretch, that reaches it.
        start_bytes: allocated at the start of each event.
        seconds: of all graph calls.
    """

    peak_bytes: int
    peak_event: int
    peak_name: str
    start_bytes: tuple[int, ...]
    seconds: float


def replay(record: StepRecord, schedules: Sequence[Schedule]) -> StepTimeline:
    """Replay the step with ``schedules[k]`` for graph ``k``.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    footprints: dict[tuple[int, tuple[int, ...]], CallFootprint] = {}

    def footprint(event: Event) -> CallFootprint:
        key = (event.graph, event.released)
        if key not in footprints:
            k = event.graph
            footprints[key] = call_footprint(record.graphs[k], record.costs[k], schedules[k], event.released)
        return footprints[key]

    now, peak, at, name = record.base_bytes, record.base_bytes, 0, "before the first forward"
    seconds = 0.0
    starts = []
    for i, event in enumerate(record.events):
        starts.append(now)
        if event.kind == OUTSIDE:
            high, after = now + event.peak_bytes, now + event.delta_bytes
        elif event.kind == FORWARD:
            high, after = now + footprint(event).forward_peak_bytes, now + footprint(event).saved_bytes
            seconds += footprint(event).seconds
        else:
            high, after = now + footprint(event).backward_peak_bytes, now + footprint(event).backward_delta_bytes
        if high > peak:
            peak, at, name = high, i, event.name
            if event.kind != OUTSIDE:
                step = footprint(event).peak_steps[event.kind == BACKWARD]
                name = _step_name(record.graphs[event.graph], schedules[event.graph], step, event.kind)
        now = after
    return StepTimeline(peak, at, name, tuple(starts), seconds)


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
    """Simulate ``schedule``; the tensors ``released`` in the backward are freed after their last reader there.

    Raises:
        ScheduleError: the schedule is not valid for the graph.
    """
    timeline = simulate(graph, costs, schedule)
    cut = len(schedule.forward)
    saved = timeline.after_bytes[cut - 1] if cut else 0
    forward, backward = timeline.during_bytes[:cut], list(timeline.during_bytes[cut:])
    freed = 0
    for t in released:
        readers = [
            i
            for i, step in enumerate(schedule.backward)
            if t in graph.operators[step.operator].implementations[step.implementation].inputs
        ]
        freed += graph.tensors[t].nbytes
        for i in range(readers[-1] + 1 if readers else 0, len(backward)):
            backward[i] -= graph.tensors[t].nbytes
    high = (max(forward, default=0), max(backward, default=0))
    steps = (
        forward.index(high[0]) if forward else -1,
        cut + backward.index(high[1]) if backward else -1,
    )
    end = timeline.after_bytes[-1] if timeline.after_bytes else 0
    return CallFootprint(high[0], saved, high[1] - saved, end - saved - freed, steps, timeline.seconds)


def _step_name(graph: Graph, schedule: Schedule, step: int, phase: str) -> str:
    steps = (*schedule.forward, *schedule.backward)
    op = graph.operators[steps[step].operator]
    return f"{graph.name} {op.name} ({op.target.removeprefix('aten.').partition('.')[0]}, in the {phase})"
