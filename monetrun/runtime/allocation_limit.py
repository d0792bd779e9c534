"""A limit on what torch allocates on a device: past it, allocations raise ``torch.OutOfMemoryError``."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from monetrun.capture import cpu_allocator
from monetrun.core.patched import patched

# Shares of each CUDA device's memory: that the script or PYTORCH_ALLOC_CONF allows, and that is allowed now.
_scripted: dict[int, float] = {}
_allowed: dict[int, float] = {}


def set_limit(device: torch.device, nbytes: int | None) -> None:
    """Limit what torch allocates (CPU) or reserves (CUDA) on ``device``; None lifts the limit.

    Never beyond what the script itself allows (``torch.cuda.set_per_process_memory_fraction``, or in
    ``PYTORCH_ALLOC_CONF``). Does nothing on a CPU whose allocations cannot be counted, nor on any other device.
    """
    if device.type == "cuda":
        index = _index(device)
        if index not in _scripted:
            _scripted[index] = torch.cuda.memory.get_per_process_memory_fraction(index)
        # torch multiplies again and drops what is behind the comma
        _allowed[index] = 1.0 if nbytes is None else min(1.0, (nbytes + 0.5) / _total_bytes(index))
        torch.cuda.memory.set_per_process_memory_fraction(min(_allowed[index], _scripted[index]), index)
    elif device.type == "cpu" and cpu_allocator.install():
        cpu_allocator.set_limit(nbytes)


def keep_the_scripts(undo: contextlib.ExitStack) -> None:
    """From now on a limit that the script sets holds beside ``set_limit``'s."""
    original = torch.cuda.set_per_process_memory_fraction

    @functools.wraps(original)
    def observed(fraction: float, device: Any = None) -> None:
        original(fraction, device)  # refuses what is no share
        index = _index(device)
        _scripted[index] = float(fraction)
        original(min(_allowed.get(index, 1.0), _scripted[index]), index)

    undo.enter_context(patched(torch.cuda, "set_per_process_memory_fraction", observed))


@functools.cache
def _total_bytes(index: int) -> int:
    """Of a device; cached, since steps wait for what torch takes to tell it."""
    return int(torch.cuda.get_device_properties(index).total_memory)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if found is None else found
