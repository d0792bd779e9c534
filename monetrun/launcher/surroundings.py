"""Where a launch ran: versions, devices and settings, for its report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from datetime import datetime

from monetrun import __version__
from monetrun.core.budget import format_bytes
from monetrun.core.errors import DeviceQueryFailed
from monetrun.machine.device import cpu_memory, driver_and_boards

_SETTINGS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def surroundings() -> dict[str, str]:
    """What tells a launch from another one of the same script, by name."""
    driver, boards = driver_and_boards(os.environ)
    memory = ""
    with contextlib.suppress(DeviceQueryFailed):
        memory = format_bytes(cpu_memory().total_bytes)
    found = {
        "ended": datetime.now().astimezone().isoformat(" ", "seconds"),
        "monetrun": __version__,
        "torch": importlib.metadata.version("torch"),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "processors": str(len(os.sched_getaffinity(0))),
        "memory": memory,
        "NVIDIA driver": driver,
        "GPUs": ", ".join(boards),
        **{name: os.environ.get(name, "") for name in _SETTINGS},
    }
    return {name: value for name, value in found.items() if value}
