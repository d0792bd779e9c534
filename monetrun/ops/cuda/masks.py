"""Masks of one bit for each element, and the operators that read one."""

from __future__ import annotations

import torch
from torch import Tensor

from monetrun.ops.cuda.launch import launch
from monetrun.ops.cuda.operands import aligned, check_dense, check_mask, check_same_layout, packs


def _new_mask(x: Tensor) -> Tensor:
    check_dense(x, "x")
    return x.new_empty((packs(x.numel()),), dtype=torch.uint8)


def range_mask(x: Tensor, low: float, high: float) -> Tensor:
    """As ``bitmask.range_mask``."""
    mask = _new_mask(x)
    launch("range_mask", x, mask.numel(), x, mask, x.numel(), aligned(x), low, high)
    return mask


def nonzero_mask(x: Tensor) -> Tensor:
    """As ``bitmask.nonzero_mask``."""
    mask = _new_mask(x)
    if x.dtype == torch.bool:  # the kernel is the same in the code for any dtype
        launch("nonzero_bytes", x, mask.numel(), x, mask, x.numel(), aligned(x), dtype=torch.float32)
    else:
        launch("nonzero_mask", x, mask.numel(), x, mask, x.numel(), aligned(x))
    return mask


def _changed(kernel: str, x: Tensor, mask: Tensor, to: Tensor, *numbers: float) -> Tensor:
    check_mask(mask, x.numel())
    launch(kernel, x, mask.numel(), x, mask, to, x.numel(), aligned(x, to), *numbers)
    return to


def mask_backward(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """As ``families.rectifiers.mask_backward``."""
    check_dense(grad, "grad")
    return _changed("mask_backward", grad, mask, torch.empty_like(grad), slope)


def mask_backward_(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """``mask_backward`` in place."""
    check_dense(grad, "grad")
    return _changed("mask_backward", grad, mask, grad, slope)


def mask_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As ``families.dropout.mask_scale``."""
    check_dense(x, "x")
    return _changed("mask_scale", x, mask, torch.empty_like(x), scale, True)


def mask_scale_(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``mask_scale`` in place."""
    check_dense(x, "x")
    return _changed("mask_scale", x, mask, x, scale, True)


def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As ``families.dropout.dropout_backward``."""
    check_dense(grad, "grad")
    return _changed("mask_scale", grad, mask, torch.empty_like(grad), scale, False)


def dropout_backward_(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``dropout_backward`` in place."""
    check_dense(grad, "grad")
    return _changed("mask_scale", grad, mask, grad, scale, False)


def _hardswish(grad: Tensor, result: Tensor, mask: Tensor, to: Tensor) -> Tensor:
    check_dense(grad, "grad")
    check_same_layout(grad, result, "grad and result")
    check_mask(mask, grad.numel())
    whole = aligned(grad, result, to)
    launch("hardswish_output_backward", grad, mask.numel(), grad, result, mask, to, grad.numel(), whole)
    return to


def hardswish_output_backward(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """As ``families.hardswish.hardswish_output_backward``."""
    return _hardswish(grad, result, mask, torch.empty_like(grad))


def hardswish_output_backward_(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """``hardswish_output_backward`` in place."""
    return _hardswish(grad, result, mask, grad)
