"""A training step's large requests, as CUDA's caching allocator gets them, for a search that replays them often."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monetrun.core.allocator_settings import MOST_SMALL, AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.plan import Schedule
from monetrun.core.requests import StepReplay
from monetrun.core.step import StepRecord

# Variants of what is requested have something small in one of so many places between steps.
_EVERY = 60

Place = tuple[int, int]
"""A graph, and the index of a step of its schedule."""


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of a block that is requested; ``number`` is its own."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Free:
    """A request, or (negative) a block of the base, whose memory is freed."""

    request: int


@dataclass(frozen=True, slots=True)
class StepBegins:
    """A step of a schedule begins."""

    place: Place


@dataclass(frozen=True, slots=True)
class StepEnds:
    """It ends."""


Event = Request | Free | StepBegins | StepEnds


def large_requests(record: StepRecord, schedules: Sequence[Schedule], steps: int) -> list[Event]:
    """What ``steps`` training steps request of the large pool, and where in them the steps of ``schedules`` begin."""
    assert record.memory is not None
    allocator = _Tracing(record.memory.settings, record.memory.device_bytes)
    traced = _TracedSteps(record, schedules, allocator)
    allocator.base_is(traced.begin_with(record.memory))
    for number in range(steps):
        traced.step(first=number == 0)
    return allocator.events


def otherwise(events: Sequence[Event], seed: int) -> list[Event]:
    """The same with what the script does between two steps in another order, and with small blocks that it may keep."""
    draw = random.Random(seed)
    found: list[Event] = []
    between: list[Event] = []
    inside, number = False, len(events)
    for event in (*events, StepEnds()):
        if isinstance(event, (StepBegins, StepEnds)):
            found += _shuffled(between, draw)
            between.clear()
            inside = isinstance(event, StepBegins)
        elif not inside:
            between.append(event)
            if draw.randrange(_EVERY) == 0 and isinstance(event, Request):
                between.append(Request(number, draw.randrange(2, 9) * MOST_SMALL // 2))
                number += 1
            continue
        found.append(event)
    return found[:-1]


def _shuffled(events: Sequence[Event], draw: random.Random) -> list[Event]:
    """In another order, in which nothing is freed before it is requested."""
    order = draw.sample(events, len(events))
    requested = {event.number for event in events if isinstance(event, Request)}
    found: list[Event] = []
    late: list[Event] = []
    for event in order:
        if isinstance(event, Free) and event.request in requested:
            late.append(event)
        else:
            found.append(event)
            if isinstance(event, Request):
                requested.discard(event.number)
    return [*found, *late]


class _Tracing(CachingAllocator):
    """Notes what is requested and freed.

    Attributes:
        events: so far.
    """

    def __init__(self, settings: AllocatorSettings, device_bytes: int) -> None:
        super().__init__(settings, device_bytes)
        self.events: list[Event] = []
        self._requests: dict[int, int] = {}  # by address

    def base_is(self, base: Mapping[int, int]) -> None:
        """These blocks, in this order, were there before."""
        self._requests.update((address, ~i) for i, address in enumerate(base))

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """As without a trace."""
        address = super().allocate(nbytes, stream)
        if (block_bytes := self.settings.rounded(nbytes)) > MOST_SMALL:
            self._requests[address] = len(self.events)
            self.events.append(Request(len(self.events), block_bytes))
        return address

    def free(self, address: int) -> None:
        """As without a trace."""
        super().free(address)
        request = self._requests.pop(address, None)
        if request is not None:
            self.events.append(Free(request))


class _TracedSteps(StepReplay):
    allocator: _Tracing

    def run_step(self, k: int, call: object, i: int) -> None:
        """As without a trace."""
        self.allocator.events.append(StepBegins((k, i)))
        super().run_step(k, call, i)  # type: ignore[arg-type]
        self.allocator.events.append(StepEnds())
