"""Backward of 2-d max pooling from a byte per output element, or from the pooling's input.

Eager keeps an int64 per output element, and the whole input, of which its kernel needs the shape alone. Within a
window one byte says as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops.registry import Alternative, Call, Joint, alike, argument, implementation, source, value_of

aten = torch.ops.aten
monet = torch.ops.monet


def _pair(value: Any) -> list[int]:
    values = list(value)
    return values * 2 if len(values) == 1 else values


@implementation(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad: Any = node.args[0]
    indices = source(argument(node, "indices"))
    value = value_of(node.args[1])
    if value is None or not isinstance(indices, fx.Node) or not isinstance(indices.args[0], fx.Node):
        return
    pool = indices.args[0]
    if pool.target is not aten.max_pool2d_with_indices.default:
        return
    x: Any = pool.args[0]
    # value_of(node) has the form of the input; the kernels write that of their operands
    if not alike(node, x) or value.dim() != 4 or not value.is_floating_point():
        return
    kernel = _pair(argument(node, "kernel_size"))
    stride = _pair(argument(node, "stride")) or kernel
    padding, dilation = _pair(argument(node, "padding")), _pair(argument(node, "dilation"))
    ceil_mode = bool(argument(node, "ceil_mode"))
    window = (kernel, stride, padding, dilation)
    if kernel[0] * kernel[1] < 256:
        index = joint.optional(pool, monet.max_pool2d_index.default, x, *window, ceil_mode)
        call = Call(monet.max_pool2d_index_backward.default, (grad, index, list(value.shape), *window))
        yield Alternative("intermediate:index", call)
        yield Alternative("output:input", Call(monet.max_pool2d_input_backward.default, (grad, x, *window, ceil_mode)))
