"""The gradient of a convolution's input without the input, of which only the shape is needed (MONeT, section 4.2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.ops.registry import Alternative, Call, Joint, implementation, value_of

aten = torch.ops.aten
monet = torch.ops.monet

_library = torch.library.Library("monet", "FRAGMENT")
_library.define(
    "convolution_input_gradient(Tensor grad, Tensor weight, SymInt[] input_size, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"
)


def _convolution_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, input_size: Sequence[int], *window: Any
) -> torch.Tensor:
    # as torch.nn.grad does: the shape of an input, on one element
    shape_only = grad.new_empty(1).expand(input_size)
    mask = [True, False, False]
    return aten.convolution_backward.default(grad, shape_only, weight, None, *window, mask)[0]  # type: ignore[no-any-return]


_library.impl("convolution_input_gradient", _convolution_input_gradient, "CompositeExplicitAutograd")


@implementation(aten.convolution_backward.default)
def _apart(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x, weight, _, *window, mask = node.args
    value, of_grad, of_weight = value_of(x), value_of(grad), value_of(weight)
    if list(mask) != [True, False, False] or value is None or of_grad is None or of_weight is None:  # type: ignore[arg-type]
        return
    # other layouts may be computed by other kernels where the input's is not seen
    if all(v.is_contiguous() for v in (value, of_grad, of_weight)):
        call = Call(monet.convolution_input_gradient.default, (grad, weight, list(value.shape), *window), only=0)
        yield Alternative("conv:apart", call, costs_as=Call(node.target, node.args))
