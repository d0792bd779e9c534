"""The large pool of ``CachingAllocator`` with expandable segments, alone: quick enough to replay a step very often.

Block by block it is what ``core.caching_allocator`` has for one stream that releases nothing
(``tests/core/test_large_pool.py``). It can be copied, and says what is free.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from monetrun.core.allocator_settings import LEAST_BLOCK, UNLIMITED, AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator, large_blocks

_ELSEWHERE = 1 << 60  # where another segment begins, and its bytes


class LargePool:
    """Free and used blocks of the large pool.

    Args:
        settings: of the allocator, with expandable segments; what is requested is rounded by them before.

    Attributes:
        free: bytes and start of each free block, ascending.
        reserved_bytes: in all blocks.
        allocated_bytes: in those that are in use.
    """

    __slots__ = ("_at", "_ending", "_holes", "_used", "allocated_bytes", "free", "reserved_bytes", "settings")

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.free: list[tuple[int, int]] = []
        self.reserved_bytes = self.allocated_bytes = 0
        self._at: dict[int, int] = {}  # the bytes of a free block, by its start
        self._ending: dict[int, int] = {}  # its start, by its end
        self._used: dict[int, int] = {}  # the bytes of a block in use, by its start
        self._holes: dict[int, int] = {}  # the bytes of what is not mapped, by its start

    @staticmethod
    def of(allocator: CachingAllocator) -> LargePool:
        """As the large pool of ``allocator`` is now."""
        pool = LargePool(allocator.settings)
        for start, nbytes, allocated, mapped in large_blocks(allocator):
            if not mapped:
                pool._holes[start] = nbytes
                continue
            pool.reserved_bytes += nbytes
            if allocated:
                pool._used[start] = nbytes
                pool.allocated_bytes += nbytes
            else:
                pool._keep(start, nbytes)
        pool._holes[_ELSEWHERE] = _ELSEWHERE
        return pool

    def blocks(self) -> list[tuple[int, int, int]]:
        """Start and bytes of all blocks by address, and 0 for one that is free, 1: in use, 2: not mapped."""
        states = enumerate((self._at, self._used, self._holes))
        return sorted((start, nbytes, state) for state, found in states for start, nbytes in found.items())

    def copy(self) -> LargePool:
        """One that goes on from here on its own."""
        other = LargePool(self.settings)
        other.free = self.free.copy()
        other.reserved_bytes, other.allocated_bytes = self.reserved_bytes, self.allocated_bytes
        other._at, other._ending = self._at.copy(), self._ending.copy()
        other._used, other._holes = self._used.copy(), self._holes.copy()
        return other

    def fitting(self, nbytes: int) -> list[tuple[int, int]]:
        """The free blocks that are large enough, ascending."""
        return self.free[bisect_left(self.free, (nbytes, 0)) :]

    def allocate(self, nbytes: int) -> int:
        """Serve a request of more than 1 MiB, rounded; gives the block's start."""
        i = self._best_fit(nbytes)
        if i is None:
            i = bisect_left(self.free, self._expanded(nbytes))
        found, start = self.free.pop(i)
        del self._at[start], self._ending[start + found]
        if found - nbytes >= LEAST_BLOCK:
            self._keep(start + nbytes, found - nbytes)
            found = nbytes
        self._used[start] = found
        self.allocated_bytes += found
        return start

    def release(self, start: int) -> None:
        """Free the block that begins there."""
        nbytes = self._used.pop(start)
        self.allocated_bytes -= nbytes
        self._merge(start, nbytes)

    def _best_fit(self, nbytes: int) -> int | None:
        """The place in ``free`` of the block that is taken: the smallest one; of several, one that cannot grow."""
        free = self.free
        i = bisect_left(free, (nbytes, 0))
        if i == len(free):
            return None
        while (more := self._holes.get(sum(free[i]))) is not None and i + 1 < len(free):
            following = free[i + 1]
            if following[0] + self._holes.get(sum(following), 0) >= free[i][0] + more:
                break
            i += 1
        settings = self.settings
        if settings.max_split_bytes < UNLIMITED:
            found = free[i][0]
            if nbytes < settings.max_split_bytes <= found:
                return None
            if nbytes >= settings.max_split_bytes and found >= nbytes + settings.max_rounding_bytes:
                return None
        return i

    def _expanded(self, nbytes: int) -> tuple[int, int]:
        """Map pages until there is a free block of ``nbytes``, at the lowest address where one can be."""
        for hole in sorted(self._holes):
            start = self._ending.get(hole, hole)
            if self._has_room(start, nbytes):
                break
        page = self.settings.large_segment_bytes
        while (present := self._at.get(start, 0)) < nbytes:
            hole = start + present
            hole_bytes = self._holes.pop(hole)
            mapped = min(hole_bytes, -(-(nbytes - present) // page) * page)
            if mapped < hole_bytes:
                self._holes[hole + mapped] = hole_bytes - mapped
            self.reserved_bytes += mapped
            self._merge(hole, mapped)
        return present, start

    def _has_room(self, start: int, nbytes: int) -> bool:
        """Whether free blocks and what is not mapped have ``nbytes`` in a row from ``start`` on."""
        end = start
        while end < start + nbytes:
            more = self._at.get(end) or self._holes.get(end)
            if more is None:
                return False
            end += more
        return True

    # ---- free blocks

    def _merge(self, start: int, nbytes: int) -> None:
        """Keep a new free block, together with free ones beside it."""
        before = self._ending.get(start)
        if before is not None:
            nbytes += self._forget(before)
            start = before
        if start + nbytes in self._at:
            nbytes += self._forget(start + nbytes)
        self._keep(start, nbytes)

    def _keep(self, start: int, nbytes: int) -> None:
        self._at[start] = nbytes
        self._ending[start + nbytes] = start
        insort(self.free, (nbytes, start))

    def _forget(self, start: int) -> int:
        """Take a free block away; gives its bytes."""
        nbytes = self._at.pop(start)
        del self._ending[start + nbytes]
        del self.free[bisect_left(self.free, (nbytes, start))]
        return nbytes
