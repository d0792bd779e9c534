"""Holds: what a schedule allocates beside some steps, so that CUDA's caching allocator leaves fewer gaps.

The allocator serves a request from the smallest free block that is large enough. Where such blocks lie between tensors
that stay, a large tensor finds no room later, though enough is free: a U-Net at half of its memory reserved a quarter
more than it had allocated. Bytes that are held while a step allocates make the allocator take another block. A few
such holds are enough; they take microseconds, and add nothing to the peak of allocated bytes.

The search is simulated annealing. It replays the step's large requests through a model of the allocator, some ten
thousand times in a second. It draws a request, often one that was in the way when more was reserved last, and another
free block for it, holds the blocks that the allocator would take before that one, and goes on from there where less is
reserved, or, at first, little more. What counts is the most that is reserved for the step and for variants of it, in
which the script does things in another order, or keeps something small. The same requests give the same holds, where
no start takes longer than its part of the search's seconds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from monetrun.core.allocator_settings import MOST_SMALL
from monetrun.core.graph import FORWARD
from monetrun.core.plan import Hold, Schedule
from monetrun.core.reserved import Reserved, reserved, spare_beside_holds
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, DeviceMemory, StepRecord, events_under, replay
from monetrun.planning.large_requests import Event, Place, large_requests, otherwise
from monetrun.planning.native_pool_replay import NativePoolReplay
from monetrun.planning.pool_replay import PoolReplay
from monetrun.solve import native_search

# As shares of the allocated peak: what is reserved beyond it and worth a search, and with what a search is content.
_WORTH, _ENOUGH = 0.01, 0.004
# The search begins so many times, and draws so many holds each time, at requests of at least this share of the
# allocated peak.
_STARTS, _DRAWS, _LARGE = 50, 1000, 0.01
# Each start gets at least this part of the time that is left.
_LEAST_PART = 0.25
# Holds have to do for so many variants of the trace, too.
_OTHERS = 6
# The first draws go on from holds under which this share of the allocated peak more is reserved, with probability 1/e.
_WARM = 0.01
# So often a draw is of a request that was in the way when more was reserved last.
_IN_THE_WAY = 0.5
# A draw at a step that has holds removes them so often. Else it has a request served by another block: so often by the
# next larger one, if by another one than now; so often at the end of that block.
_REMOVE, _NEAR, _AT_END = 0.4, 0.8, 0.5
# A hold is so much smaller than the block that it is to fill, which can be smaller itself in another run.
_SPARE = (0, 8 * MOST_SMALL, 40 * MOST_SMALL)

_NOTHING_SO_LARGE = 1 << 62

_Holds = dict[Place, tuple[int, ...]]
_Replay = PoolReplay | NativePoolReplay


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
class _Tried:
    """What some holds give.

    Attributes:
        reserved_bytes, allocated_bytes: in the step.
        cost: ``reserved_bytes``, or more where a variant reserves more than that and what is spare.
    """

    reserved_bytes: int
    allocated_bytes: int
    cost: int

    @property
    def is_robust(self) -> bool:
        """Whether what is reserved for the step, and what is spare, does for all variants."""
        return self.cost == self.reserved_bytes


class _Search:
    """Searches for holds.

    Args:
        memory: of the device.
        events: of the step.
        room: bytes that may be held during each step.
    """

    def __init__(self, memory: DeviceMemory, events: Sequence[Event], room: Mapping[Place, int]) -> None:
        self.memory = memory
        self.events = events
        self.room = room
        self.random = random.Random()
        self.spare = spare_beside_holds(memory.settings)
        self.traces = [events, *(otherwise(events, seed) for seed in range(_OTHERS))]
        _, self.allocated_bytes = PoolReplay(memory, [events], _NOTHING_SO_LARGE).replay({})
        self.large_bytes = int(_LARGE * self.allocated_bytes)

    def run(self, seconds: float) -> _Holds:
        """The holds under which least is reserved; without those that change nothing."""
        until = time.monotonic() + seconds
        if native_search.available():
            with NativePoolReplay(self.memory, self.traces, self.large_bytes) as replay:
                best, least = self._best(replay, until)
        else:
            best, least = self._best(PoolReplay(self.memory, self.traces, self.large_bytes), until)
        # before the first step the whole pool is reserved, and free
        laid_out = PoolReplay(self.memory, [self.events], _NOTHING_SO_LARGE, least)
        return best if best and laid_out.replay(best)[0] <= least else {}

    def _best(self, replay: _Replay, until: float) -> tuple[_Holds, int]:
        """Of all starts."""
        best: _Holds = {}
        least = self._tried(replay, best).reserved_bytes
        for seed in range(_STARTS):
            left = until - time.monotonic()
            if self._is_enough(least) or left <= 0:
                break
            self.random.seed(seed)
            holds, reserved_bytes = self._annealed(replay, max(left / (_STARTS - seed), _LEAST_PART * left))
            if reserved_bytes < least:
                best, least = holds, reserved_bytes
        return self._without_needless(replay, best, least), least

    def _annealed(self, replay: _Replay, seconds: float) -> tuple[_Holds, int]:
        """The best robust holds of one start, and what is reserved under them."""
        holds: _Holds = {}
        present = self._tried(replay, holds)
        best, least = holds, present.reserved_bytes
        replay.keep()
        started = time.monotonic()
        for number in range(_DRAWS):
            done = max(number / _DRAWS, (time.monotonic() - started) / seconds)
            if done >= 1 or self._is_enough(least):
                break
            drawn = self._drawn(holds, replay)
            if drawn is None:
                continue
            worse = -_WARM * self.allocated_bytes * (1 - done) ** 2 * math.log(1 - self.random.random())
            found = self._tried(replay, drawn, present.cost + int(worse))
            if found.allocated_bytes > self.allocated_bytes or found.cost > present.cost + int(worse):
                continue
            holds, present = drawn, found
            replay.keep()
            if found.is_robust and found.reserved_bytes < least:
                best, least = holds, found.reserved_bytes
        return best, least

    def _tried(self, replay: _Replay, holds: _Holds, most: int = 1 << 62) -> _Tried:
        """What ``holds`` give; where that costs more than ``most``, its cost is some number above."""
        reserved_bytes, allocated_bytes = replay.replay(holds)
        cost = reserved_bytes
        if cost <= most:
            cost = max(cost, replay.most_of_variants(holds, most + self.spare) - self.spare)
        return _Tried(reserved_bytes, allocated_bytes, cost)

    def _is_enough(self, reserved_bytes: int) -> bool:
        return reserved_bytes <= self.allocated_bytes * (1 + _ENOUGH)

    def _drawn(self, present: _Holds, replay: _Replay) -> _Holds | None:
        """``present`` with more holds at a step, or with none there; None: nothing was drawn."""
        in_the_way = self.random.random() < _IN_THE_WAY
        if not (count := replay.count(in_the_way=in_the_way)):
            return None
        one = replay.served(self.random.randrange(count), in_the_way=in_the_way)
        if one.place in present and self.random.random() < _REMOVE:
            return {place: given for place, given in present.items() if place != one.place}
        near = self.random.random() < _NEAR
        chosen = self.random.randrange(2 if near else len(one.fitting) + 1)
        # the largest first: each is served by the block that it is to fill
        filled = list(reversed(one.fitting[:chosen]))
        if chosen < len(one.fitting) and self.random.random() < _AT_END:
            filled.append(one.fitting[chosen] - one.nbytes)
        less = min(self.random.choice(_SPARE), one.nbytes // 2)
        given = [nbytes - less for nbytes in filled if nbytes - less > MOST_SMALL]
        together = (*present.get(one.place, ()), *given)
        return {**present, one.place: together} if given and sum(together) <= self.room[one.place] else None

    def _without_needless(self, replay: _Replay, holds: _Holds, least: int) -> _Holds:
        for place in list(holds):
            for i in reversed(range(len(holds[place]))):
                rest = (*holds[place][:i], *holds[place][i + 1 :])
                fewer = {**holds, place: rest} if rest else {p: given for p, given in holds.items() if p != place}
                found = self._tried(replay, fewer, least)
                if found.allocated_bytes <= self.allocated_bytes and found.is_robust and found.cost <= least:
                    holds = fewer
        return holds
