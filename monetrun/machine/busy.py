"""Whether other processes kept the CPU busy while something was timed."""

from __future__ import annotations

import time

import psutil

# Of all processor time, others took this much or more, and this much or less was left idle: what was timed had to wait.
_OTHERS = 0.25
_IDLE = 0.15
# What takes less is not judged: the kernel counts in hundredths of a second.
_LEAST_SECONDS = 1.0


class OthersWork:
    """What other processes take of this machine's processors from now on."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _times()

    def share(self) -> float:
        """Of all processor time so far, what others took; 0 where that cannot have slowed this process."""
        if time.monotonic() - self._began < _LEAST_SECONDS:
            return 0.0
        all_of_it, idle, own = (now - then for now, then in zip(_times(), self._before, strict=True))
        if all_of_it <= 0 or idle > _IDLE * all_of_it:
            return 0.0
        others = (all_of_it - idle - own) / all_of_it
        return others if others >= _OTHERS else 0.0


def _times() -> tuple[float, float, float]:
    """Seconds of all processors so far: all, idle, and this process's with its threads."""
    system, own = psutil.cpu_times(), psutil.Process().cpu_times()
    guests = getattr(system, "guest", 0.0) + getattr(system, "guest_nice", 0.0)  # these are in user and nice too
    idle = system.idle + getattr(system, "iowait", 0.0)
    return sum(system) - guests, idle, own.user + own.system
