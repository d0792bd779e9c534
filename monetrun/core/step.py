"""A whole training step: what a trial run recorded of it, and its replay under other schedules.

A step is more than its graphs: weights and optimizer state stay allocated, the script computes a loss between a forward
and its backward, holds the batch and last step's outputs, and runs the optimizer. A ``StepRecord`` has the graphs, and
how many bytes the script allocated between their calls. ``replay`` combines the two, so that the peak of the *step*
under any schedules comes from ``simulate`` and from measured bytes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.call_footprint import CallFootprint, call_footprint
from monetrun.core.errors import ScheduleError
from monetrun.core.event import OUTSIDE as OUTSIDE
from monetrun.core.event import Event as Event
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Tensor, check_bytes
from monetrun.core.graph import check as check_graph
from monetrun.core.plan import Schedule
from monetrun.core.reductions import Reductions
from monetrun.core.rounds import rounds_of
from monetrun.core.sharding import Sharding
from monetrun.core.simulate import judge

LAST_GRADIENTS = "last step's gradients"
LAST_OUTPUTS = "last step's outputs"
BETWEEN_STEPS = "between steps"
LIBRARIES = "cuBLAS workspaces"
BUCKETS = "DDP buckets"
SCRIPT = "script (data, buffers, ...)"
HELD_SINCE = "held since the recorded step"


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks of the caching allocator that lie side by side.

    Attributes:
        small: they belong to the pool for requests of up to 1 MiB.
        blocks: bytes of each, in order: in use, or, negative, free.
        gap_bytes: address space without memory between the segment before it and this one, where both are parts of one
            expandable segment.
    """

    small: bool
    blocks: tuple[int, ...]
    gap_bytes: int = 0


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
        batch: part of ``base``: inputs, and what else each step replaces.
        excess_bytes: what planned steps were seen to reserve beyond what ``core.requests`` derives.
        other_streams_bytes: reserved for requests on other streams, on which no graph runs.
        between: what the script requests and frees from a step's end to the next forward; numbers go on from the
            step's. None: not seen, a new batch is taken to be there before the old one is freed.
        begun_under: schedules of the recorded step, by graph, where planned steps follow it in the same process: what
            it leaves lies where they put it. Empty: planned steps begin in a new one.
        gradients: which of the blocks of ``base`` that are in use, in order, are gradients that the first step frees.
        outputs: the same of the last step's outputs.
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
    other_streams_bytes: int = 0
    between: Event | None = None
    begun_under: tuple[Schedule, ...] = ()
    gradients: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: an amount cannot be right.
        """
        used = sum(nbytes > 0 for segment in self.base for nbytes in segment.blocks)
        if any(not 0 <= i < used for i in (*self.gradients, *self.outputs)):
            raise ValueError("the last step's gradients or outputs are not among the blocks that are there")
        check_bytes(
            device=self.device_bytes,
            base=sum(abs(n) for segment in self.base for n in segment.blocks),
            **{f"gap_{i}": segment.gap_bytes for i, segment in enumerate(self.base)},
            library=self.library_bytes,
            plain_allocated=self.plain_allocated_bytes,
            plain_reserved=self.plain_reserved_bytes,
            excess=self.excess_bytes,
            other_streams=self.other_streams_bytes,
            **{f"batch_{i}": nbytes for i, nbytes in enumerate(self.batch)},
        )


@dataclass(frozen=True, slots=True)
class Break:
    """Why a module is not captured whole.

    Attributes:
        module: which of the process's models, and the path in it (``"0:encoder.layers"``).
        name: the module's class.
        where: the file and line that cannot be captured.
        reason: why not.
        in_python: the module's forward runs in Python, and modules in it are captured; False: TorchDynamo captures
            graphs before and after the break, and modules in it only where it captures nothing.
    """

    module: str
    name: str
    where: str
    reason: str
    in_python: bool


RECORD_SCHEMA = 3  # of a record; goes up when an older one would mean something else


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
        breaks: modules that were not captured whole, the outer ones first.
        reductions: the gradients that DistributedDataParallel reduces, if any.
        backward_autocast: device types with autocast where the script calls the backward, each with its dtype.
        gradients_in_terms: the graphs' backwards give an input's gradient in terms, one for each of its uses.
        gradients_by_turns: they give each gradient as soon as it is final, also in one process.
        sharding: the modules that FSDP2 shards, if any; ``events`` are those of its present choice.
        others_share: of the processors' time what other processes took, so that operators were measured too slow.
        unlike_eager: what of the models' results, gradients and buffers has other bits than eager's, a sentence each.
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
    breaks: tuple[Break, ...] = ()
    reductions: Reductions | None = None
    backward_autocast: tuple[tuple[str, str], ...] = ()
    gradients_in_terms: bool = False
    gradients_by_turns: bool = False
    sharding: Sharding | None = None
    others_share: float = 0.0
    unlike_eager: tuple[str, ...] = ()

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: a graph, its costs or an event contradict the documentation of their fields.
        """
        if len(self.graphs) != len(self.costs):
            raise ValueError(f"{len(self.graphs)} graphs, and costs of {len(self.costs)}")
        for k, (graph, costs) in enumerate(zip(self.graphs, self.costs, strict=True)):
            try:
                check_graph(graph, costs)
            except ValueError as error:
                raise ValueError(f"graph {k}: {error}") from error
        check_bytes(base=self.base_bytes, **{f"ledger's_{name}": abs(n) for name, n in self.ledger.items()})
        if self.reductions is not None:
            self.reductions.check_in(self.graphs)
        recorded = () if self.sharding is None else self.sharding.events
        for device_type, dtype in self.backward_autocast:
            if device_type not in ("cpu", "cuda") or dtype not in ("bfloat16", "float16", "float32"):
                raise ValueError(f"autocast of {device_type!r} to {dtype!r}")
        self._check_begun_under(() if self.memory is None else self.memory.begun_under)
        between = None if self.memory is None else self.memory.between
        for i, event in enumerate((*self.events, *([between] if between else ()), *recorded)):
            try:
                self._check_event(event)
            except ValueError as error:
                raise ValueError(f"event {i}: {error}") from error

    def _check_begun_under(self, schedules: tuple[Schedule, ...]) -> None:
        if schedules and len(schedules) != len(self.graphs):
            raise ValueError(f"begun under {len(schedules)} schedules, and {len(self.graphs)} graphs")
        for k, (graph, schedule) in enumerate(zip(self.graphs, schedules, strict=False)):
            try:
                judge(graph, schedule)
            except ScheduleError as error:
                raise ValueError(f"begun under a schedule of graph {k} that cannot run: {error}") from error

    def _check_event(self, event: Event) -> None:
        check_bytes(
            peak=event.peak_bytes,
            delta=abs(event.delta_bytes),
            elsewhere=abs(event.elsewhere_bytes),
            requests=sum(abs(n) for n in event.requests),
            freed=sum(abs(n) for n, _ in event.freed or ()),
        )
        if event.kind == OUTSIDE:
            if event.released:
                raise ValueError("it releases tensors, but is not a backward")
            for k, t in (*event.dropped, *(name for names in event.read_as for name in names)):
                if not 0 <= k < len(self.graphs) or not 0 <= t < len(self.graphs[k].tensors):
                    raise ValueError("it drops a tensor that does not exist")
                if not (self.graphs[k].tensors[t].kept or self.graphs[k].tensors[t].external):
                    raise ValueError("it drops a tensor that is neither output nor input")
            batch = () if self.memory is None else self.memory.batch
            if any(not 0 <= i < len(batch) for i, _ in event.batch_freed):
                raise ValueError("it frees a part of the batch that does not exist")
            return
        if event.kind not in (FORWARD, BACKWARD):
            raise ValueError(f"it is of kind {event.kind!r}")
        if not 0 <= event.graph < len(self.graphs):
            raise ValueError(f"it calls graph {event.graph}, of {len(self.graphs)}")
        if any(not 0 <= t < len(self.graphs[event.graph].tensors) for t in event.released):
            raise ValueError("it releases a tensor that does not exist")

    @cached_property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """Ranges of events, each from where nothing is saved for a backward pass to where nothing is saved again."""
        return rounds_of([(event.kind, event.graph) for event in self.events])


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """What a step allocates and costs under given schedules.

    Attributes:
        peak_bytes: of the whole step.
        peak_event: index of the event in which it is reached.
        peak_name: the operator, or the stretch, that reaches it.
        start_bytes: allocated at the start of each event.
        seconds: of all graph calls.
        high_bytes: the most allocated during each event.
    """

    peak_bytes: int
    peak_event: int
    peak_name: str
    start_bytes: tuple[int, ...]
    seconds: float
    high_bytes: tuple[int, ...] = ()


def events_under(record: StepRecord, schedules: Sequence[Schedule]) -> list[Event]:
    """The record's events as they are under these schedules.

    What the script drops is freed then unless the backward reads it; if it is, the backward does not free it again.
    """
    read = (
        [
            {t for s in own.backward for t in graph.operators[s.operator].implementations[s.implementation].inputs}
            for graph, own in zip(record.graphs, schedules, strict=True)
        ]
        if any(event.dropped for event in record.events)
        else []
    )
    gone: Counter[tuple[int, int]] = Counter()
    found = []
    for event in record.events:
        if event.dropped:
            names = [(d, *also) for d, also in zip_longest(event.dropped, event.read_as, fillvalue=())]
            places = [i for i, tensor in enumerate(names) if all(t not in read[k] for k, t in tensor)]
            freed = tuple(event.dropped[i] for i in places)
            after = tuple(event.dropped_after[i] for i in places) if event.dropped_after else ()
            saved = [record.graphs[k].tensors[t] for i, (k, t) in enumerate(event.dropped) if i not in places]
            event = replace(
                event,
                dropped=freed,
                dropped_after=after,
                read_as=(),
                peak_bytes=event.peak_bytes + sum(t.nbytes for t in saved),
                batch_freed=_without_saved(record.memory, event, saved),
            )
            gone.update(freed)
        elif gone and event.kind == BACKWARD:
            absent = {t for t in event.released if gone[event.graph, t]}
            gone.subtract((event.graph, t) for t in absent)
            event = replace(event, released=tuple(t for t in event.released if t not in absent))
        found.append(event)
    return found


def _without_saved(memory: DeviceMemory | None, event: Event, saved: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """``event.batch_freed`` without the inputs among ``saved``."""
    rest = list(event.batch_freed)
    for tensor in saved:
        if memory is None:
            break
        nbytes = memory.settings.rounded(tensor.nbytes)
        found = next((freed for freed in rest if memory.batch[freed[0]] == nbytes), None)
        if tensor.external and found is not None:
            rest.remove(found)
    return tuple(rest)


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
    starts, highs = [], []
    for i, event in enumerate(events_under(record, schedules)):
        starts.append(now)
        if event.kind == OUTSIDE:
            dropped = sum(record.graphs[k].tensors[t].nbytes for k, t in event.dropped)
            high, after = now + event.peak_bytes, now + event.delta_bytes - dropped
        elif event.kind == FORWARD:
            high, after = now + footprint(event).forward_peak_bytes, now + footprint(event).saved_bytes
            seconds += footprint(event).seconds
        else:
            high, after = now + footprint(event).backward_peak_bytes, now + footprint(event).backward_delta_bytes
        highs.append(high)
        if high > peak:
            peak, at, name = high, i, event.name or _outside_name(record, i)
            if event.kind != OUTSIDE:
                step = footprint(event).peak_steps[event.kind == BACKWARD]
                name = _step_name(record.graphs[event.graph], schedules[event.graph], step, event.kind)
        now = after
    return StepTimeline(peak, at, name, tuple(starts), seconds, tuple(highs))


def _outside_name(record: StepRecord, i: int) -> str:
    """What the script does in event ``i``, by the calls before and after it."""

    def call(events: Sequence[Event]) -> str:
        return next((f"{record.graphs[e.graph].name}'s {e.kind}" for e in events if e.kind != OUTSIDE), "")

    before, after = call(record.events[i::-1]), call(record.events[i:])
    place = f"between {before} and {after}" if before and after else f"after {before}" if before else f"before {after}"
    return f"what the script runs outside the captured graphs, {place}"


def _step_name(graph: Graph, schedule: Schedule, step: int, phase: str) -> str:
    steps = (*schedule.forward, *schedule.backward)
    op = graph.operators[steps[step].operator]
    return f"{graph.name} {op.name} ({op.target.removeprefix('aten.').partition('.')[0]}, in the {phase})"
