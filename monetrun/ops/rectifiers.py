"""Backward of ReLU, ReLU6 (hardtanh) and leaky ReLU: from input, from output, or from a packed 1-bit mask.

Eager keeps one full tensor, the input or the output, whichever its formula names. Both tell the same elements apart,
so either serves, and so does one bit per element (MONeT's output- and intermediate-activated operators, section 4.3).
NaN passes its gradient on, as torch's own kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops.in_place import may_overwrite, over_gradient
from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, source, uncopied

aten = torch.ops.aten
monet = torch.ops.monet

# backward -> the forward operators that it belongs to
_FORWARD: dict[Any, tuple[Any, ...]] = {
    aten.threshold_backward.default: (aten.relu.default,),
    aten.hardtanh_backward.default: (aten.hardtanh.default, aten.hardtanh_.default),
    aten.leaky_relu_backward.default: (aten.leaky_relu.default,),
}


def _ends(node: fx.Node) -> list[fx.Node]:
    """Input and output of the rectifier whose backward ``node`` is, as far as they are found."""
    forward = _FORWARD[node.target]
    read = source(node.args[1])
    if not isinstance(read, fx.Node):
        return []
    if read.target in forward:
        return [read, source(read.args[0])]
    original = uncopied(read)
    results = [
        user
        for n in {read, original}
        for user in n.users
        if user.target in forward and user.args[0] is n and user.args[1:] == _constants(node, user)
    ]
    return [read, original, *results[:1]]


def _constants(node: fx.Node, forward: fx.Node) -> tuple[Any, ...]:
    """The constants that ``forward`` must have for ``node`` to be its backward."""
    return tuple(node.args[2 : 2 + len(forward.args) - 1])


def _leaky(node: fx.Node) -> float:
    return float(node.args[2]) if node.target is aten.leaky_relu_backward.default else 0.0  # type: ignore[arg-type]


def _limits(node: fx.Node) -> tuple[float, float] | None:
    """Between which (exclusive) the gradient passes."""
    if node.target is aten.hardtanh_backward.default:
        low, high = (float(a) for a in node.args[2:4])  # type: ignore[arg-type]
        return (low, high) if low < high else None
    if node.target is aten.leaky_relu_backward.default:
        return (0.0, math.nan) if _leaky(node) > 0 else None
    return (float(node.args[2]), math.nan)  # type: ignore[arg-type]


@implementation(*_FORWARD)
def _from_other_end(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if node.target is aten.threshold_backward.default and node.args[2] != 0:
        return
    if node.target is aten.leaky_relu_backward.default and _leaky(node) <= 0:
        return  # the sign is lost
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
    call = Call(monet.mask_backward.default, (grad, mask, _leaky(node)))
    yield Alternative("intermediate:mask", call)
    if may_overwrite(node, grad):
        yield Alternative("intermediate:mask", Call(monet.mask_backward_.default, call.args), grad)
