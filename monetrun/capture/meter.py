"""Counts the bytes that torch has allocated on a device: now, and the peak since the last reset."""

from __future__ import annotations

from typing import Protocol

import torch

from monetrun.capture import cpu_allocator, device_peaks, fake_tensors
from monetrun.capture.peaks import NotWatching, Peaks


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

    def peaks(self) -> Peaks:
        """``peak_bytes``, and what the allocator held."""

    def watch(self) -> None:
        """Note from now on what is allocated and freed, where that is possible and ``peaks`` do not suffice."""

    def passing_bytes(self) -> int | None:
        """The most allocated since ``watch``, beyond what was before, without what still is; None: it is not known."""

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

    def peaks(self) -> Peaks:
        """Nothing is cached."""
        return Peaks(self.peak_bytes())

    def watch(self) -> None:
        """Note from now on what is allocated and freed."""
        cpu_allocator.watch()

    def passing_bytes(self) -> int | None:
        """The most since ``watch``, without what stays."""
        return cpu_allocator.passing_bytes()

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


class CudaMeter(NotWatching):
    """Reads the caching allocator's counters of bytes in tensors. What it resets is not reset for the script."""

    exact = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        device_peaks.keep_apart()

    def current_bytes(self) -> int:
        """Allocated now."""
        return self._bytes().allocated

    def peak_bytes(self) -> int:
        """The most since ``reset_peak``."""
        return self.peaks().allocated_bytes

    def reset_peak(self) -> None:
        """Start a new peak."""
        if torch.cuda.is_initialized():  # else there is nothing yet
            device_peaks.reset(self._index())

    def peaks(self) -> Peaks:
        """What the allocator's counters say."""
        found = self._bytes()
        return Peaks(found.peak, found.reserved_peak, found.reserved, found.retries)

    def _bytes(self) -> device_peaks.Bytes:
        return device_peaks.bytes_now(self._index())

    def _index(self) -> int:
        return device_peaks.index_of(self.device)

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.synchronize(self.device)


class LiveTensorMeter(NotWatching):
    """Adds up the storages of all tensors that Python knows, where the counting allocator cannot be built."""

    exact = False

    def __init__(self) -> None:
        self._peak = 0

    def current_bytes(self) -> int:
        """Bytes of all live tensors, each storage once."""
        seen = {storage.data_ptr(): storage.nbytes() for storage in cpu_allocator.living_storages()}
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

    def peaks(self) -> Peaks:
        """Nothing is cached; nor are all objects of the process looked through, which steps would wait for."""
        return Peaks(self._peak)

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


class NoMeter(NotWatching):
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

    def peaks(self) -> Peaks:
        """Nothing is cached."""
        return Peaks(self.peak_bytes())

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
