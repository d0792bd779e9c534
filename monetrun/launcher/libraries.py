"""Builds the native libraries that a first launch needs side by side, while its trial run starts."""

from __future__ import annotations

import threading
from collections.abc import Callable

from monetrun.capture import cpu_allocator, program
from monetrun.core import simulate
from monetrun.ops import kernels


def build_ahead(device_type: str) -> list[threading.Thread]:
    """Start the builds of what is not built yet; who needs a library waits for its build.

    A library that cannot be built is left to who needs it, and says why.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``, on which the script trains. CUDA's kernels are compiled for the device,
            in the process that uses it.

    Returns:
        A thread for each library. They do not keep the process from ending.
    """
    of_the_device = [program.prebuild] if device_type == "cuda" else [cpu_allocator.prebuild, kernels.prebuild]
    builds: list[Callable[[], object]] = [simulate.core, *of_the_device]
    threads = [threading.Thread(target=build, daemon=True) for build in builds]
    for thread in threads:
        thread.start()
    return threads
