"""Whether a planned step still fits where blocks have come to lie since the last one. CUDA only.

A plan's reserved bytes are of steps that follow each other. What a script does in between (an evaluation, a rollout)
may allocate what it keeps from the free blocks that the step needs: as many bytes are free, in other pieces.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from monetrun.capture import allocator_history, device_peaks
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.errors import MemoryShort
from monetrun.core.last_gradients import last_gradients_bytes
from monetrun.core.plan import Plan, Schedule
from monetrun.core.replayed_blocks import blocks_at, load_base
from monetrun.core.requests import StepReplay
from monetrun.core.reserved import settled, with_spare
from monetrun.core.step import DeviceMemory, StepRecord
from monetrun.runtime.moved_memory import memory_now
from monetrun.runtime.room import Room

# What a script allocates may differ in each step: looks may take so many seconds, and this share of further time.
_SECONDS, _SHARE_OF_TIME = 2.0, 0.02
# So many layouts are remembered; and for so many plans in turn it is said that they do not fit.
_KNOWN, _MOST_PLANS = 64, 3


@dataclass(frozen=True, slots=True)
class Scattered:
    """A step whose memory lies in pieces: it would reserve so much beyond the budget."""

    beyond_bytes: int


class Layout:
    """Of one process.

    Args:
        device: of the models.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._requests_at_end = -1  # large ones, until the last step's end
        self._usual_requests = -1  # from a step's end to the next one's begin
        self._known: set[Hashable] = set()  # layouts in which the plan's step fits
        self._began = self._seconds = 0.0  # the first look, and what all looks took
        self._plans = 0  # in turn, under which a step would reserve too much

    def plan_is(self) -> None:
        """Another plan runs from now on."""
        self._known.clear()
        self._usual_requests = -1

    def stays_as_it_is(self) -> None:
        """No other plan is known: the present one runs in the next layout, whatever that is."""
        self._plans = _MOST_PLANS

    def step_ended(self) -> None:
        """A training step has ended."""
        if self.device.type == "cuda":
            self._requests_at_end = self._large_requests()

    def may_have_moved(self) -> bool:
        """The first step begins, or one before which other large requests came than before the last one."""
        if self.device.type != "cuda":
            return False
        if self._requests_at_end < 0:
            return True
        requests = self._large_requests() - self._requests_at_end
        usual, self._usual_requests = self._usual_requests, requests
        allowed = _SECONDS + _SHARE_OF_TIME * (time.monotonic() - self._began)
        return requests != usual and self._seconds <= allowed

    def check(self, record: StepRecord, plan: Plan, room: Room, fingerprint: str) -> None:
        """A step of ``record`` begins with this graph's forward, before which memory may have moved.

        Raises:
            MemoryShort: what it needs is free in pieces, with which it would reserve more than the budget.
        """
        if record.memory is None or len(plan.graphs) != len(record.graphs):
            return
        schedules = [graph.schedule for graph in plan.graphs]
        if beyond := self.beyond(record, schedules, plan.budget_bytes, room.last_outputs()):
            room.call_is_repeated(fingerprint)
            raise MemoryShort("what is free lies in pieces", "monetrun plans again", shortage=Scattered(beyond))

    def beyond(
        self, record: StepRecord, schedules: Sequence[Schedule], budget_bytes: int, outputs: Collection[int]
    ) -> int:
        """Bytes that steps under ``schedules`` would reserve beyond the budget from now on; 0 where they fit.

        And where several plans did not: the allocator decides.

        Args:
            record: of the step.
            schedules: of each graph.
            budget_bytes: of reserved memory.
            outputs: addresses of what the last step has given and the script holds.
        """
        began = time.monotonic()
        self._began = self._began or began
        layout = allocator_history.large_blocks(self.device)
        if layout in self._known:
            return 0
        beyond = max(0, self._reserved(record, schedules, outputs) - budget_bytes)
        self._plans = self._plans + 1 if beyond else 0
        if not beyond or self._plans > _MOST_PLANS:
            if len(self._known) >= _KNOWN:
                self._known.clear()
            self._known.add(layout)
            beyond = 0
        self._seconds += time.monotonic() - began
        return beyond

    def _reserved(self, record: StepRecord, schedules: Sequence[Schedule], outputs: Collection[int]) -> int:
        begun = self._requests_at_end >= 0
        now = memory_now(self.device, record, last_gradients_bytes(record) if begun else 0)
        assert now is not None
        assert record.memory is not None
        if not begun and _large(now) == _large(record.memory):
            return 0
        # the excess that was seen before is that of such layouts
        now = replace(now, batch=record.memory.batch, between=record.memory.between, excess_bytes=0)
        allocator = CachingAllocator(now.settings, now.device_bytes)
        replay = StepReplay(replace(record, memory=now), schedules, allocator)
        base = load_base(now, allocator)
        replay.begin_with(base)
        blocks = sorted(allocator_history.blocks(self.device))
        replay.outputs = blocks_at((i for i, address in enumerate(blocks) if address in outputs), base)
        return with_spare(settled(replay, now, begun=begun), now, schedules).peak_bytes

    def _large_requests(self) -> int:
        counters = device_peaks.read(device_peaks.index_of(self.device))
        return int(counters["allocation"]["large_pool"]["allocated"])


def _large(memory: DeviceMemory) -> list[tuple[int, int]]:
    """The large blocks in use before a step: where each begins, from the first segment on, and its bytes.

    Where pages at a segment's end are held for the step, as before training, that is the same.
    """
    found, place = [], 0
    for segment in memory.base:
        if not segment.small:
            place += segment.gap_bytes
            for nbytes in segment.blocks:
                if nbytes > 0:
                    found.append((place, nbytes))
                place += abs(nbytes)
    return found
