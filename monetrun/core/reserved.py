"""What the caching allocator reserves for training steps.

``step.replay`` adds up the bytes of tensors. What the allocator reserves for them depends on the order of requests and
on what lies where, so the step is run through ``CachingAllocator`` until one begins as an earlier one began: the
optimizer's state and the last step's gradients come to lie among the activations, each time elsewhere.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from monetrun.core.allocator_settings import MOST_SMALL, SMALL_SEGMENT, AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator, large_blocks
from monetrun.core.last_outputs import last_outputs_bytes
from monetrun.core.plan import Schedule
from monetrun.core.requests import StepReplay, held_by_calls
from monetrun.core.step import DeviceMemory, StepRecord

LEAST_STEPS, MOST_STEPS = 3, 16
"""So many steps are replayed at least, and at most where none begins as an earlier one began."""

_SPARE_PAGES = 2
# Of a pool that is held: what is reserved beside it is held too, so often.
_MOST_HELD = 3


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the allocator holds for training steps.

    Attributes:
        allocated_peak_bytes: the most in blocks that are in use, rounding included.
        small_bytes: the most reserved for requests of up to 1 MiB.
        large_bytes: the most reserved for larger ones.
        steps: that were replayed until nothing new came.
    """

    allocated_peak_bytes: int
    small_bytes: int
    large_bytes: int
    steps: int = 0

    @property
    def peak_bytes(self) -> int:
        """All that is reserved: what is free is not given back."""
        return self.small_bytes + self.large_bytes


def reserved(record: StepRecord, schedules: Sequence[Schedule]) -> Reserved:
    """What is reserved for planned steps under ``schedules``: what they need, and what was seen to be needed beside.

    A page more is for small tensors that come and go outside of the recorded step, such as labels and logged values.

    Raises:
        ValueError: the record has no ``memory``.
        ScheduleError: a schedule is not valid for its graph.
    """
    if record.memory is None:
        raise ValueError("the record does not have the device's memory")
    memory, how = record.memory, (record.memory.settings, record.memory.begun_under)
    needed = _with_spare(reserved_under(record, schedules, *how), memory, schedules)
    if any(segment.gap_bytes for segment in memory.base if not segment.small):
        for _ in range(_MOST_HELD):  # the pool may lie elsewhere than requests that are served one by one
            taken = reserved_under(record, schedules, *how, held_bytes=needed.large_bytes)
            if taken.large_bytes <= needed.large_bytes:
                break
            needed = _with_spare(taken, memory, schedules)
    return needed


def _with_spare(needed: Reserved, memory: DeviceMemory, schedules: Sequence[Schedule]) -> Reserved:
    """``needed`` for steps under ``schedules``, and what is reserved beside."""
    spare_bytes = spare_beside_holds(memory.settings) if any(s.holds for s in schedules) else 0
    large_bytes = needed.large_bytes + memory.excess_bytes + spare_bytes
    return replace(needed, small_bytes=needed.small_bytes + SMALL_SEGMENT, large_bytes=large_bytes)


def spare_beside_holds(settings: AllocatorSettings) -> int:
    """What is reserved beside a schedule with holds: its gaps are so few that a small tensor more can need pages."""
    return _SPARE_PAGES * settings.large_segment_bytes


def reserved_under(
    record: StepRecord,
    schedules: Sequence[Schedule],
    settings: AllocatorSettings,
    begun_under: Sequence[Schedule] = (),
    held_bytes: int = 0,
) -> Reserved:
    """What is reserved for steps under ``schedules`` with other settings of the allocator.

    Args:
        record: of the step.
        schedules: of each graph.
        settings: of the allocator.
        begun_under: schedules of the step before, in the same process; empty: there was none.
        held_bytes: so much is reserved for large requests before the first step.

    Raises:
        ValueError: the record has no ``memory``.
        ScheduleError: a schedule is not valid for its graph.
    """
    if record.memory is None:
        raise ValueError("the record does not have the device's memory")
    allocator = CachingAllocator(settings, record.memory.device_bytes)
    replay = StepReplay(record, begun_under or schedules, allocator)
    replay.begin_with(record.memory)
    if begun_under:
        allocator.empty_cache()
        for number in range(2 if last_outputs_bytes(record) else 1):  # the second one shows when they are dropped
            replay.step(first=number == 0)
        replay.follow(schedules)
    return settled(replay, record.memory, begun=bool(begun_under), held_bytes=held_bytes)


def settled(replay: StepReplay, memory: DeviceMemory, *, begun: bool = False, held_bytes: int = 0) -> Reserved:
    """What is reserved for further steps of ``replay``.

    Args:
        replay: of the step.
        memory: of the device.
        begun: it has made some.
        held_bytes: so much is reserved for large requests before they begin, as ``runtime.pool`` does.
    """
    allocator = replay.allocator
    allocator.empty_cache()
    allocator.reset_peaks()
    held = []
    while (missing := held_bytes - memory.other_streams_bytes - allocator.large_bytes) > 0:
        # part of it may lie in what is free already; what is smaller is no large request
        held.append(allocator.allocate(max(missing, MOST_SMALL + 1)))
    for address in held:
        allocator.free(address)
    allocator.reset_peaks()
    steps = until_settled(replay, begun=begun)
    large_bytes = allocator.large_bytes + memory.other_streams_bytes
    return Reserved(allocator.peak_allocated_bytes, allocator.small_bytes, large_bytes, steps)


def until_settled(replay: StepReplay, *, begun: bool = False) -> int:
    """Run steps until one leaves the large pool as an earlier one did; gives how many. ``begun``: some came before.

    What is in the small pool decides nothing in the large one, and can go on moving for long.
    """
    seen = set()
    for number in range(MOST_STEPS):
        replay.step(first=number == 0 and not begun)
        state = _large_pool(replay)
        if state in seen and number + 1 >= LEAST_STEPS:
            return number + 1
        seen.add(state)
    return MOST_STEPS


def _large_pool(replay: StepReplay) -> Hashable:
    """The large pool's blocks, and whose they are: what the next step's large requests depend on."""
    pool = large_blocks(replay.allocator)
    starts = {start for start, *_ in pool}
    held = [[b.address for b in blocks] for blocks in (replay.gradients, replay.outputs, *replay.batch.blocks)]
    held += held_by_calls(replay)
    return frozenset(pool), tuple(tuple(a for a in addresses if a in starts) for addresses in held)
