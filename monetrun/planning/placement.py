"""Holds: what a schedule allocates beside some steps, so that CUDA's caching allocator leaves fewer gaps.

The allocator serves a request from the smallest free block that is large enough. Where such blocks lie between tensors
that stay, a large tensor finds no room later, though enough is free: a U-Net at half of its memory reserved a quarter
more than it had allocated. Bytes that are held while a step allocates make the allocator take another block. A few
such holds are enough; they take microseconds, and add nothing to the peak of allocated bytes.

The search is simulated annealing. It replays the step's large requests through a model of the allocator, two thousand
times in a second. It draws a request and another free block for it, holds the blocks that the allocator would take
before that one, and goes on from there where less is reserved, or, at first, little more. The same requests give the
same holds, where the search's limit in seconds does not end it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from monetrun.core.allocator_settings import MOST_SMALL
from monetrun.core.caching_allocator import CachingAllocator, large_blocks
from monetrun.core.graph import FORWARD
from monetrun.core.large_pool import LargePool
from monetrun.core.plan import Hold, Schedule
from monetrun.core.replayed_blocks import load_base
from monetrun.core.reserved import Reserved, reserved, spare_beside_holds
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, DeviceMemory, StepRecord, events_under, replay
from monetrun.planning.large_requests import Event, Free, Place, Request, StepBegins, large_requests, otherwise

# As shares of the allocated peak: what is reserved beyond it and worth a search, and with what a search is content.
_WORTH, _ENOUGH = 0.01, 0.004
# The search begins so many times, and draws so many holds each time, at requests of at least this share of the
# allocated peak.
_STARTS, _DRAWS, _LARGE = 6, 2000, 0.01
# Holds have to do for so many variants of the trace, too.
_OTHERS = 6
# The first draws go on from holds under which this share of the allocated peak more is reserved, with probability 1/e.
_WARM = 0.002
# A draw at a step that has holds removes them so often. Else it has a request served by another block: so often by the
# next larger one, if by another one than now; so often at the end of that block.
_REMOVE, _NEAR, _AT_END = 0.4, 0.8, 0.5
# A hold is so much smaller than the block that it is to fill, which can be smaller itself in another run.
_SPARE = (0, 8 * MOST_SMALL, 40 * MOST_SMALL)

_Holds = dict[Place, tuple[int, ...]]


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
    events = large_requests(record, schedules, before.steps)
    holds = _Search(record.memory, events, _room(record, schedules)).run(seconds)
    found = tuple(
        replace(s, holds=tuple(Hold(i, n) for (graph, i), given in sorted(holds.items()) if graph == k for n in given))
        for k, s in enumerate(schedules)
    )
    after = reserved(record, found)
    return found if _is_better(after, before) else tuple(schedules)


def _is_better(after: Reserved, before: Reserved) -> bool:
    return after.peak_bytes < before.peak_bytes and after.allocated_peak_bytes <= before.allocated_peak_bytes


def _room(record: StepRecord, schedules: Sequence[Schedule]) -> dict[Place, int]:
    """The bytes that may be held during each step without a higher peak of the whole training step."""
    simulated = [simulate(g, c, s) for g, c, s in zip(record.graphs, record.costs, schedules, strict=True)]
    timeline = replay(record, schedules)
    room: dict[Place, int] = {}
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


# ---- the search


@dataclass(frozen=True, slots=True)
class _Served:
    """A large request of a step of a schedule: the free blocks that could serve it, the smallest first."""

    place: Place
    nbytes: int
    fitting: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is reserved and allocated of the large pool under some holds, and how large requests were served."""

    reserved_bytes: int
    allocated_bytes: int
    served: list[_Served]


class _Search:
    def __init__(self, memory: DeviceMemory, events: Sequence[Event], room: Mapping[Place, int]) -> None:
        self.memory = memory
        self.events = events
        self.room = room
        self.random = random.Random()
        self.others = [otherwise(events, seed) for seed in range(_OTHERS)]
        self._begun: dict[int, tuple[LargePool, dict[int, int]]] = {}
        self.large_bytes = 0
        self.plain = self.outcome({})
        self.large_bytes = int(_LARGE * self.plain.allocated_bytes)

    def run(self, seconds: float) -> _Holds:
        """The holds under which least is reserved; without those that change nothing."""
        best: _Holds = {}
        least = self.plain.reserved_bytes
        started = time.monotonic()
        for seed in range(_STARTS):
            if self._is_enough(least):
                break
            self.random.seed(seed)
            left = started + seconds - time.monotonic()
            holds, reserved_bytes = self._annealed(left / (_STARTS - seed))
            if reserved_bytes < least:
                best, least = holds, reserved_bytes
        best = self._without_needless(best, least)
        # before the first step the whole pool is reserved, and free
        return best if self.outcome(best, pool_bytes=least).reserved_bytes <= least else {}

    def _annealed(self, seconds: float) -> tuple[_Holds, int]:
        """The best holds of one start, and what is reserved under them."""
        allocated = self.plain.allocated_bytes
        holds: _Holds = {}
        outcome = self.plain
        best, least = holds, outcome.reserved_bytes
        started = time.monotonic()
        for number in range(_DRAWS):
            done = max(number / _DRAWS, (time.monotonic() - started) / seconds if seconds > 0 else 1.0)
            if done >= 1 or self._is_enough(least):
                break
            drawn = self._drawn(holds, outcome.served)
            if drawn is None:
                continue
            worse = -_WARM * allocated * (1 - done) ** 2 * math.log(1 - self.random.random())
            found = self.outcome(drawn)
            if found.allocated_bytes > allocated or found.reserved_bytes > outcome.reserved_bytes + worse:
                continue
            holds, outcome = drawn, found
            if found.reserved_bytes < least and self._is_robust(drawn, found.reserved_bytes):
                best, least = holds, found.reserved_bytes
        return best, least

    def _is_enough(self, reserved_bytes: int) -> bool:
        return reserved_bytes <= self.plain.allocated_bytes * (1 + _ENOUGH)

    def _drawn(self, present: _Holds, served: Sequence[_Served]) -> _Holds | None:
        """``present`` with more holds at a step, or with none there; None: nothing was drawn."""
        if not served:
            return None
        one = self.random.choice(served)
        if one.place in present and self.random.random() < _REMOVE:
            return {place: given for place, given in present.items() if place != one.place}
        near = self.random.random() < _NEAR
        chosen = self.random.randrange(2 if near else len(one.fitting) + 1)
        # the largest first: each is served by the block that it is to fill
        filled = [nbytes for nbytes, _ in reversed(one.fitting[:chosen])]
        if chosen < len(one.fitting) and self.random.random() < _AT_END:
            filled.append(one.fitting[chosen][0] - one.nbytes)
        less = min(self.random.choice(_SPARE), one.nbytes // 2)
        given = [nbytes - less for nbytes in filled if nbytes - less > MOST_SMALL]
        together = (*present.get(one.place, ()), *given)
        return {**present, one.place: together} if given and sum(together) <= self.room[one.place] else None

    def _without_needless(self, holds: _Holds, least: int) -> _Holds:
        for place in list(holds):
            for i in reversed(range(len(holds[place]))):
                rest = (*holds[place][:i], *holds[place][i + 1 :])
                fewer = {**holds, place: rest} if rest else {p: given for p, given in holds.items() if p != place}
                found = self.outcome(fewer)
                if found.allocated_bytes > self.plain.allocated_bytes or found.reserved_bytes > least:
                    continue
                if self._is_robust(fewer, least):
                    holds = fewer
        return holds

    def _is_robust(self, holds: _Holds, reserved_bytes: int) -> bool:
        """Whether little more is reserved where the script does things in another order, or keeps something small."""
        most = reserved_bytes + spare_beside_holds(self.memory.settings)
        return all(self.outcome(holds, events=events).reserved_bytes <= most for events in self.others)

    def outcome(self, holds: _Holds, pool_bytes: int = 0, events: Sequence[Event] | None = None) -> _Outcome:
        """Replay the events, or other ``events``. ``pool_bytes`` of the large pool are reserved before the first."""
        pool, addresses = self._begin(pool_bytes)
        allocated = pool.allocated_bytes
        served: list[_Served] = []
        place: Place | None = None
        held: list[int] = []
        for event in self.events if events is None else events:
            if isinstance(event, Request):
                if place is not None and event.nbytes >= self.large_bytes:
                    served.append(_Served(place, event.nbytes, pool.fitting(event.nbytes)))
                addresses[event.number] = pool.allocate(event.nbytes)
                if pool.allocated_bytes > allocated:
                    allocated = pool.allocated_bytes
            elif isinstance(event, Free):
                if (address := addresses.pop(event.request, None)) is not None:
                    pool.release(address)
            elif isinstance(event, StepBegins):
                place = event.place
                if place in holds:
                    held = [pool.allocate(self.memory.settings.rounded(nbytes)) for nbytes in holds[place]]
                    allocated = max(allocated, pool.allocated_bytes)
            else:
                for address in held:
                    pool.release(address)
                held, place = [], None
        return _Outcome(pool.reserved_bytes, allocated, served)

    def _begin(self, pool_bytes: int) -> tuple[LargePool, dict[int, int]]:
        """The large pool before the first event, and where the blocks lie that are there."""
        if pool_bytes not in self._begun:
            allocator = CachingAllocator(self.memory.settings, self.memory.device_bytes)
            addresses = {~i: address for i, address in enumerate(load_base(self.memory, allocator))}
            allocator.empty_cache()
            if (missing := pool_bytes - allocator.large_bytes) > MOST_SMALL:
                allocator.free(allocator.allocate(missing))
            large = {start for start, *_ in large_blocks(allocator)}
            in_pool = {number: address for number, address in addresses.items() if address in large}
            self._begun[pool_bytes] = LargePool.of(allocator), in_pool
        pool, addresses = self._begun[pool_bytes]
        return pool.copy(), dict(addresses)
