"""Dropout from a packed 1-bit mask.

On a CPU eager keeps the scaled noise, which is as large as the data. Each of its elements is 0 or the inverse of the
probability to stay, so one bit per element and that factor give the same bits. On CUDA eager keeps a mask of a byte per
element (``native_dropout``), and multiplies by a factor that is not rounded to the data's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops import random as _random  # noqa: F401  (defines monet::bernoulli)
from monetrun.ops.bitmask import unpack
from monetrun.ops.definition import arithmetic_dtype, like_first, operator, overwritten_first
from monetrun.ops.families.in_place import may_overwrite
from monetrun.ops.memory_format import in_storage_order
from monetrun.ops.registry import (
    Alternative,
    Call,
    Joint,
    alike,
    call_of,
    implementation,
    is_whole,
    real_tensors,
    value_of,
)

aten = torch.ops.aten
monet = torch.ops.monet


def _mask_scale(out: Tensor, x: Tensor, mask: Tensor, scale: float) -> Tensor:
    noise = unpack(mask, x.numel()).to(x.dtype) * scale
    in_storage_order(out).copy_(in_storage_order(x) * noise)
    return out


@operator("mask_scale(Tensor x, Tensor mask, float scale) -> Tensor", like_first)
def mask_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``x * (bit ? scale : 0)``, the factor rounded to the dtype of ``x``: dropout by a packed mask."""
    return _mask_scale(torch.empty_like(x), x, mask, scale)


@operator("mask_scale_(Tensor(a!) x, Tensor mask, float scale) -> Tensor(a!)", overwritten_first)
def mask_scale_(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``mask_scale`` in place."""
    return _mask_scale(x, x, mask, scale)


def _dropout_backward(out: Tensor, grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    dtype = arithmetic_dtype(grad.dtype)
    factor = unpack(mask, grad.numel()).to(dtype) * scale
    in_storage_order(out).copy_(in_storage_order(grad).to(dtype) * factor)
    return out


@operator("dropout_backward(Tensor grad, Tensor mask, float scale) -> Tensor", like_first)
def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``native_dropout_backward`` by a packed mask: ``grad * (bit ? scale : 0)``, rounded once."""
    return _dropout_backward(torch.empty_like(grad), grad, mask, scale)


@operator("dropout_backward_(Tensor(a!) grad, Tensor mask, float scale) -> Tensor(a!)", overwritten_first)
def dropout_backward_(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``dropout_backward`` in place."""
    return _dropout_backward(grad, grad, mask, scale)


def _scale(noise: Any) -> float | None:
    """The value of the nonzero elements of dropout's scaled noise; None for any other node."""
    if not isinstance(noise, fx.Node):
        return None
    if noise.target is monet.bernoulli.default:
        return 1.0
    divided: Any = noise.args[0] if noise.args else None
    if noise.target not in (aten.div.Scalar, aten.div.Tensor) or not isinstance(divided, fx.Node):
        return None
    if divided.target is not monet.bernoulli.default or not isinstance(noise.args[1], int | float):
        return None
    value = value_of(noise)
    assert value is not None
    with real_tensors():
        return (torch.ones((), dtype=value.dtype) / noise.args[1]).item()


@implementation(aten.mul.Tensor)
def _from_mask(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    for x, noise in (node.args, node.args[::-1]):
        scale = _scale(noise)
        if scale is None or not isinstance(x, fx.Node) or not alike(node, x, noise):
            continue
        mask = joint.optional(noise, monet.nonzero_mask.default, noise)  # type: ignore[arg-type]
        call = Call(monet.mask_scale.default, (x, mask, scale))
        yield Alternative("intermediate:mask", call)
        if may_overwrite(node, x):
            yield Alternative("intermediate:mask", Call(monet.mask_scale_.default, call.args), x)


@implementation(aten.native_dropout_backward.default)
def _backward_from_bits(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, of_bytes, scale = node.args
    bytewise, values = value_of(of_bytes), [value_of(n) for n in (node, grad)]
    dropped = call_of(of_bytes, aten.native_dropout.default, 1)
    if dropped is None or bytewise is None or not alike(node, grad) or not is_whole(bytewise):
        return
    if any(v is None or v.stride() != bytewise.stride() for v in values):
        return
    mask = joint.optional(of_bytes, monet.nonzero_mask.default, of_bytes)  # type: ignore[arg-type]
    call = Call(monet.dropout_backward.default, (grad, mask, scale))
    yield Alternative("intermediate:mask", call, exact=None)
    if may_overwrite(node, grad):
        yield Alternative("intermediate:mask", Call(monet.dropout_backward_.default, call.args), grad, exact=None)  # type: ignore[arg-type]
