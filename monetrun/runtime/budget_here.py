"""The budget in bytes of a process that plans for itself (``--no-probe``, ``apply``)."""

from __future__ import annotations

import torch

from monetrun.capture.meter import Meter
from monetrun.core.budget import AUTO, CUDA_RESERVE_BYTES, SHARE_OF_FREE, parse, resolve
from monetrun.machine.device import MemoryInfo, query


def budget_here(text: str, device: torch.device, meter: Meter, plain_bytes: int) -> int:
    """The budget in bytes; what this process holds already counts as free.

    Args:
        text: in ``--budget``'s grammar.
        device: of the models.
        meter: of that device.
        plain_bytes: what the plain step takes.

    Raises:
        DeviceQueryFailed: the free memory could not be read.
    """
    budget = parse(text)
    free = None
    if budget.kind in (AUTO, SHARE_OF_FREE):
        held = max(meter.current_bytes(), meter.reserved_peak_bytes())
        free = _own_memory(device).free_bytes + held
    return resolve(budget, free, plain_bytes, CUDA_RESERVE_BYTES if device.type == "cuda" else 0)


def _own_memory(device: torch.device) -> MemoryInfo:
    """The memory of this process's device."""
    if device.type != "cuda":
        return query("cpu")[0]
    index = torch.cuda.current_device() if device.index is None else device.index
    return query("cuda", index + 1)[index]
