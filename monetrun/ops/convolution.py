"""The gradient of a convolution's input without the input, of which only the shape is needed (MONeT, section 4.2).

It is the transposed convolution of the output's gradient, computed by the same kernels; eager's own call takes the
input as well, which then has to be kept, or run again, until it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.ops.registry import Alternative, Call, Joint, implementation, value_of

aten = torch.ops.aten


@implementation(aten.convolution_backward.default)
def _apart(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x, weight = node.args[:3]
    call = input_gradient(node)
    if call is not None and all(v is not None and v.is_contiguous() for v in map(value_of, (x, grad, weight))):
        yield Alternative("conv:apart", call, costs_as=Call.of(node))


def input_gradient(node: fx.Node) -> Call | None:
    """The convolution that is the gradient of a convolution's input; None where ``node`` gives other gradients too."""
    arguments: Any = node.args
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = arguments
    values = value_of(x), value_of(grad), value_of(weight)
    if list(mask) != [True, False, False] or any(v is None for v in values):
        return None
    of_x, of_grad, of_weight = (v.shape for v in values if v is not None)
    dimensions = len(of_x) - 2
    stride, padding, dilation = (for_each(v, dimensions) for v in (stride, padding, dilation))
    rest = [0] * dimensions
    if not transposed:  # what the strides leave over at the far end
        rest = [
            of_x[d + 2] - ((of_grad[d + 2] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (of_weight[d + 2] - 1) + 1)
            for d in range(dimensions)
        ]
    return Call(
        aten.convolution.default,
        (grad, weight, None, stride, padding, dilation, not transposed, rest, groups),
        only=0,
    )


def for_each(values: Sequence[int], dimensions: int) -> list[int]:
    """A stride, padding or dilation with a value for each spatial dimension; one alone is that of all."""
    return list(values) * dimensions if len(values) == 1 else list(values)
