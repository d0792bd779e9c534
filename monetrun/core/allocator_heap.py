"""Blocks and segments in the model of torch's CUDA caching allocator: splitting, merging, mapping and unmapping."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from monetrun.core.allocator_settings import SMALL_SEGMENT, AllocatorSettings

# where segments begin: each after the one before, as the driver gives them out
_FIRST_ADDRESS = 1 << 40
_ALIGNMENT = 32 << 20


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: allocated, free, or (of an expandable segment) not mapped."""

    segment: Segment
    stream: int
    start: int
    nbytes: int
    allocated: bool = False
    mapped: bool = True
    previous: Block | None = None
    next: Block | None = None


@dataclass(eq=False, slots=True)
class Segment:
    """What was reserved at once; an expandable one maps pages of ``page_bytes`` as needed (0: not expandable)."""

    pool: Pool
    start: int
    nbytes: int
    page_bytes: int = 0


@dataclass(eq=False, slots=True)
class Pool:
    """Free blocks of one size class: by stream, size and address; unmapped ones by stream and address."""

    small: bool
    free: list[tuple[int, int, int]] = field(default_factory=list)
    unmapped: list[tuple[int, int]] = field(default_factory=list)
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0


class Heap:
    """All segments of a device, in two pools.

    Args:
        settings: of the allocator.
        device_bytes: memory of the device: an expandable segment has an address space of 1.125 times that.

    Attributes:
        pools: for small requests (True) and for large ones.
        blocks: by their start.
        peak_reserved_bytes: the most reserved so far.
    """

    def __init__(self, settings: AllocatorSettings, device_bytes: int) -> None:
        self.settings = settings
        self.device_bytes = device_bytes
        self.pools = {True: Pool(small=True), False: Pool(small=False)}
        self.blocks: dict[int, Block] = {}
        self.peak_reserved_bytes = 0
        self._next_address = _FIRST_ADDRESS

    @property
    def reserved_bytes(self) -> int:
        """What is reserved now."""
        return self.pools[True].reserved_bytes + self.pools[False].reserved_bytes

    def add_segment(self, pool: Pool, stream: int, nbytes: int) -> Block:
        """Reserve ``nbytes``: a free block."""
        block = self._new_segment(pool, stream, nbytes, 0)
        self.keep_free(block)
        self._reserved(pool, nbytes)
        return block

    def release(self, block: Block) -> None:
        """Give a free block that is a whole segment back to the device."""
        self.forget_free(block)
        del self.blocks[block.start]
        self._reserved(block.segment.pool, -block.nbytes)

    def _new_segment(self, pool: Pool, stream: int, nbytes: int, page_bytes: int) -> Block:
        start = self._next_address
        self._next_address += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        segment = Segment(pool, start, nbytes, page_bytes)
        block = self.blocks[start] = Block(segment, stream, start, nbytes, mapped=page_bytes == 0)
        return block

    # ---- expandable segments

    def expand(self, pool: Pool, stream: int, size: int) -> Block:
        """A free block of at least ``size`` bytes of an expandable segment, whose pages are mapped as needed."""
        block = self._expandable(pool, stream, size)
        if not block.mapped:
            block = self._map(block, min(block.nbytes, size))
        while block.nbytes < size:
            assert block.next is not None
            block = self._map(block.next, min(size - block.nbytes, block.next.nbytes))
        return block

    def _expandable(self, pool: Pool, stream: int, size: int) -> Block:
        """The first block, by address, from which free and unmapped blocks of ``size`` bytes follow each other."""
        for _, start in pool.unmapped[bisect_left(pool.unmapped, (stream, 0)) :]:
            block = self.blocks[start]
            if block.stream != stream:
                break
            if block.previous is not None and not block.previous.allocated:
                block = block.previous
            room, follower = 0, block
            while room < size and follower is not None and not follower.allocated:
                room += follower.nbytes
                follower = follower.next  # type: ignore[assignment]
            if room >= size:
                return block
        return self._new_expandable(pool, stream, size)

    def _new_expandable(self, pool: Pool, stream: int, size: int) -> Block:
        page = SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes
        room = max(self.device_bytes + self.device_bytes // 8, size)  # what no device has is reserved all the same
        space = -(-room // page) * page
        block = self._new_segment(pool, stream, space, page)
        insort(pool.unmapped, (stream, block.start))
        return block

    def _map(self, block: Block, nbytes: int) -> Block:
        """Map pages of the unmapped ``block`` for at least ``nbytes``; gives the free block that has them."""
        pool, page = block.segment.pool, block.segment.page_bytes
        end = block.start + nbytes - block.segment.start
        mapped = -(-end // page) * page + block.segment.start - block.start
        pool.unmapped.remove((block.stream, block.start))
        if mapped < block.nbytes:
            rest = Block(block.segment, block.stream, block.start + mapped, block.nbytes - mapped, mapped=False)
            self._link_after(block, rest)
            insort(pool.unmapped, (rest.stream, rest.start))
        block.mapped, block.nbytes = True, mapped
        self.merge(block, block.previous)
        self.merge(block, block.next)
        self.keep_free(block)
        self._reserved(pool, mapped)
        return block

    def unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block."""
        segment = block.segment
        offset = block.start - segment.start
        first = -(-offset // segment.page_bytes) * segment.page_bytes
        last = (offset + block.nbytes) // segment.page_bytes * segment.page_bytes
        if last <= first:
            return
        self.forget_free(block)
        end = block.start + block.nbytes
        if first > offset:
            before = Block(segment, block.stream, block.start, first - offset)
            self._move_start(block, segment.start + first)
            self._link_before(block, before)
            self.keep_free(before)
        if segment.start + last < end:
            after = Block(segment, block.stream, segment.start + last, end - segment.start - last)
            self._link_after(block, after)
            self.keep_free(after)
        block.nbytes, block.mapped = last - first, False
        self._reserved(segment.pool, first - last)
        self.merge(block, block.previous)
        self.merge(block, block.next)
        insort(segment.pool.unmapped, (block.stream, block.start))

    # ---- blocks

    def _reserved(self, pool: Pool, nbytes: int) -> None:
        pool.reserved_bytes += nbytes
        pool.peak_reserved_bytes = max(pool.peak_reserved_bytes, pool.reserved_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def split(self, block: Block, size: int) -> None:
        """Cut ``block`` to ``size`` bytes; the rest is free."""
        rest = Block(block.segment, block.stream, block.start + size, block.nbytes - size)
        block.nbytes = size
        self._link_after(block, rest)
        self.keep_free(rest)

    def merge(self, block: Block, other: Block | None) -> None:
        """Add the neighbour ``other`` to ``block`` if it is as free, or as unmapped, as that."""
        if other is None or other.allocated or other.mapped != block.mapped:
            return
        if other.mapped:
            self.forget_free(other)
        else:
            other.segment.pool.unmapped.remove((other.stream, other.start))
        del self.blocks[other.start]
        if other is block.previous:
            del self.blocks[block.start]
            block.start = other.start
            self.blocks[block.start] = block
            block.previous = other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.nbytes += other.nbytes

    def _move_start(self, block: Block, start: int) -> None:
        del self.blocks[block.start]
        block.nbytes -= start - block.start
        block.start = start
        self.blocks[start] = block

    def _link_after(self, block: Block, new: Block) -> None:
        new.previous, new.next = block, block.next
        if block.next is not None:
            block.next.previous = new
        block.next = new
        self.blocks[new.start] = new

    def _link_before(self, block: Block, new: Block) -> None:
        new.previous, new.next = block.previous, block
        if block.previous is not None:
            block.previous.next = new
        block.previous = new
        self.blocks[new.start] = new

    def keep_free(self, block: Block) -> None:
        """Add a free block to its pool."""
        insort(block.segment.pool.free, (block.stream, block.nbytes, block.start))

    def forget_free(self, block: Block) -> None:
        """Take a free block out of its pool."""
        free = block.segment.pool.free
        del free[bisect_left(free, (block.stream, block.nbytes, block.start))]


def expanded_at_end(heap: Heap, pool: Pool, stream: int, size: int, gap_bytes: int) -> Block:
    """A free block of at least ``size`` bytes after all others, and after so much unmapped address space."""
    starts = [start for of_stream, start in pool.unmapped if of_stream == stream]
    end = heap.blocks[starts[-1]] if starts else heap._new_expandable(pool, stream, size)
    if 0 < gap_bytes < end.nbytes - size:
        after = Block(end.segment, stream, end.start + gap_bytes, end.nbytes - gap_bytes, mapped=False)
        end.nbytes = gap_bytes
        heap._link_after(end, after)
        insort(pool.unmapped, (stream, after.start))
        end = after
    start = end.start
    block = heap._map(end, size)
    if block.start < start:  # what was free before it has become a part of it
        heap.forget_free(block)
        heap.split(block, start - block.start)
        heap.keep_free(block)
        block = heap.blocks[start]
    return block
