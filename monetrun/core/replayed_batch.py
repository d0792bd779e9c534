"""The inputs of a training step while it is replayed through the allocator: what the next ones replace, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from monetrun.core.caching_allocator import CachingAllocator


@dataclass(slots=True)
class Block:
    """What a request got."""

    address: int
    nbytes: int


class ReplayedBatch:
    """The parts of a batch.

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
