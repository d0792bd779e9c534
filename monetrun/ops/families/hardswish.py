"""Backward of hardswish from its output and one bit per element: whether the input was above -1.5, the minimum.

The slope is the square root of the output's distance from the minimum, so that a rounding of the output moves it by up
to 1.7e-4 in float32, and only where the slope is as small itself. In reduced precision it would be 1e-2 and more: not
offered there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.bitmask import unpack
from monetrun.ops.definition import like_first, operator, overwritten_first
from monetrun.ops.families.in_place import may_overwrite
from monetrun.ops.memory_format import check_same_layout, in_storage_order
from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, source, uncopied, wide

aten = torch.ops.aten
monet = torch.ops.monet

_MINIMUM = -1.5


def _output_backward(out: Tensor, grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    check_same_layout(grad, result)
    value, values = in_storage_order(result), in_storage_order(grad)
    right = unpack(mask, grad.numel())
    slope = (24 * value + 9).clamp_(min=0).sqrt_().div_(6)
    slope = torch.where(right, torch.where(value < 3, slope, 1.0), -slope)
    in_storage_order(out).copy_(torch.where(right | (value < 0), values * slope, torch.zeros_like(values)))
    return out


@operator("hardswish_output_backward(Tensor grad, Tensor result, Tensor mask) -> Tensor", like_first)
def hardswish_output_backward(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """Hardswish's backward from its output; the mask's bits: whether the input was above -1.5.

    With y = x (x + 3) / 6 between -3 and 3, the slope (2 x + 3) / 6 is +-sqrt(24 y + 9) / 6: + to the right of the
    minimum at -1.5, - to its left. A rounding of y moves it by at most ``sqrt(9 eps) / 6``, 1.7e-4 in float32, and
    that only where it is as small itself.
    """
    return _output_backward(torch.empty_like(grad), grad, result, mask)


@operator("hardswish_output_backward_(Tensor(a!) grad, Tensor result, Tensor mask) -> Tensor(a!)", overwritten_first)
def hardswish_output_backward_(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """``hardswish_output_backward`` in place."""
    return _output_backward(grad, grad, result, mask)


@implementation(aten.hardswish_backward.default)
def _from_result(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad: Any = node.args[0]
    x: Any = source(node.args[1])
    if not wide(x):
        return
    for result in (*x.users, *uncopied(x).users):
        if result.target is aten.hardswish.default and alike(node, grad, result, x):
            mask = joint.optional(x, monet.range_mask.default, x, _MINIMUM, float("nan"))
            arguments = (grad, result, mask)
            yield Alternative("output:hardswish", Call(monet.hardswish_output_backward.default, arguments), exact=False)
            if may_overwrite(node, grad):
                over = Call(monet.hardswish_output_backward_.default, arguments)
                yield Alternative("output:hardswish", over, grad, exact=False)
            return
