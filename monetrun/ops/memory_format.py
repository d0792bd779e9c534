"""Strides and memory formats of tensors: what operators check of their operands, and give their results."""

from __future__ import annotations

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(dimensions: int, channels_last: bool) -> torch.memory_format:
    """Torch's memory format of a tensor of 4 or 5 dimensions."""
    return _CHANNELS_LAST[dimensions] if channels_last else torch.contiguous_format


def is_channels_last(value: Tensor) -> bool | None:
    """Whether a tensor of 4 or 5 dimensions is channels-last or contiguous; None where it is neither, or both."""
    if value.dim() not in _CHANNELS_LAST:
        return None
    contiguous, last = value.is_contiguous(), value.is_contiguous(memory_format=_CHANNELS_LAST[value.dim()])
    return None if contiguous == last else last


def has_strides_of_channels_last(value: Tensor) -> bool:
    """Whether a kernel that follows its operand's format takes a dense tensor for channels-last, not for contiguous.

    By the strides of dimensions of one element, too: the elements alone do not show the format of images of one pixel,
    or of one channel.
    """
    if value.dim() not in _CHANNELS_LAST:
        return False
    strides, (_, channels, *sizes) = [1], value.shape
    for size in (channels, *reversed(sizes)):
        strides.append(strides[-1] * max(1, size))
    of_channels, *of_sizes, of_images = strides
    return value.stride() == (of_images, of_channels, *reversed(of_sizes)) and max(channels, *sizes) > 1


def is_images(value: Tensor) -> bool:
    """Whether [N, C, ...] is contiguous or channels-last."""
    return value.is_contiguous() or value.movedim(1, -1).is_contiguous()


def in_storage_order(value: Tensor) -> Tensor:
    """The elements of a dense tensor as a vector in the order of storage, which it shares.

    Raises:
        RuntimeError: the tensor is not dense.
    """
    if not torch.ops.aten.is_non_overlapping_and_dense.default(value):
        raise RuntimeError("the tensor is not dense; make it contiguous (in any memory format) before")
    return value.as_strided((value.numel(),), (1,))


def check_same_layout(one: Tensor, other: Tensor) -> None:
    """Raise RuntimeError unless shapes, strides and dtypes are the same."""
    if one.dtype != other.dtype or one.shape != other.shape or (one.numel() and one.stride() != other.stride()):
        raise RuntimeError("the tensors differ in shape, strides or dtype")
