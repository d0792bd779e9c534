"""Blocks of the allocator while a training step is replayed through it, and the step's inputs among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monetrun.core.caching_allocator import CachingAllocator


@dataclass(slots=True)
class Block:
    """What a request got."""

    address: int
    nbytes: int


def free_all(allocator: CachingAllocator, blocks: list[Block]) -> None:
    """Free them, the latest first."""
    while blocks:
        allocator.free(blocks.pop().address)


def free_some(allocator: CachingAllocator, blocks: list[Block], nbytes: int) -> int:
    """Free blocks, the latest first, of ``nbytes`` together at most; gives their bytes."""
    freed = 0
    for i in reversed(range(len(blocks))):
        if freed + blocks[i].nbytes <= nbytes:
            freed += blocks[i].nbytes
            allocator.free(blocks.pop(i).address)
    return freed


def free_latest(allocator: CachingAllocator, nbytes: int, *lists: list[Block]) -> bool:
    """Free the latest block of this size in the first list that has one; gives whether there was one."""
    for blocks in lists:
        for i in reversed(range(len(blocks))):
            if blocks[i].nbytes == nbytes:
                allocator.free(blocks.pop(i).address)
                return True
    return False


class ReplayedBatch:
    """The inputs of a step, in parts: tensors that the next step's replace.

    Args:
        sizes: in bytes, of each part.
        allocator: that the step is replayed through.
    """

    def __init__(self, sizes: tuple[int, ...], allocator: CachingAllocator) -> None:
        self.sizes = sizes
        self.allocator = allocator
        self._blocks: list[Block | None] = [None] * len(sizes)  # None: not known, or freed

    def find(self, loaded: Mapping[int, int]) -> None:
        """Find the first step's batch among the blocks that are there before it: the latest of the same sizes."""
        base = [Block(address, nbytes) for address, nbytes in loaded.items()]
        for i, nbytes in enumerate(self.sizes):
            found = next((b for b in reversed(base) if b.nbytes == nbytes), None)
            if found is not None:
                base.remove(found)
                self._blocks[i] = found

    def replace(self) -> None:
        """The next step's batch is made, then this one is freed."""
        last, self._blocks = self._blocks, [Block(self.allocator.allocate(n), n) for n in self.sizes]
        for block in reversed(last):
            if block is not None:
                self.allocator.free(block.address)

    def free(self, parts: Iterable[int]) -> int:
        """Free parts that other inputs replace within the step; gives their bytes, also of those that are not known."""
        freed = 0
        for i in parts:
            block, self._blocks[i] = self._blocks[i], None
            if block is not None:
                self.allocator.free(block.address)
            freed += self.sizes[i]
        return freed

    def free_one(self, nbytes: int) -> None:
        """Free a part of this size, if there is one: nothing but the backward pass held it."""
        i = next((i for i, b in enumerate(self._blocks) if b is not None and b.nbytes == nbytes), None)
        if i is not None:
            self.free([i])

    def is_last_of(self, script: dict[int, Block]) -> None:
        """The step ends: of the inputs that took a part's place the latest, taken from ``script``, is that part now."""
        for i, nbytes in enumerate(self.sizes):
            last = next((k for k in reversed(script) if script[k].nbytes == nbytes), None)
            if self._blocks[i] is None and last is not None:
                self._blocks[i] = script.pop(last)
