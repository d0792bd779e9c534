"""Tells errors after which a CUDA device cannot be used any more from those of one call."""

from __future__ import annotations

from collections.abc import Callable

import torch


def is_sticky(error: BaseException, synchronize: Callable[[], None] = torch.cuda.synchronize) -> bool:
    """Whether ``error`` is of the device itself, so that every later call fails as well.

    Such an error (an illegal access, a failed assertion in a kernel) ends the CUDA context: nothing can be measured or
    trained in this process any more. Lack of memory is not such an error, nor is a call that CUDA refuses (an invalid
    configuration, no kernel for this device): after them the device works on, and waiting for it succeeds.

    Args:
        error: what a call raised.
        synchronize: waits for the device.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    # extensions raise the same message without the type
    if not isinstance(error, torch.AcceleratorError) and "CUDA error:" not in str(error):
        return False
    try:
        synchronize()
    except RuntimeError:
        return True
    return False
