"""What the plain run would have reserved by now, where its steps are no longer as the trial run saw them.

Under a plan the allocator's own segments say nothing of that: they are the plan's. So the recorded step is replayed as
the plain run makes it, and what comes later (other shapes, other models, more that is held) on top of that.
"""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.plain_step import plain_step
from monetrun.core.requests import STEPS, StepReplay, load_base
from monetrun.core.step import StepRecord


class PlainHeap:
    """The model of the caching allocator, in a run without a plan.

    Args:
        record: of the step that the trial run saw, with the device's memory.

    Attributes:
        reserved_bytes: the most that the plain run has reserved so far.

    Raises:
        ValueError: the record has no ``memory``.
    """

    def __init__(self, record: StepRecord) -> None:
        if record.memory is None:
            raise ValueError("the record does not have the device's memory")
        self._allocator = CachingAllocator(record.memory.plain_settings, record.memory.device_bytes)
        steps = StepReplay(*plain_step(record), self._allocator)
        steps.batch.find(load_base(record.memory, self._allocator))
        for number in range(STEPS):
            steps.step(first=number == 0)
        measured = record.memory.plain_reserved_bytes
        self._beside_bytes = measured - self._allocator.peak_reserved_bytes if measured else 0

    @property
    def reserved_bytes(self) -> int:
        """The most that the plain run has reserved so far: what the model has, and what was measured beyond it."""
        return self._allocator.peak_reserved_bytes + self._beside_bytes

    def run(self, step: StepRecord, held: Sequence[int]) -> None:
        """Plain steps like ``step`` follow, beside blocks of ``held`` bytes; all that was there before is freed.

        The optimizer's state, where it is there, is in ``held``.
        """
        self._allocator.free_all()
        steps = StepReplay(*plain_step(step), self._allocator)
        steps.batch.find({self._allocator.allocate(nbytes): nbytes for nbytes in held})
        for _ in range(STEPS):
            steps.step(first=False)
