"""A convolution computed in the other memory format: channels-last where it is contiguous, and the other way round.

Its operands are converted before it and its result after it; the copies count as workspace. On a GPU cuDNN has other
kernels for each format (tensor cores read channels-last, and those of contiguous tensors convert by themselves):
measuring shows which of them take less.

On a CPU nothing is gained. Over the convolutions of ResNet-50, MobileNetV2 and a U-Net and their gradients, conversions
included, channels-last kernels took 1.0 to 1.5 times the time of contiguous ones, and contiguous ones 1.6 to 4 times
that of channels-last ones; in 16 of 420 places the workspace was less, in 192 the results were bitwise identical
(float32, 2 cores of a Xeon, 2026-11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.definition import operator
from monetrun.ops.families.convolution import BACKWARD_COST, COST, WINDOW, fake_gradients, input_gradient
from monetrun.ops.memory_format import is_channels_last, memory_format
from monetrun.ops.registry import Alternative, Call, Joint, implementation, value_of

aten = torch.ops.aten
monet = torch.ops.monet

OFFERED_ON = ("cuda",)


def _fake_convolution_by(x: Tensor, weight: Tensor, bias: Tensor | None, *window: Any) -> Tensor:
    shape = aten.convolution.default(x, weight, bias, *window[:-1]).shape
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(len(shape), not window[-1]))


@operator(
    f"convolution_by(Tensor x, Tensor weight, Tensor? bias, {WINDOW}, bool channels_last) -> Tensor",
    _fake_convolution_by,
    cost=COST,
)
def convolution_by(x: Tensor, weight: Tensor, bias: Tensor | None, *window: Any) -> Tensor:
    """``convolution`` by the kernels of the format that the last argument names; its result has the other format."""
    inner, outer = (memory_format(x.dim(), last) for last in (window[-1], not window[-1]))
    y = aten.convolution.default(
        x.contiguous(memory_format=inner), weight.contiguous(memory_format=inner), bias, *window[:-1]
    )
    return y.contiguous(memory_format=outer)


def _fake_weight_backward_by(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *window: Any
) -> tuple[Tensor | None, ...]:
    *_, output_mask, last = window
    return fake_gradients(grad, weight, output_mask, memory_format(x.dim(), not last))


@operator(
    "convolution_weight_backward_by(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes,"
    f" {WINDOW}, bool[3] output_mask, bool channels_last) -> (Tensor, Tensor, Tensor)",
    _fake_weight_backward_by,
    cost=BACKWARD_COST,
)
def convolution_weight_backward_by(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *window: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of weight and bias, as ``convolution_by``; of ``weight`` only the shape is read."""
    *window_, output_mask, last = window
    inner, outer = (memory_format(x.dim(), v) for v in (last, not last))
    _, of_weight, of_bias = aten.convolution_backward.default(
        grad.contiguous(memory_format=inner),
        x.contiguous(memory_format=inner),
        torch.empty_like(weight, memory_format=inner),
        bias_sizes,
        *window_,
        [False, *output_mask[1:]],
    )
    return None, of_weight.contiguous(memory_format=outer) if output_mask[1] else None, of_bias


@implementation(aten.convolution.default)
def _forward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    last = _format_of(value_of(node), node.args[0])
    if last is not None:
        yield Alternative("layout", Call(monet.convolution_by.default, (*node.args, not last)), exact=False)


@implementation(aten.convolution_backward.default)
def _backward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    arguments: Any = node.args
    grad, x = arguments[:2]
    of_input, of_weight, _ = arguments[-1]
    if of_input and not any(arguments[-1][1:]):
        last = _format_of(node.meta["val"][0], grad)
        call = input_gradient(node)
        if last is not None and call is not None:
            yield Alternative("layout", Call(monet.convolution_by.default, (*call.args, not last), only=0), exact=False)
    elif of_weight and not of_input:
        last = _format_of(value_of(x), grad)
        result = node.meta["val"][1]
        if last is not None and result.is_contiguous(memory_format=memory_format(result.dim(), last)):
            call = Call(monet.convolution_weight_backward_by.default, (*arguments, not last))
            yield Alternative("layout", call, exact=False)


def _format_of(value: Tensor | None, operand: Any) -> bool | None:
    """``is_channels_last`` of ``value``, where ``operand`` has that format as well, and there are kernels for both."""
    other = value_of(operand)
    if value is None or other is None or value.device.type not in OFFERED_ON or value.dtype == torch.float64:
        return None
    last = is_channels_last(value)
    same = last is not None and other.is_contiguous(memory_format=memory_format(other.dim(), last))
    return last if same else None
