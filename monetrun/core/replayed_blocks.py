"""Blocks of the allocator while a training step is replayed through it, and the step's inputs among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.graph import Costs, Requests
from monetrun.core.plan import Step
from monetrun.core.step import DeviceMemory


@dataclass(slots=True)
class Block:
    """What a request got."""

    address: int
    nbytes: int


def load_base(memory: DeviceMemory, allocator: CachingAllocator) -> dict[int, int]:
    """Load what lies there before the first step; gives the bytes of each block, by its address."""
    addresses = [address for s in memory.base for address in allocator.load(s.small, s.blocks, gap_bytes=s.gap_bytes)]
    sizes = [nbytes for s in memory.base for nbytes in s.blocks if nbytes > 0]
    return dict(zip(addresses, sizes, strict=True))


def blocks_at(indices: Iterable[int], base: Mapping[int, int]) -> list[Block]:
    """Those of the blocks in ``base``, bytes by address, that are at these places in it."""
    blocks = [Block(address, nbytes) for address, nbytes in base.items()]
    return [blocks[i] for i in indices]


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
        if found := take_sizes(blocks, [nbytes]):
            free_all(allocator, found)
            return True
    return False


def take_sizes(blocks: list[Block], sizes: Iterable[int]) -> list[Block]:
    """Take the latest block of each of these sizes out of ``blocks``, where there is one."""
    taken = []
    for nbytes in sizes:
        i = next((i for i in reversed(range(len(blocks))) if blocks[i].nbytes == nbytes), None)
        if i is not None:
            taken.append(blocks.pop(i))
    return taken


def serve(allocator: CachingAllocator, costs: Costs, step: Step, outputs: Sequence[int]) -> list[int]:
    """Serve what one step's operator requests, for new outputs of these sizes; gives their addresses."""
    known = costs.requests[step.operator][step.implementation] if costs.requests else Requests()
    if not known.results:
        addresses = [allocator.allocate(nbytes) for nbytes in outputs]
        allocator.free(allocator.allocate(costs.workspace_bytes[step.operator][step.implementation]))
        return addresses
    held: dict[int, int] = {}
    made = 0
    for n in known.sizes:
        if n < 0:
            allocator.free(held.pop(-n))
        else:
            made += 1
            held[made] = allocator.allocate(n)
    addresses = [held.pop(number) for number in known.results]
    for address in held.values():
        allocator.free(address)
    return addresses


class LastGradients:
    """The gradients of the last step that are there when a step begins.

    Args:
        blocks: of them.
        nbytes: of the tensors in them that the step frees.
        allocator: that the step is replayed through.
    """

    def __init__(self, blocks: list[Block], nbytes: int, allocator: CachingAllocator) -> None:
        self._blocks = blocks
        self._bytes = nbytes
        self._allocator = allocator

    def free(self, nbytes: int) -> None:
        """Free so many bytes of them; with the last ones also what rounding has added to their blocks."""
        self._bytes -= max(0, nbytes)
        if self._bytes > 0:
            free_some(self._allocator, self._blocks, nbytes)
        else:
            self.free_all()

    def free_all(self) -> None:
        """The step frees the last ones."""
        free_all(self._allocator, self._blocks)


class LastOutputs:
    """The outputs of the last step that the script holds when a step begins.

    Args:
        blocks: of them.
        later: bytes of those that it drops one by one, after the step's first backward.
        allocator: that the step is replayed through.
    """

    def __init__(self, blocks: list[Block], later: Iterable[int], allocator: CachingAllocator) -> None:
        self._later = take_sizes(blocks, later)
        self._others = blocks
        self._allocator = allocator

    def drop(self, nbytes: int, *, later: bool) -> None:
        """Drop an output of this size (``later``), or all that are not dropped later; none if it is not positive."""
        if nbytes > 0 and later:
            free_latest(self._allocator, nbytes, self._later)
        elif nbytes > 0:
            free_all(self._allocator, self._others)

    def drop_all(self) -> None:
        """The step has ended."""
        for blocks in (self._others, self._later):
            free_all(self._allocator, blocks)


class ReplayedBatch:
    """The inputs of a step, in parts: tensors that the next step's replace.

    Args:
        sizes: in bytes, of each part.
        allocator: that the step is replayed through.

    Attributes:
        blocks: of each part; none: not known, or freed.
    """

    def __init__(self, sizes: tuple[int, ...], allocator: CachingAllocator) -> None:
        self.sizes = sizes
        self.allocator = allocator
        self.blocks: list[list[Block]] = [[] for _ in sizes]

    def find(self, loaded: Mapping[int, int], others: Iterable[Block] = ()) -> None:
        """Find the first step's batch among what is there before it: the latest of the same sizes, none of ``others``.

        ``loaded``: bytes of the blocks, by address.
        """
        besides = {block.address for block in others}
        base = [Block(address, nbytes) for address, nbytes in loaded.items() if address not in besides]
        for i, nbytes in enumerate(self.sizes):
            found = next((b for b in reversed(base) if b.nbytes == nbytes), None)
            if found is not None:
                base.remove(found)
                self.blocks[i] = [found]

    def replace(self) -> None:
        """The next step's batch is made, then this one is freed."""
        last, self.blocks = self.blocks, [[Block(self.allocator.allocate(n), n)] for n in self.sizes]
        for blocks in reversed(last):
            free_all(self.allocator, blocks)

    def free(self, parts: Iterable[int]) -> int:
        """Free parts that other inputs replace within the step; gives their bytes, also of those that are not known."""
        freed = 0
        for i in parts:
            free_all(self.allocator, self.blocks[i])
            freed += self.sizes[i]
        return freed

    def free_one(self, nbytes: int) -> None:
        """Free a part of this size, if there is one: nothing but the backward pass held it."""
        i = next((i for i, bs in enumerate(self.blocks) if sum(b.nbytes for b in bs) == nbytes), None)
        if i is not None:
            self.free([i])

    def is_last_of(self, script: dict[int, Block], since: int) -> None:
        """The step ends: of the inputs that took a part's place the latest, taken from ``script``, is that part now.

        What else was requested between the steps, and is still there, takes the place of the largest part that was
        freed and has none: another batch may have other sizes, and DistributedDataParallel replaces its buckets once.

        Args:
            script: what the script has requested and not freed, by the number of the request.
            since: later requests are between the steps.
        """
        rounded = self.allocator.settings.rounded
        for i, nbytes in enumerate(self.sizes):
            last = next((k for k in reversed(script) if rounded(script[k].nbytes) == nbytes), None)
            if not self.blocks[i] and last is not None:
                self.blocks[i] = [script.pop(last)]
        freed = [i for i, blocks in enumerate(self.blocks) if not blocks]
        if freed:
            place = max(freed, key=self.sizes.__getitem__)
            self.blocks[place] = [script.pop(k) for k in list(script) if k > since]
