"""Counts the bytes that torch has allocated on a device: now, and the peak since the last reset."""

from __future__ import annotations

import gc
from typing import Protocol

import torch

from monetrun.capture import cpu_allocator, fake_tensors


class Meter(Protocol):
    """Bytes that torch has allocated on one device.

    Attributes:
        exact: whether the allocator counts them. False where only live tensors can be added up, so that peaks within
            an operator are missed.
    """

    exact: bool

    def current_bytes(self) -> int:
        """Allocated now."""

    def peak_bytes(self) -> int:
        """The most allocated since ``reset_peak``."""

    def reset_peak(self) -> None:
        """Start a new peak, from what is allocated now."""

    def reserved_peak_bytes(self) -> int:
        """The most that the allocator held since ``reset_peak``, cached memory included; 0 where it caches none."""

    def retries(self) -> int:
        """How often so far the allocator gave its cached memory back to serve a request."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""


class CpuMeter:
    """Reads the counting allocator of ``cuda_ops``: exact."""

    exact = True

    def current_bytes(self) -> int:
        """Allocated now through torch's CPU allocator."""
        return cpu_allocator.allocated_bytes()

    def peak_bytes(self) -> int:
        """The most since ``reset_peak``."""
        return cpu_allocator.peak_bytes()

    def reset_peak(self) -> None:
        """Start a new peak."""
        cpu_allocator.reset_peak()

    def reserved_peak_bytes(self) -> int:
        """Nothing is cached."""
        return 0

    def retries(self) -> int:
        """Nothing is cached."""
        return 0

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


class CudaMeter:
    """Reads the caching allocator's counters of bytes in tensors."""

    exact = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_bytes(self) -> int:
        """Allocated now."""
        return int(torch.cuda.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        """The most since ``reset_peak``."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> None:
        """Start a new peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def reserved_peak_bytes(self) -> int:
        """The most reserved since ``reset_peak``."""
        return int(torch.cuda.max_memory_reserved(self.device))

    def retries(self) -> int:
        """``num_alloc_retries`` of the device."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.synchronize(self.device)


class LiveTensorMeter:
    """Adds up the storages of all tensors that Python knows, where the counting allocator cannot be built."""

    exact = False

    def __init__(self) -> None:
        self._peak = 0

    def current_bytes(self) -> int:
        """Bytes of all live tensors, each storage once."""
        seen: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and type(thing).__module__.startswith("torch"):
                if thing.device.type != "cpu" or thing.layout != torch.strided or thing.is_meta:
                    continue
                if isinstance(thing, torch._subclasses.FakeTensor):
                    continue
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        total = sum(seen.values())
        self._peak = max(self._peak, total)
        return total

    def peak_bytes(self) -> int:
        """The most that ``current_bytes`` has returned since ``reset_peak``."""
        self.current_bytes()
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak."""
        self._peak = 0

    def reserved_peak_bytes(self) -> int:
        """Nothing is cached."""
        return 0

    def retries(self) -> int:
        """Nothing is cached."""
        return 0

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


class NoMeter:
    """For where nothing is allocated."""

    exact = False

    def current_bytes(self) -> int:
        """Always 0."""
        return 0

    def peak_bytes(self) -> int:
        """Always 0."""
        return 0

    def reset_peak(self) -> None:
        """Nothing to reset."""

    def reserved_peak_bytes(self) -> int:
        """Nothing is cached."""
        return 0

    def retries(self) -> int:
        """Nothing is cached."""
        return 0

    def synchronize(self) -> None:
        """Nothing is queued."""


def meter_for(device: torch.device) -> Meter:
    """The most exact meter for ``device``; within a trial run on fake tensors, theirs."""
    if (fake_meter := fake_tensors.meter()) is not None:
        return fake_meter
    if device.type == "cuda":
        return CudaMeter(device)
    if cpu_allocator.install():
        return CpuMeter()
    return LiveTensorMeter()
