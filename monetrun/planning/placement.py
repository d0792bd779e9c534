"""Holds: what a schedule allocates beside some steps, so that CUDA's caching allocator leaves fewer gaps.

The allocator serves a request from the smallest free block that is large enough. Where such blocks lie between tensors
that stay, a large tensor finds no room later, though enough is free: a U-Net at half of its memory reserved a quarter
more than it had allocated. Bytes that are held while a step allocates make the allocator take another block. A few
such holds are enough; they take microseconds, and add nothing to the peak of allocated bytes.

The search replays the step's large requests through the allocator's model, a thousand times in two seconds: it adds or
removes a hold at random, and goes on from there where no more is reserved. The same trace gives the same holds, where
the search's limit in seconds does not end it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from monetrun.core.allocator_heap import Block, Pool
from monetrun.core.allocator_settings import MOST_SMALL, AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.graph import FORWARD
from monetrun.core.plan import Hold, Schedule
from monetrun.core.requests import STEPS, Reserved, StepReplay, load_base, reserved, spare_beside_holds
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, DeviceMemory, StepRecord, events_under, replay

# As shares of the allocated peak: what is reserved beyond it and worth a search, and with what a search is content.
_WORTH, _ENOUGH = 0.01, 0.004
# The search begins so many times, and draws so many holds each time, at requests of at least this share of the
# allocated peak.
_STARTS, _DRAWS, _LARGE = 4, 1000, 0.03
# Holds have to do for so many variants of the trace, too, with something small in one of so many places.
_OTHERS, _EVERY = 6, 60
# It also goes on from holds under which more is reserved: up to this share of the allocated peak.
_WORSE = 0.005
# A draw at a step that has holds removes them so often; another one fills a block wholly, not just up to its end.
_REMOVE, _WHOLE = 0.4, 0.5

_Place = tuple[int, int]  # a graph, and the index of a step of its schedule
_Holds = dict[_Place, tuple[int, ...]]


def placed(record: StepRecord, schedules: Sequence[Schedule], seconds: float) -> tuple[Schedule, ...]:
    """``schedules`` with holds under which less is reserved; as they are where that is little, or none is found.

    Args:
        record: of the step, with ``memory``.
        schedules: of its graphs; holds that they have are left out.
        seconds: the search's limit.
    """
    assert record.memory is not None
    schedules = [replace(schedule, holds=()) for schedule in schedules]
    before = reserved(record, schedules)
    if not record.memory.settings.expandable or before.peak_bytes <= before.allocated_peak_bytes * (1 + _WORTH):
        return tuple(schedules)
    search = _Search(_trace(record, schedules), _room(record, schedules), time.monotonic() + seconds)
    holds = search.run()
    found = tuple(
        replace(s, holds=tuple(Hold(i, n) for (graph, i), given in sorted(holds.items()) if graph == k for n in given))
        for k, s in enumerate(schedules)
    )
    after = reserved(record, found)
    return found if _is_better(after, before) else tuple(schedules)


def _is_better(after: Reserved, before: Reserved) -> bool:
    return after.peak_bytes < before.peak_bytes and after.allocated_peak_bytes <= before.allocated_peak_bytes


def _room(record: StepRecord, schedules: Sequence[Schedule]) -> dict[_Place, int]:
    """The bytes that may be held during each step without a higher peak of the whole training step."""
    simulated = [simulate(g, c, s) for g, c, s in zip(record.graphs, record.costs, schedules, strict=True)]
    timeline = replay(record, schedules)
    room: dict[_Place, int] = {}
    for event, start_bytes in zip(events_under(record, schedules), timeline.start_bytes, strict=True):
        if event.kind == OUTSIDE:
            continue
        graph, cut = simulated[event.graph], len(schedules[event.graph].forward)
        steps = range(cut) if event.kind == FORWARD else range(cut, len(graph.during_bytes))
        before = 0 if event.kind == FORWARD or not cut else graph.after_bytes[cut - 1]
        for i in steps:
            place, left = (event.graph, i), timeline.peak_bytes - (start_bytes - before + graph.during_bytes[i])
            room[place] = min(left, room.get(place, left))
    return room


# ---- the step's large requests


@dataclass(frozen=True, slots=True)
class _Request:
    """Bytes that are requested."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Free:
    """A request, or (negative) a block of the base, whose memory is freed."""

    request: int


@dataclass(frozen=True, slots=True)
class _StepBegins:
    place: _Place


@dataclass(frozen=True, slots=True)
class _StepEnds:
    pass


_Event = _Request | _Free | _StepBegins | _StepEnds


@dataclass(frozen=True, slots=True)
class _Trace:
    """What training steps request of the large pool.

    Attributes:
        memory: of the device.
        events: requests, what is freed, and where steps of schedules begin and end.
    """

    memory: DeviceMemory
    events: tuple[_Event, ...]


def _trace(record: StepRecord, schedules: Sequence[Schedule]) -> _Trace:
    assert record.memory is not None
    allocator = _Tracing(record.memory.settings, record.memory.device_bytes)
    steps = _TracedSteps(record, schedules, allocator)
    base = load_base(record.memory, allocator)
    allocator.base_is(base)
    steps.batch.find(base)
    for number in range(STEPS):
        steps.step(first=number == 0)
    return _Trace(record.memory, tuple(allocator.events))


def _otherwise(events: Sequence[_Event], seed: int) -> list[_Event]:
    """The same with what the script does between two steps in another order, and with small blocks that it may keep."""
    draw = random.Random(seed)
    found: list[_Event] = []
    between: list[_Event] = []
    inside, number = False, len(events)
    for event in (*events, _StepEnds()):
        if isinstance(event, (_StepBegins, _StepEnds)):
            found += _shuffled(between, draw)
            between.clear()
            inside = isinstance(event, _StepBegins)
        elif not inside:
            between.append(event)
            if draw.randrange(_EVERY) == 0 and isinstance(event, _Request):
                between.append(_Request(number, MOST_SMALL + draw.randrange(1, 3 * MOST_SMALL)))
                number += 1
            continue
        found.append(event)
    return found[:-1]


def _shuffled(events: Sequence[_Event], draw: random.Random) -> list[_Event]:
    """In another order, in which nothing is freed before it is requested."""
    order = draw.sample(events, len(events))
    requested = {event.number for event in events if isinstance(event, _Request)}
    found: list[_Event] = []
    late: list[_Event] = []
    for event in order:
        if isinstance(event, _Free) and event.request in requested:
            late.append(event)
        else:
            found.append(event)
            if isinstance(event, _Request):
                requested.discard(event.number)
    return [*found, *late]


class _Tracing(CachingAllocator):
    """Notes what is requested and freed.

    Attributes:
        events: so far.
    """

    def __init__(self, settings: AllocatorSettings, device_bytes: int) -> None:
        super().__init__(settings, device_bytes)
        self.events: list[_Event] = []
        self._requests: dict[int, int] = {}  # by address

    def base_is(self, base: Mapping[int, int]) -> None:
        """These blocks, in this order, were there before."""
        self._requests.update((address, ~i) for i, address in enumerate(base))

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """As without a trace."""
        address = super().allocate(nbytes, stream)
        if self.settings.rounded(nbytes) > MOST_SMALL:
            self._requests[address] = len(self.events)
            self.events.append(_Request(len(self.events), nbytes))
        return address

    def free(self, address: int) -> None:
        """As without a trace."""
        super().free(address)
        request = self._requests.pop(address, None)
        if request is not None:
            self.events.append(_Free(request))


class _TracedSteps(StepReplay):
    allocator: _Tracing

    def run_step(self, k: int, call: object, i: int) -> None:
        """As without a trace."""
        self.allocator.events.append(_StepBegins((k, i)))
        super().run_step(k, call, i)  # type: ignore[arg-type]
        self.allocator.events.append(_StepEnds())


# ---- the search


class _Observed(CachingAllocator):
    """Knows the block that served the last request, or 0."""

    block_bytes = 0

    def _best_fit(self, pool: Pool, stream: int, size: int) -> Block | None:
        block = super()._best_fit(pool, stream, size)
        self.block_bytes = 0 if block is None else block.nbytes
        return block


@dataclass(frozen=True, slots=True)
class _Served:
    """A large request of a step of a schedule: the bytes of the block that was taken for it (0: a new one)."""

    place: _Place
    nbytes: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is reserved and allocated under some holds, and how large requests were served."""

    large_bytes: int
    allocated_bytes: int
    served: list[_Served]


class _Search:
    def __init__(self, trace: _Trace, room: Mapping[_Place, int], deadline: float) -> None:
        self.trace = trace
        self.room = room
        self.deadline = deadline
        self.random = random.Random()
        self.others = [_otherwise(trace.events, seed) for seed in range(_OTHERS)]
        self.plain = self.outcome({})

    def run(self) -> _Holds:
        """The holds under which least is reserved; without those that change nothing."""
        best: _Holds = {}
        least = self.plain.large_bytes
        for seed in range(_STARTS):
            if self._is_enough(least):
                break
            self.random.seed(seed)
            holds, reserved_bytes = self._started()
            if reserved_bytes < least:
                best, least = holds, reserved_bytes
        best = self._without_needless(best, least)
        # before the first step the whole pool is reserved, and free
        return best if self.outcome(best, pool_bytes=least).large_bytes <= least else {}

    def _started(self) -> tuple[_Holds, int]:
        """The best holds of one start, and what is reserved under them."""
        allocated = self.plain.allocated_bytes
        present: _Holds = {}
        best: _Holds = {}
        outcome = self.plain
        least = outcome.large_bytes
        for _ in range(_DRAWS):
            if self._is_enough(least) or time.monotonic() > self.deadline:
                break
            drawn = self._drawn(present, outcome.served)
            if drawn is None:
                continue
            found = self.outcome(drawn)
            worse = int(allocated * _WORSE * self.random.random() ** 2)
            if found.allocated_bytes > allocated or found.large_bytes > outcome.large_bytes + worse:
                continue
            present, outcome = drawn, found
            if found.large_bytes < least and self._is_robust(drawn, found.large_bytes):
                least, best = found.large_bytes, drawn
        return best, least

    def _is_enough(self, reserved_bytes: int) -> bool:
        return reserved_bytes <= self.plain.allocated_bytes * (1 + _ENOUGH)

    def _drawn(self, present: _Holds, served: Sequence[_Served]) -> _Holds | None:
        """``present`` with one hold more, or without those of a step; None: nothing was drawn."""
        if not served:
            return None
        one = self.random.choice(served)
        kind = self.random.random()
        if one.place in present and kind < _REMOVE:
            return {place: given for place, given in present.items() if place != one.place}
        rest = one.block_bytes - one.nbytes
        nbytes = one.block_bytes if self.random.random() < _WHOLE or rest <= MOST_SMALL else rest
        given = (*present.get(one.place, ()), nbytes)
        return {**present, one.place: given} if one.block_bytes and sum(given) <= self.room[one.place] else None

    def _without_needless(self, holds: _Holds, least: int) -> _Holds:
        for place in list(holds):
            for i in reversed(range(len(holds[place]))):
                rest = (*holds[place][:i], *holds[place][i + 1 :])
                fewer = {**holds, place: rest} if rest else {p: given for p, given in holds.items() if p != place}
                found = self.outcome(fewer)
                if found.large_bytes > least or found.allocated_bytes > self.plain.allocated_bytes:
                    continue
                if self._is_robust(fewer, least):
                    holds = fewer
        return holds

    def _is_robust(self, holds: _Holds, reserved_bytes: int) -> bool:
        """Whether little more is reserved where the script does things in another order, or keeps something small."""
        most = reserved_bytes + spare_beside_holds(self.trace.memory.settings)
        return all(self.outcome(holds, events=events).large_bytes <= most for events in self.others)

    def outcome(self, holds: _Holds, pool_bytes: int = 0, events: Sequence[_Event] | None = None) -> _Outcome:
        """Replay the trace, or other ``events``. ``pool_bytes`` of the large pool are reserved before the first."""
        memory = self.trace.memory
        allocator = _Observed(memory.settings, memory.device_bytes)
        addresses = {~i: address for i, address in enumerate(load_base(memory, allocator))}
        allocator.empty_cache()
        if (missing := pool_bytes - allocator.large_bytes) > MOST_SMALL:
            allocator.free(allocator.allocate(missing))
        allocator.reset_peaks()
        served: list[_Served] = []
        place: _Place | None = None
        held: list[int] = []
        for event in self.trace.events if events is None else events:
            if isinstance(event, _Request):
                addresses[event.number] = allocator.allocate(event.nbytes)
                if place is not None:
                    served.append(_Served(place, event.nbytes, allocator.block_bytes))
            elif isinstance(event, _Free):
                allocator.free(addresses.pop(event.request))
            elif isinstance(event, _StepBegins):
                place = event.place
                held = [allocator.allocate(nbytes) for nbytes in holds.get(place, ())]
            else:
                for address in held:
                    allocator.free(address)
                held, place = [], None
        allocated = allocator.peak_allocated_bytes
        served = [one for one in served if one.nbytes >= allocated * _LARGE]
        return _Outcome(allocator.large_bytes, allocated, served)
