"""What an allocator's counters say of the most that it has given out."""

from __future__ import annotations

from typing import NamedTuple


class Peaks(NamedTuple):
    """What was read at once: on CUDA each reading takes the host some 20 microseconds.

    Attributes:
        allocated_bytes: the most since ``reset_peak``.
        reserved_bytes: the most that the allocator held since then, cached memory included; 0 where it caches none.
        reserved_now_bytes: what it holds now.
        retries: how often so far the allocator gave its cached memory back to serve a request.
    """

    allocated_bytes: int
    reserved_bytes: int = 0
    reserved_now_bytes: int = 0
    retries: int = 0


class NotWatching:
    """Where single allocations are not seen, or seen otherwise: a device's history has its requests."""

    def watch(self) -> None:
        """Nothing is noted."""

    def passing_bytes(self) -> int | None:
        """It is not known."""
        return None
