"""Backward of hardswish from its output and one bit per element: on which side of its minimum, -1.5, the input was.

The slope is the square root of what the output is above the minimum, so that a rounding of the output moves it by up to
1.7e-4 in float32, where it is as small itself; in reduced precision, where it is not offered, by 1e-2 and more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops.in_place import may_overwrite
from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, source, uncopied, wide

aten = torch.ops.aten
monet = torch.ops.monet

_MINIMUM = -1.5


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
