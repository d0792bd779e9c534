"""A model of torch's CUDA caching allocator: which bytes it reserves from the device for a sequence of requests.

A budget on CUDA bounds *reserved* bytes. They depend on sizes, order and history, so a schedule is replayed here,
request by request: rounding, small and large pool, best fit, splitting, merging, expandable segments, the memory cap,
and what the allocator does when the cap refuses. Follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.15,
and agrees with it to the byte (``tests/core/test_caching_allocator.py``). Left out: private pools, blocks that other
streams use, and ``garbage_collection_threshold``, which only frees what is cached.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence

from monetrun.core.allocator_heap import Block, Heap, Pool, expanded_at_end
from monetrun.core.allocator_settings import LEAST_BLOCK, MOST_SMALL, ROUND_LARGE, UNLIMITED, AllocatorSettings
from monetrun.core.errors import MonetrunError


class AllocatorOutOfMemory(MonetrunError):
    """The cap refuses a request, also after all cached memory was released."""


class CachingAllocator:
    """Serves requests as torch's allocator does.

    Args:
        settings: of the allocator.
        device_bytes: memory of the device: an expandable segment has an address space of 1.125 times that.
        cap_bytes: the most that may be reserved (``set_per_process_memory_fraction``); None: no cap.

    Attributes:
        allocated_bytes: in blocks that are in use.
        peak_allocated_bytes: the most so far.
        retries: how often everything cached was released to serve a request (``num_alloc_retries``).
    """

    def __init__(self, settings: AllocatorSettings, device_bytes: int = 1 << 40, cap_bytes: int | None = None) -> None:
        self.settings = settings
        self.cap_bytes = cap_bytes
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = 0
        self._heap = Heap(settings, device_bytes)

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return self._heap.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most reserved so far."""
        return self._heap.peak_reserved_bytes

    @property
    def small_bytes(self) -> int:
        """The most reserved so far for requests of up to 1 MiB."""
        return self._heap.pools[True].peak_reserved_bytes

    @property
    def large_bytes(self) -> int:
        """The most reserved so far for larger requests."""
        return self._heap.pools[False].peak_reserved_bytes

    def load(self, small: bool, blocks: Sequence[int], stream: int = 0, gap_bytes: int = 0) -> list[int]:
        """Add a segment after the others, which has these blocks: bytes in use, or, negative, free.

        ``gap_bytes``: of an expandable one, the address space before it.

        Returns:
            The addresses of those in use.
        """
        pool = self._heap.pools[small]
        total = sum(map(abs, blocks))
        if self.settings.expandable:
            block = expanded_at_end(self._heap, pool, stream, total, gap_bytes)
        else:
            segment_bytes = self.settings.segment_bytes(total if not small else 1)
            segment_bytes = max(segment_bytes, -(-total // ROUND_LARGE) * ROUND_LARGE)
            block = self._heap.add_segment(pool, stream, segment_bytes)
        used, unused = list[int](), list[int]()
        for nbytes in blocks:
            self._heap.forget_free(block)
            if block.nbytes > abs(nbytes):
                self._heap.split(block, abs(nbytes))
            block.allocated = True
            self.allocated_bytes += block.nbytes
            (used if nbytes > 0 else unused).append(block.start)
            following = block.next
            if following is None or not following.mapped:
                break
            block = following
        for address in unused:
            self.free(address)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return used

    def reset_peaks(self) -> None:
        """Start new peaks, from what is held now."""
        self.peak_allocated_bytes = self.allocated_bytes
        self._heap.peak_reserved_bytes = self.reserved_bytes
        for pool in self._heap.pools.values():
            pool.peak_reserved_bytes = pool.reserved_bytes

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """Serve a request; gives the block's address, 0 for an empty request.

        Raises:
            AllocatorOutOfMemory: the cap refuses it.
        """
        if nbytes == 0:
            return 0
        size = self.settings.rounded(nbytes)
        pool = self._heap.pools[size <= MOST_SMALL]
        block = self._best_fit(pool, stream, size) or self._reserve(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._reserve(pool, stream, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._reserve(pool, stream, size)
            if block is None:
                raise AllocatorOutOfMemory(
                    f"{nbytes} bytes exceed the cap of {self.cap_bytes}: {self.reserved_bytes} are reserved"
                )
        self._heap.forget_free(block)
        if self._splits(block, size):
            self._heap.split(block, size)
        block.allocated = True
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block.start

    def free(self, address: int) -> None:
        """Give back the block at ``address``; nothing for 0."""
        if address == 0:
            return
        block = self._heap.blocks[address]
        block.allocated = False
        self.allocated_bytes -= block.nbytes
        self._heap.merge(block, block.previous)
        self._heap.merge(block, block.next)
        self._heap.keep_free(block)

    def free_all(self) -> None:
        """Give back every block that is in use."""
        for address in [block.start for block in self._heap.blocks.values() if block.allocated]:
            self.free(address)

    def empty_cache(self) -> None:
        """Release all cached memory, as ``torch.cuda.empty_cache``."""
        for pool in (self._heap.pools[False], self._heap.pools[True]):
            for _, _, start in list(pool.free):
                block = self._heap.blocks[start]
                if block.segment.page_bytes:
                    self._heap.unmap(block)
                elif block.previous is None and block.next is None:
                    self._heap.release(block)

    def _release_oversize(self, pool: Pool, stream: int, size: int) -> bool:
        """Release free blocks that are too large to be split, enough for ``size`` bytes: the smallest that has them, or
        several, the largest first.
        """
        if self.settings.max_split_bytes == UNLIMITED:
            return False
        wanted = max(size, self.settings.max_split_bytes)
        i = bisect_left(pool.free, (stream, wanted, 0))
        if i < len(pool.free) and pool.free[i][0] == stream:
            block = self._heap.blocks[pool.free[i][2]]
            if not block.segment.page_bytes:
                self._heap.release(block)
                return True
        chosen, found = [], 0
        for entry in reversed(pool.free[:i]):
            if found >= wanted or entry[0] != stream or entry[1] < self.settings.max_split_bytes:
                break
            block = self._heap.blocks[entry[2]]
            if not block.segment.page_bytes:
                chosen.append(block)
                found += block.nbytes
        for block in chosen:
            self._heap.release(block)
        return found >= wanted

    # ---- finding a block

    def _best_fit(self, pool: Pool, stream: int, size: int) -> Block | None:
        """The smallest free block that is large enough; of expandable ones the one that can grow least."""
        free = pool.free
        i = bisect_left(free, (stream, size, 0))
        if i == len(free) or free[i][0] != stream:
            return None
        settings = self.settings
        if settings.expandable:
            block = self._heap.blocks[free[i][2]]
            for entry in itertools.islice(free, i + 1, None):
                other = self._heap.blocks[entry[2]]
                if not block.segment.page_bytes or entry[0] != stream or _could_be(other) >= _could_be(block):
                    break
                block = other
        else:
            block = self._heap.blocks[free[i][2]]
        if size < settings.max_split_bytes <= block.nbytes:
            return None
        if size >= settings.max_split_bytes and block.nbytes >= size + settings.max_rounding_bytes:
            return None
        return block

    def _reserve(self, pool: Pool, stream: int, size: int) -> Block | None:
        """A block of newly reserved memory, at least ``size`` bytes; None where the cap refuses it."""
        segment_bytes = self.settings.segment_bytes(size)
        if self.cap_bytes is not None and self.reserved_bytes + segment_bytes > self.cap_bytes:
            return None
        if self.settings.expandable:
            return self._heap.expand(pool, stream, size)
        return self._heap.add_segment(pool, stream, segment_bytes)

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.nbytes - size
        if block.segment.pool.small or self.settings.expandable:
            return rest >= LEAST_BLOCK
        return size < self.settings.max_split_bytes and rest > MOST_SMALL


def _could_be(block: Block) -> int:
    """The bytes of a free block together with the unmapped ones after it."""
    following = block.next
    return block.nbytes + (following.nbytes if following is not None and not following.mapped else 0)


def large_blocks(allocator: CachingAllocator) -> list[tuple[int, int, bool, bool]]:
    """Start and bytes of the large pool's blocks, whether each is in use, and whether it is mapped."""
    blocks = allocator._heap.blocks.values()
    return [(b.start, b.nbytes, b.allocated, b.mapped) for b in blocks if not b.segment.pool.small]
