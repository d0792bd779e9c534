"""A training step's large requests, replayed through the large pool while something is held beside some steps.

``PoolReplay`` is the reference in Python; ``native_pool_replay`` does the same many times as fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from monetrun.core.allocator_settings import MOST_SMALL
from monetrun.core.caching_allocator import CachingAllocator, large_blocks
from monetrun.core.large_pool import LargePool
from monetrun.core.replayed_blocks import load_base
from monetrun.core.step import DeviceMemory
from monetrun.planning.large_requests import Event, Free, Place, Request, StepBegins

Held = Mapping[Place, Sequence[int]]
"""The bytes that are held during steps, in the order in which they are allocated."""


@dataclass(frozen=True, slots=True)
class Served:
    """A large request of a step of a schedule.

    Attributes:
        place: the step.
        nbytes: of the block that is requested.
        fitting: the bytes of the free blocks that could serve it, ascending.
    """

    place: Place
    nbytes: int
    fitting: Sequence[int]


@dataclass(slots=True)
class _Outcome:
    """How large requests were served, and which of them were alive when more was reserved for the last time."""

    served: list[Served] = field(default_factory=list)
    in_the_way: list[int] = field(default_factory=list)


def begin(memory: DeviceMemory, pool_bytes: int = 0) -> tuple[LargePool, dict[int, int]]:
    """The large pool before the first event, and where the blocks lie that are there, by their requests.

    Args:
        memory: of the device.
        pool_bytes: so much of the pool is reserved.
    """
    allocator = CachingAllocator(memory.settings, memory.device_bytes)
    addresses = {~i: address for i, address in enumerate(load_base(memory, allocator))}
    allocator.empty_cache()
    if (missing := pool_bytes - allocator.large_bytes) > MOST_SMALL:
        allocator.free(allocator.allocate(missing))
    large = {start for start, *_ in large_blocks(allocator)}
    return LargePool.of(allocator), {number: address for number, address in addresses.items() if address in large}


class PoolReplay:
    """Replays the large requests of training steps, and of variants of them.

    Args:
        memory: of the device.
        traces: the steps' events, then those of variants.
        large_bytes: requests of a step that are at least so large are noted.
        pool_bytes: so much of the pool is reserved before.
    """

    def __init__(
        self, memory: DeviceMemory, traces: Iterable[Sequence[Event]], large_bytes: int, pool_bytes: int = 0
    ) -> None:
        self.settings = memory.settings
        self.large_bytes = large_bytes
        self._traces = list(traces)
        self._begun = begin(memory, pool_bytes)
        self._latest = self._kept = _Outcome()

    def replay(self, holds: Held) -> tuple[int, int]:
        """Replay the steps; gives what is reserved in the end, and the most that is allocated."""
        reserved_bytes, allocated_bytes, self._latest = self._replayed(self._traces[0], holds)
        return reserved_bytes, allocated_bytes

    def most_of_variants(self, holds: Held, most: int) -> int:
        """The most that a variant reserves; where one reserves more than ``most``, what it does."""
        reserved_bytes = 0
        for events in self._traces[1:]:
            if reserved_bytes > most:
                break
            reserved_bytes = max(reserved_bytes, self._replayed(events, holds)[0])
        return reserved_bytes

    def keep(self) -> None:
        """Have ``count`` and ``served`` tell of the latest ``replay``."""
        self._kept = self._latest

    def count(self, *, in_the_way: bool) -> int:
        """How many large requests were served; or, of them, how many were alive when more was reserved last."""
        return len(self._kept.in_the_way if in_the_way else self._kept.served)

    def served(self, i: int, *, in_the_way: bool) -> Served:
        """One of these."""
        return self._kept.served[self._kept.in_the_way[i] if in_the_way else i]

    def _replayed(self, events: Sequence[Event], holds: Held) -> tuple[int, int, _Outcome]:
        pool, addresses = self._begun[0].copy(), dict(self._begun[1])
        allocated, reserved = pool.allocated_bytes, pool.reserved_bytes
        found = _Outcome()
        alive: dict[int, int] = {}  # large requests that are not freed: which of those served they are
        place: Place | None = None
        held: list[int] = []
        for event in events:
            if isinstance(event, Request):
                if place is not None and event.nbytes >= self.large_bytes:
                    alive[event.number] = len(found.served)
                    fitting = [nbytes for nbytes, _ in pool.fitting(event.nbytes)]
                    found.served.append(Served(place, event.nbytes, fitting))
                addresses[event.number] = pool.allocate(event.nbytes)
                allocated = max(allocated, pool.allocated_bytes)
                if pool.reserved_bytes > reserved:
                    reserved, found.in_the_way = pool.reserved_bytes, list(alive.values())
            elif isinstance(event, Free):
                alive.pop(event.request, None)
                if (address := addresses.pop(event.request, None)) is not None:
                    pool.release(address)
            elif isinstance(event, StepBegins):
                place = event.place
                held = [pool.allocate(self.settings.rounded(nbytes)) for nbytes in holds.get(place, ())]
                allocated = max(allocated, pool.allocated_bytes)
            else:
                for address in held:
                    pool.release(address)
                held, place = [], None
        return pool.reserved_bytes, allocated, found
