"""Times one call of an operator: on a CPU by the host's clock, on CUDA by events around a batch of repeats."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from monetrun.capture import operands
from monetrun.capture.clock import Clock, EventClock
from monetrun.capture.meter import Meter
from monetrun.ops.registry import Call

# A batch is about so long that an event's resolution (half a microsecond) does not show.
_BATCH_SECONDS = 5e-4
_MOST_REPEATS = 20  # sets of operands that do not fill the arena stay in the cache, as small tensors do in a step
# Operands are taken in turn from an arena of so many times the second-level cache, so that calls read them from memory.
_CACHES = 2
# The host needs this many times longer for a batch than for as many single calls, at most.
_LEAD = 1.5
_MOST_LEAD_SECONDS = 0.02
_CYCLES_PER_SECOND = 2e9  # a clock that is slower waits longer


class Timer(Protocol):
    """Times calls on one device.

    Attributes:
        spread_indices: whether operands that are indices are spread over their range.
        first_calls: how often an operator runs before its workspace is measured: libraries allocate for themselves, and
            search for kernels, in first calls.
    """

    spread_indices: bool
    first_calls: int

    def seconds(self, call: Call) -> float:
        """Seconds of one call on made-up operands."""


class HostTimer:
    """One call, by the host's clock.

    Args:
        meter: of the device.
    """

    spread_indices = False
    first_calls = 0

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def seconds(self, call: Call) -> float:
        """Seconds of one call on made-up operands."""
        arguments, keywords = operands.make(call)
        self.meter.synchronize()
        start = time.perf_counter()
        result = call.target(*arguments, **keywords)
        self.meter.synchronize()
        elapsed = time.perf_counter() - start
        del result
        return elapsed


class DeviceTimer:
    """A batch of calls, between two events of the stream.

    Before the first event the device waits for as long as the host needs to give it the batch: the time is that of the
    kernels, not of the calls.

    Args:
        clock: of the device.
        new_arena: gives the memory for further operands, a few times the cache.
        wait: has the device wait for so many cycles.
        host_clock: gives the host's seconds.
    """

    spread_indices = True
    first_calls = 1

    def __init__(
        self,
        clock: Clock,
        new_arena: Callable[[], operands.Arena],
        wait: Callable[[int], None],
        host_clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.new_arena = new_arena
        self.wait = wait
        self.host_clock = host_clock
        self._arena: operands.Arena | None = None

    def seconds(self, call: Call) -> float:
        """Seconds of one call, each on operands that were not used lately."""
        if self._arena is None:
            self._arena = self.new_arena()
        self._arena.clear()
        sets = [operands.make(call, spread_indices=True)]
        given = 0  # calls so far

        def run(repeats: int) -> None:
            nonlocal given
            for _ in range(repeats):
                arguments, keywords = sets[given % len(sets)]
                call.target(*arguments, **keywords)
                given += 1

        started = self.host_clock()
        run(1)
        host_seconds = self.host_clock() - started  # what a first call prepares is in it
        self._add_sets(call, sets, 2)
        once, host_seconds = self._batch(run, 1, host_seconds)
        repeats = min(_MOST_REPEATS, max(1, math.ceil(_BATCH_SECONDS / max(once, 1e-7))))
        if repeats == 1:
            return once
        self._add_sets(call, sets, repeats + 1)
        return self._batch(run, repeats, host_seconds)[0] / repeats

    def _batch(self, run: Callable[[int], None], repeats: int, host_seconds: float) -> tuple[float, float]:
        """What the device, and what the host needs for so many calls, if the host needs ``host_seconds`` for each."""
        lead = min(_MOST_LEAD_SECONDS, _LEAD * repeats * host_seconds)
        self.wait(int(lead * _CYCLES_PER_SECOND))
        start, started = self.clock.mark(), self.host_clock()
        run(repeats)
        host_seconds = self.host_clock() - started
        return self.clock.seconds(start, self.clock.mark()), host_seconds

    def _add_sets(self, call: Call, sets: list[tuple[tuple[Any, ...], dict[str, Any]]], count: int) -> None:
        """Add operands until there are so many sets, or the arena is full."""
        assert self._arena is not None
        try:
            while len(sets) < count:
                sets.append(operands.make(call, spread_indices=True, new=self._arena.new))
        except MemoryError:
            pass  # calls take those that there are in turn


def timer_for(meter: Meter, device: torch.device) -> Timer:
    """The timer of operators on ``device``."""
    if device.type != "cuda":
        return HostTimer(meter)
    return DeviceTimer(EventClock(device), lambda: _arena(device), lambda cycles: _wait(device, cycles))


def _wait(device: torch.device, cycles: int) -> None:
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)


def _arena(device: torch.device) -> operands.Arena:
    """Memory of twice the second-level cache, but of no more than a quarter of what is free."""
    wanted = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
    try:
        return operands.Arena(min(wanted, _spare_bytes(device) // 4), device)
    except torch.OutOfMemoryError:  # what is free is in pieces
        return operands.Arena(0, device)


def _spare_bytes(device: torch.device) -> int:
    """Bytes that the allocator can give: what it holds unused, and what it may still take from the device."""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)
