"""Dropout from a packed 1-bit mask.

Eager keeps the scaled noise, which is as large as the data. Each of its elements is 0 or the inverse of the probability
to stay, so one bit per element and that factor give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops import random as _random  # noqa: F401  (defines monet::bernoulli)
from monetrun.ops.bitmask import unpack
from monetrun.ops.definition import like_first, operator, overwritten_first
from monetrun.ops.families.in_place import may_overwrite
from monetrun.ops.memory_format import in_storage_order
from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, real_tensors, value_of

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
