"""How far tensors are from one another, a part at a time."""

from __future__ import annotations

import math

import torch

_CHUNK = 1 << 22  # elements that are compared at once


def same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether dtype, shape and all bits are the same."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(_chunks(one), _chunks(other), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def distance(one: torch.Tensor, other: torch.Tensor | None) -> tuple[float, float]:
    """The largest difference of two elements, and the norm of the difference; ``other`` None: of nothing but zeros.

    Infinite where shapes differ, or where one is a number and the other is none. The same infinities, and two that are
    no numbers, do not differ.
    """
    if other is not None and one.shape != other.shape:
        return math.inf, math.inf
    largest, square = 0.0, 0.0
    others = iter(()) if other is None else iter(_chunks(other))
    for chunk in _chunks(one):
        a = _wide(chunk)
        b = torch.zeros_like(a) if other is None else _wide(next(others))
        apart = (a - b).abs()
        apart[(a == b) | (a.isnan() & b.isnan())] = 0
        apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)
        if apart.numel():
            largest, square = max(largest, float(apart.max())), square + float(apart.square().sum())
    return largest, math.sqrt(square)


def _wide(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.to(torch.complex128 if chunk.is_complex() else torch.float64)


def _chunks(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The elements in order, some millions at a time."""
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.contiguous().reshape(-1).split(_CHUNK)
