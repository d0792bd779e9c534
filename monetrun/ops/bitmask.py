"""Packed masks: one bit for each element, in the order of *storage*. Element i is bit ``i % 8`` of byte ``i // 8``.

Tensors are dense, with any order of their dimensions. Tensors that one mask describes (gradient and input, input and
residual) have the same strides; operators refuse others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monetrun.ops.definition import arithmetic_dtype, operator
from monetrun.ops.memory_format import in_storage_order


def pack(keep: Tensor) -> Tensor:
    """The mask (uint8) of a vector of booleans; bits behind the last element are 0."""
    bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=keep.device)
    return (bits << shifts).sum(1, dtype=torch.uint8)


def unpack(mask: Tensor, elements: int) -> Tensor:
    """The vector of so many booleans that ``pack`` gave ``mask`` for.

    Raises:
        RuntimeError: the mask has another size or dtype.
    """
    if mask.dtype != torch.uint8 or mask.numel() != (elements + 7) // 8:
        raise RuntimeError(f"the mask must be {(elements + 7) // 8} bytes for {elements} elements, got {mask.numel()}")
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(1) >> shifts) & 1).view(-1)[:elements].bool()


def _fake_mask(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)


@operator("range_mask(Tensor x, float low, float high) -> Tensor", _fake_mask)
def range_mask(x: Tensor, low: float, high: float) -> Tensor:
    """Which elements are strictly between ``low`` and ``high`` (NaN: no bound): not (x <= low) and not (x >= high).

    NaN is within, as in torch's threshold_backward and hardtanh_backward.
    """
    values = in_storage_order(x).to(arithmetic_dtype(x.dtype))
    return pack(~(values <= low) & ~(values >= high))


@operator("nonzero_mask(Tensor x) -> Tensor", _fake_mask)
def nonzero_mask(x: Tensor) -> Tensor:
    """Which elements are not zero; NaN is not zero."""
    return pack(in_storage_order(x) != 0)
