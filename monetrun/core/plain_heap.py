"""What the plain run reserves, as the allocator's model has it: of the recorded step, and of what comes after it.

Under a plan the allocator's own segments say nothing of that: they are the plan's. So the recorded step is replayed as
the plain run makes it, and what comes later (other shapes, other models, more that is held) on top of that.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect
from collections.abc import Sequence, Set
from dataclasses import replace

from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.graph import BACKWARD, FORWARD, Operator
from monetrun.core.plain_step import plain_step
from monetrun.core.requests import StepReplay
from monetrun.core.reserved import settled, until_settled
from monetrun.core.step import DeviceMemory, StepRecord

# words in the names of operators that call cuBLAS
_BLAS = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "dot", "vdot", "mv", "addmv", "attention"}


class PlainHeap:
    """The model of the caching allocator, in a run without a plan.

    Args:
        record: of the step that the trial run saw, with the device's memory.

    Attributes:
        recorded: what steps like the recorded one reserve.

    Raises:
        ValueError: the record has no ``memory``.
    """

    def __init__(self, record: StepRecord) -> None:
        if record.memory is None:
            raise ValueError("the record does not have the device's memory")
        self._allocator = allocator = CachingAllocator(record.memory.plain_settings, record.memory.device_bytes)
        steps = _PlainSteps(record, allocator)
        steps.begin_with(steps.take_libraries_later(record.memory))
        self.recorded = settled(steps, record.memory)
        measured = record.memory.plain_reserved_bytes
        self._beside_bytes = measured - allocator.peak_reserved_bytes if measured else 0

    @property
    def reserved_bytes(self) -> int:
        """The most that the plain run has reserved so far: what the model has, and what was measured beyond it."""
        return self._allocator.peak_reserved_bytes + self._beside_bytes

    def run(self, step: StepRecord, held: Sequence[int]) -> None:
        """Plain steps like ``step`` follow, beside blocks of ``held`` bytes; all that was there before is freed.

        The optimizer's state, where it is there, is in ``held``.
        """
        self._allocator.free_all()
        steps = _PlainSteps(step, self._allocator)
        steps.batch.find({self._allocator.allocate(nbytes): nbytes for nbytes in held})
        until_settled(steps, begun=True)


class _PlainSteps(StepReplay):
    """Steps without a plan, in which cuBLAS takes its workspaces when a pass first calls it: among what is there then.

    Under a plan it takes them before the first step.
    """

    def __init__(self, record: StepRecord, allocator: CachingAllocator) -> None:
        super().__init__(*plain_step(record), allocator)
        self._workspaces: dict[str, int] = {}  # bytes that are still to be taken, by the pass whose thread takes them

    def take_libraries_later(self, memory: DeviceMemory) -> DeviceMemory:
        """``memory`` without the workspaces that are taken later, as if they had never been in its segments."""
        operators = [op for graph in self.record.graphs for op in graph.operators]
        calling = {op.phase for op in operators if calls_blas(op.target)}
        passes = [phase for phase in (FORWARD, BACKWARD) if phase in calling]
        each = memory.library_bytes // max(1, len(passes))
        used, known = [n for s in memory.base for n in s.blocks if n > 0], {*memory.gradients, *memory.outputs}
        taken = [i for i, n in enumerate(used) if n == each and i not in known][: len(passes)]
        if not each or len(taken) < len(passes):
            return memory
        self._workspaces = dict.fromkeys(passes, each)
        base, number = [], itertools.count()
        for segment in memory.base:
            blocks = tuple(n for n in segment.blocks if n < 0 or next(number) not in taken)
            base += [replace(segment, blocks=blocks)] if blocks else []
        gradients, outputs = (
            tuple(i - bisect(taken, i) for i in found) for found in (memory.gradients, memory.outputs)
        )
        return replace(memory, base=tuple(base), gradients=gradients, outputs=outputs)

    def results_allocated(self, operator: Operator) -> None:
        """The first call of cuBLAS in a pass takes the workspace of its thread."""
        if self._workspaces and calls_blas(operator.target):
            self.allocator.allocate(self._workspaces.pop(operator.phase, 0))


def calls_blas(target: str, others: Set[str] = frozenset()) -> bool:
    """Whether an operator multiplies matrices in cuBLAS, by the words of its name; ``others`` tell it too."""
    return not (_BLAS | others).isdisjoint(re.split("[._]", target))
