"""A limit on what torch allocates on a device: past it, allocations raise ``torch.OutOfMemoryError``."""

from __future__ import annotations

import torch

from monetrun.capture import cpu_allocator


def set_limit(device: torch.device, nbytes: int | None) -> None:
    """Limit what torch allocates (CPU) or reserves (CUDA) on ``device``; None lifts the limit.

    Does nothing on a CPU whose allocations cannot be counted.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)
    elif cpu_allocator.install():
        cpu_allocator.set_limit(nbytes)
