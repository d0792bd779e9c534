"""Dropout from a packed 1-bit mask.

Eager keeps the scaled noise, as wide as the data: zeros, and one over the chance to stay. One bit per element says as
much, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops import random as _random  # noqa: F401  (defines monet::bernoulli)
from monetrun.ops.in_place import may_overwrite
from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, real_tensors, value_of

aten = torch.ops.aten
monet = torch.ops.monet


def _scale(noise: Any) -> float | None:
    """What the elements of a scaled noise are that are not zero; None for anything else."""
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
