"""Marks moments in a device's work, and reads the seconds between them: the host's clock, or CUDA's events.

The host runs ahead of a GPU, so that its clock tells when work was given, not when it was done. An event is recorded in
the order of the stream's work, and waits for nothing; it is read when the numbers are wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from monetrun.capture.meter import CudaMeter, Meter


class Clock(Protocol):
    """Marks moments."""

    def mark(self) -> Any:
        """Mark this moment in the order of the device's work."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to a later one; waits until the device has come to ``end``.

        Raises:
            RuntimeError: the device has failed meanwhile.
        """


class HostClock:
    """The host's clock.

    Args:
        synchronize: called before the clock is read; waits for the device.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def mark(self) -> float:
        """Seconds of the host's clock, once the device has finished all work."""
        self._synchronize()
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """From one mark to a later one."""
        return end - start


class EventClock:
    """Events on the current stream of a CUDA device; marking one waits for nothing.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Any:
        """An event, recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one event to a later one, once the device has come to it."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def clock_of(meter: Meter) -> Clock:
    """The clock for the device that ``meter`` measures."""
    return EventClock(meter.device) if isinstance(meter, CudaMeter) else HostClock(meter.synchronize)
