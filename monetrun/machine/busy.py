"""Whether other processes kept the CPU busy while something was timed."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

# Of all processor time, others took this much or more, and this much or less was left idle: what was timed had to wait.
_OTHERS = 0.25
_IDLE = 0.15
# What takes less is not judged: the kernel counts in hundredths of a second.
_LEAST_SECONDS = 1.0


class OthersWork:
    """What other processes take of this machine's processors from now on; this one's children are none of them."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _times()

    def share(self) -> float:
        """Of all processor time so far, what others took; 0 where that cannot have slowed this process."""
        if time.monotonic() - self._began < _LEAST_SECONDS or _measures_beside_others():
            return 0.0
        all_of_it, idle, own = (now - then for now, then in zip(_times(), self._before, strict=True))
        if all_of_it <= 0 or idle > _IDLE * all_of_it:
            return 0.0
        others = (all_of_it - idle - own) / all_of_it
        return others if others >= _OTHERS else 0.0


def _measures_beside_others() -> bool:
    """Whether the other ranks of this job measure now, too; a trial run is alone."""
    return os.environ.get("LOCAL_WORLD_SIZE", "1") != "1" and not os.environ.get("MONETRUN_TRIAL")


def _times() -> tuple[float, float, float]:
    """Seconds of all processors so far: all, idle, and of this process with its children."""
    system, here = psutil.cpu_times(), psutil.Process()
    own = 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            times = process.cpu_times()
            own += times.user + times.system
    guests = getattr(system, "guest", 0.0) + getattr(system, "guest_nice", 0.0)  # these are in user and nice too
    idle = system.idle + getattr(system, "iowait", 0.0)
    return sum(system) - guests, idle, own
