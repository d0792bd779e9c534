"""Backward of ReLU, ReLU6 (hardtanh) and leaky ReLU: from input, from output, or from a packed 1-bit mask.

Eager keeps the input or the output, whichever its formula reads. Either one shows where the gradient passes, and so
does one bit per element (MONeT's output- and intermediate-activated operators, section 4.3). Where the input is NaN, a
mask passes the gradient, as torch's ReLU does. Torch's leaky ReLU scales it; on a CPU its hardtanh gives 0 for elements
that are computed in whole vectors, and passes the gradient of the last few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.bitmask import unpack
from monetrun.ops.definition import arithmetic_dtype, like_first, operator, overwritten_first
from monetrun.ops.families.in_place import may_overwrite, over_gradient
from monetrun.ops.memory_format import in_storage_order
from monetrun.ops.registry import Alternative, Call, Joint, alike, argument, implementation, source, uncopied

aten = torch.ops.aten
monet = torch.ops.monet

# backward -> the forward operators that it belongs to
_FORWARD: dict[Any, tuple[Any, ...]] = {
    aten.threshold_backward.default: (aten.relu.default,),
    aten.hardtanh_backward.default: (aten.hardtanh.default, aten.hardtanh_.default),
    aten.leaky_relu_backward.default: (aten.leaky_relu.default,),
}

# what each backward and its forward have in common
_CONSTANTS: dict[Any, tuple[str, ...]] = {
    aten.threshold_backward.default: (),
    aten.hardtanh_backward.default: ("min_val", "max_val"),
    aten.leaky_relu_backward.default: ("negative_slope",),
}


def _mask_backward(out: Tensor, grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    values = in_storage_order(grad)
    other = (values.to(arithmetic_dtype(grad.dtype)) * slope).to(grad.dtype) if slope else torch.zeros_like(values)
    in_storage_order(out).copy_(torch.where(unpack(mask, grad.numel()), values, other))
    return out


@operator("mask_backward(Tensor grad, Tensor mask, float slope) -> Tensor", like_first)
def mask_backward(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """``grad`` where the bit is set, elsewhere ``grad * slope`` (0 where ``slope`` is 0, also of NaN).

    Bitwise identical to threshold_backward, hardtanh_backward and, unless its input is NaN, leaky_relu_backward.
    """
    return _mask_backward(torch.empty_like(grad), grad, mask, slope)


@operator("mask_backward_(Tensor(a!) grad, Tensor mask, float slope) -> Tensor(a!)", overwritten_first)
def mask_backward_(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """``mask_backward`` in place."""
    return _mask_backward(grad, grad, mask, slope)


def _ends(node: fx.Node) -> list[fx.Node]:
    """Input and output of the rectifier whose backward ``node`` is; [] or the input alone where they are not found."""
    forward = _FORWARD[node.target]
    read = source(node.args[1])
    if not isinstance(read, fx.Node):
        return []
    if read.target in forward and _has_the_same_constants(node, read):
        return [read, source(read.args[0])]
    original = uncopied(read)
    results = [
        user
        for n in dict.fromkeys((read, original))
        for user in n.users
        if user.target in forward and user.args[0] is n and _has_the_same_constants(node, user)
    ]
    return [read, original, *results[:1]]


def _has_the_same_constants(node: fx.Node, forward: fx.Node) -> bool:
    """Whether the constants of ``forward`` are those whose backward ``node`` is; a traced call leaves out defaults."""
    return all(argument(node, name) == argument(forward, name) for name in _CONSTANTS[node.target])


def _slope(node: fx.Node) -> float:
    """The slope of the masked elements."""
    return float(node.args[2]) if node.target is aten.leaky_relu_backward.default else 0.0  # type: ignore[arg-type]


def _limits(node: fx.Node) -> tuple[float, float] | None:
    """The open interval of inputs whose gradient passes unscaled; None where a mask cannot express the operator."""
    if node.target is aten.hardtanh_backward.default:
        low, high = (float(a) for a in node.args[2:4])  # type: ignore[arg-type]
        return (low, high) if low < high else None
    if node.target is aten.leaky_relu_backward.default:
        return (0.0, math.nan) if _slope(node) > 0 else None
    return (float(node.args[2]), math.nan)  # type: ignore[arg-type]


def _shown_by_both_ends(node: fx.Node) -> bool:
    """Whether output and input are beyond the same limits.

    Hardtanh's output has limits that are rounded to its dtype, where its backward compares in single precision.
    """
    if node.target is not aten.hardtanh_backward.default:
        return True
    return all(torch.tensor(a, dtype=node.meta["val"].dtype).item() == a for a in node.args[2:4])


@implementation(*_FORWARD)
def _from_other_end(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if node.target is aten.threshold_backward.default and node.args[2] != 0:
        return
    if node.target is aten.leaky_relu_backward.default and _slope(node) <= 0:
        return  # the output's sign does not show the input's
    if not _shown_by_both_ends(node):
        return
    read = source(node.args[1])
    for end in dict.fromkeys(_ends(node)):
        if end is not read and alike(node, end):
            name = "output" if end.target in _FORWARD[node.target] else "output:input"
            call = Call(node.target, (node.args[0], end, *node.args[2:]), dict(node.kwargs))
            yield Alternative(name, call, costs_as=Call.of(node))
            yield from over_gradient(node, call, name)


@implementation(*_FORWARD)
def _from_mask(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    limits = _limits(node)
    ends = _ends(node)
    grad: Any = node.args[0]
    if limits is None or not ends or not alike(node, grad, ends[0]):
        return
    mask = joint.optional(ends[0], monet.range_mask.default, ends[0], *limits)
    call = Call(monet.mask_backward.default, (grad, mask, _slope(node)))
    yield Alternative("intermediate:mask", call)
    if may_overwrite(node, grad):
        yield Alternative("intermediate:mask", Call(monet.mask_backward_.default, call.args), grad)
