"""The gradient of a convolution's input without the input, of which only the shape is needed (MONeT, section 4.2).

It is the transposed convolution of the output's gradient, computed by the same kernels. Eager's own call takes the
input as well, which then has to be kept, or recomputed, until that call.

The families that compute convolutions otherwise (``layout``, ``cudnn_convolution``, ``parts``) share what is here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.definition import Cost
from monetrun.ops.registry import Alternative, Call, Joint, implementation, value_of

aten = torch.ops.aten

# schema: what aten.convolution takes after input, weight and bias
WINDOW = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"

COST = Cost(like=aten.convolution.default)
BACKWARD_COST = Cost(like=aten.convolution_backward.default)


@implementation(aten.convolution_backward.default)
def _without_the_input(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x, weight = node.args[:3]
    call, value = input_gradient(node), value_of(grad)
    if call is None or any(v is None or not v.is_contiguous() for v in map(value_of, (x, grad, weight))):
        return
    if value is not None and value.device.type == "cpu" and _by_onednn(x, *node.args[2:-1]) and _by_onednn(*call.args):
        yield Alternative("conv:apart", call, costs_as=Call.of(node))
    else:
        # elsewhere the transposed convolution may be another kernel: ATen's depthwise gradient is a kernel of its own,
        # and on one thread it multiplies matrices for small batches of 1x1 convolutions
        yield Alternative("conv:apart", call, exact=None, no_faster_than_default=True)


def input_gradient(node: fx.Node) -> Call | None:
    """The convolution that is the gradient of a convolution's input; None where ``node`` gives other gradients too."""
    arguments: Any = node.args
    grad, x, weight, _, stride, padding, dilation, transposed, further, groups, mask = arguments
    values = value_of(x), value_of(grad), value_of(weight)
    if list(mask) != [True, False, False] or any(v is None for v in values):
        return None
    of_x, of_grad, of_weight = (v.shape for v in values if v is not None)
    dimensions = len(of_x) - 2
    stride, padding, dilation, further = (for_each(v, dimensions) for v in (stride, padding, dilation, further))
    if transposed and any(f >= s for f, s in zip(further, stride, strict=True)):
        return None  # windows of the convolution would begin in the output's padding, too
    output_padding = [0] * dimensions
    if not transposed:  # elements at the far end that no window reaches
        output_padding = [
            of_x[d + 2] - ((of_grad[d + 2] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (of_weight[d + 2] - 1) + 1)
            for d in range(dimensions)
        ]
    return Call(
        aten.convolution.default,
        (grad, weight, None, stride, padding, dilation, not transposed, output_padding, groups),
        only=0,
    )


def _by_onednn(x: Any, weight: Any, bias: Any, *window: Any) -> bool:
    """Whether oneDNN computes a convolution on this CPU with as many threads as now, and not ATen's own kernels."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    keywords: dict[str, Any] = dict(zip(names, window, strict=True))
    given: Any = value_of(x), value_of(weight), None
    return not torch._C._select_conv_backend(*given, bias_sizes=None, **keywords).name.startswith("Slow")


def for_each(values: Sequence[int], dimensions: int) -> list[int]:
    """A stride, padding or dilation with one value for each spatial dimension; a single value stands for all."""
    return list(values) * dimensions if len(values) == 1 else list(values)


def fake_gradients(
    grad: Tensor, weight: Tensor, output_mask: Sequence[bool], form: torch.memory_format
) -> tuple[Tensor | None, ...]:
    """Shape, strides and dtype of a convolution's gradients of weight (in the memory format ``form``) and bias."""
    return (
        None,
        torch.empty_like(weight, memory_format=form) if output_mask[1] else None,
        grad.new_empty((grad.shape[1],)) if output_mask[2] else None,
    )
