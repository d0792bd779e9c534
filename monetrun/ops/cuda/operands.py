"""What CUDA's functions check of their operands, and tell kernels about them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from monetrun.ops.definition import arithmetic_dtype

PACK = 8  # elements that a thread takes at once


def packs(elements: int) -> int:
    """How many threads take so many elements, and how many bytes their mask has."""
    return (elements + PACK - 1) // PACK


@dataclass(frozen=True, slots=True)
class Aligned:
    """Stands for what ``aligned`` gives for tensors that have no memory yet."""

    tensors: tuple[Tensor, ...]


def aligned(first: Tensor, *others: Tensor | None) -> bool | Aligned:
    """Whether kernels may read and write the tensors 16 bytes at a time."""
    tensors = (first, *(t for t in others if t is not None))
    if first.is_meta:
        return Aligned(tensors)
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0


def is_channels_last(value: Tensor) -> bool:
    """Whether [N, C, ...] fills its memory in the order N, ..., C."""
    return value.dim() > 2 and value.movedim(1, -1).is_contiguous()


def check_dense(value: Tensor, name: str) -> None:
    """Raise RuntimeError unless the elements fill one stretch of memory."""
    if not value.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense.default(value):
        raise RuntimeError(f"{name} is not dense; make it contiguous (in any memory format) before")


def check_same_layout(one: Tensor, other: Tensor, names: str) -> None:
    """Raise RuntimeError unless shapes, dtypes and strides (of dimensions longer than 1) are the same."""
    same = one.dtype == other.dtype and one.shape == other.shape
    if same and (one.stride() == other.stride() or one.numel() == 0):
        return
    strides = zip(one.shape, one.stride(), other.stride(), strict=True) if same else ()
    if not same or not all(size == 1 or a == b for size, a, b in strides):
        raise RuntimeError(f"{names} differ in shape, strides or dtype")


def check_mask(mask: Tensor, elements: int) -> None:
    """Raise RuntimeError unless ``mask`` has a bit for each element."""
    if mask.dtype != torch.uint8 or not mask.is_contiguous() or mask.numel() != packs(elements):
        raise RuntimeError(
            f"the mask must be {packs(elements)} contiguous bytes for {elements} elements, got {mask.numel()}"
        )


def parameters(vector: Tensor | None, like: Tensor, count: int, name: str) -> tuple[Tensor | None, bool]:
    """A kernel's two parameters for a vector of ``count`` numbers: where it is, and whether it is of wide numbers.

    Wide are the numbers in which is computed with ``like``'s elements. For None the kernel has a value.

    Raises:
        RuntimeError: the vector is of another size, not contiguous, or of another dtype than ``like`` or wide.
    """
    if vector is None:
        return None, False
    if vector.numel() != count or not vector.is_contiguous():
        raise RuntimeError(f"{name} must be {count} contiguous elements")
    if vector.dtype == like.dtype:
        return vector, False
    if vector.dtype == arithmetic_dtype(like.dtype):
        return vector, True
    raise RuntimeError(f"{name} must be of the dtype of x, or of float32")
