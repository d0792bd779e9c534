"""Fake tensors with the storages that kernels give, where torch's own fake kernels have smaller ones.

A few losses are computed for each element, and then reduced in that same tensor: what they give is a number, in a
storage as large as their operands, which is allocated for as long as the number is there (seen with every sample of
torch's own tests of operators, on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

aten = torch.ops.aten

_REDUCED_WHERE_THEY_ARE = {
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.binary_cross_entropy.default,
    aten.soft_margin_loss.default,
}


def with_kernels_storage(mode: FakeTensorMode, func: Any, args: Sequence[Any], result: Any) -> Any:
    """``result`` of a call of ``func``, in a storage of the kernel's size."""
    if func not in _REDUCED_WHERE_THEY_ARE or result.dim():
        return result
    with mode:
        whole = torch.empty(
            torch.broadcast_shapes(args[0].shape, args[1].shape), dtype=result.dtype, device=result.device
        )
        return whole.resize_(())
