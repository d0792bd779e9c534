"""Convolutions and their gradients by the cuDNN plans that are worth a choice (see ``ops.cudnn``).

Nothing is offered without the package or a CUDA device. Where a plan fails when it runs, ATen's own choice replaces it
from then on, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.cudnn import DTYPES, Problem, agrees, compute, plans_on, tensor_float_allowed, unavailable_reason
from monetrun.ops.definition import kernel, operator
from monetrun.ops.families.convolution import (
    BACKWARD_COST,
    COST,
    WINDOW,
    fake_gradients,
    for_each,
    input_gradient,
)
from monetrun.ops.memory_format import is_channels_last, memory_format
from monetrun.ops.registry import Alternative, Call, Joint, implementation, real_tensors, value_of

aten = torch.ops.aten
monet = torch.ops.monet


def forward_problem(x: Tensor, weight: Tensor, channels_last: bool, *window: Any) -> Problem:
    """CuDNN's problem of ``convolution(x, weight, None, *window)``."""
    kernel_sizes, sizes = weight.shape[2:], x.shape[2:]
    *lists, transposed, output_padding, groups = window
    stride, padding, dilation, output_padding = (for_each(v, len(sizes)) for v in (*lists, output_padding))
    each = zip(sizes, kernel_sizes, stride, padding, dilation, output_padding, strict=True)
    if transposed:
        spatial = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + o for n, k, s, p, d, o in each]
        image, response = (x.shape[0], weight.shape[1] * groups, *spatial), tuple(x.shape)
    else:
        spatial = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in each]
        image, response = tuple(x.shape), (x.shape[0], weight.shape[0], *spatial)
    operation = "dgrad" if transposed else "fprop"
    return Problem.of(operation, (image, weight.shape, response), (stride, padding, dilation), x.dtype, channels_last)


def weight_problem(grad: Tensor, x: Tensor, weight: Tensor, channels_last: bool, *window: Any) -> Problem:
    """CuDNN's problem of the gradient of a convolution's weight; operands are in the order of ``wgrad_operands``."""
    *lists, transposed, _, _ = window
    response, image = wgrad_operands(grad, x, transposed)
    sizes = image.shape, weight.shape, response.shape
    return Problem.of("wgrad", sizes, (for_each(v, x.dim() - 2) for v in lists), x.dtype, channels_last)


def wgrad_operands(grad: Any, x: Any, transposed: bool) -> tuple[Any, Any]:
    """The operands of a weight's gradient in cuDNN's order: response and image."""
    return (x, grad) if transposed else (grad, x)


def _fake_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    *window, last, _ = arguments
    problem = forward_problem(x, weight, last, *window)
    return problem.empty(problem.roles[2], x.device)


@operator(
    f"cudnn_convolution(Tensor x, Tensor weight, Tensor? bias, {WINDOW}, bool channels_last, str plan) -> Tensor",
    _fake_convolution,
    cost=COST,
)
def cudnn_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """``convolution``, its result in the memory format that ``channels_last`` names; on CUDA by the plan."""
    *window, last, _ = arguments
    return aten.convolution.default(x, weight, bias, *window).contiguous(memory_format=memory_format(x.dim(), last))


@kernel("cudnn_convolution", "CUDA")
def _convolution_on_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    *window, last, plan = arguments
    result = compute(forward_problem(x, weight, last, *window), plan, x, weight)
    if result is None:
        return cudnn_convolution(x, weight, bias, *arguments)  # type: ignore[no-any-return]
    return result if bias is None else result.add_(bias.view(-1, *(1,) * (x.dim() - 2)))


def _fake_weight_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    *_, output_mask, last, _ = arguments
    return fake_gradients(grad, weight, output_mask, memory_format(x.dim(), last))


@operator(
    f"cudnn_convolution_weight_backward(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes, {WINDOW},"
    " bool[3] output_mask, bool channels_last, str plan) -> (Tensor, Tensor, Tensor)",
    _fake_weight_backward,
    cost=BACKWARD_COST,
)
def cudnn_convolution_weight_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of weight and bias, as ``cudnn_convolution``; of ``weight`` only the shape is read."""
    bias_sizes, *window, (_, of_weight, of_bias), last, _ = arguments
    _, weighted, biased = aten.convolution_backward.default(
        grad, x, weight, bias_sizes, *window, [False, of_weight, of_bias]
    )
    form = memory_format(x.dim(), last)
    return None, weighted.contiguous(memory_format=form) if of_weight else None, biased


@kernel("cudnn_convolution_weight_backward", "CUDA")
def _weight_backward_on_cuda(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    _, *window, (_, of_weight, of_bias), last, plan = arguments
    result = None
    if of_weight:
        problem = weight_problem(grad, x, weight, last, *window)
        result = compute(problem, plan, *wgrad_operands(grad, x, window[3]))
    if result is None:
        return cudnn_convolution_weight_backward(grad, x, weight, *arguments)  # type: ignore[no-any-return]
    return None, result, grad.sum([d for d in range(grad.dim()) if d != 1]) if of_bias else None


# ---- alternatives


@implementation(aten.convolution.default)
def _forward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    yield from _by_plans(Call.of(node), value_of(node))


@implementation(aten.convolution_backward.default)
def _backward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    arguments: Any = node.args
    of_input, of_weight, of_bias = arguments[-1]
    if of_input and not (of_weight or of_bias):
        call = input_gradient(node)
        if call is not None:
            yield from _by_plans(call, node.meta["val"][0])
    elif of_weight and not of_input:
        grad, x, weight = map(value_of, arguments[:3])
        result = node.meta["val"][1]
        last = _format_of(x, grad, result)
        if last is None:
            return
        problem = weight_problem(grad, x, weight, last, *arguments[4:-1])  # type: ignore[arg-type]
        for name, plan in _named(problem, result):
            call = Call(monet.cudnn_convolution_weight_backward.default, (*arguments, last, plan))
            yield Alternative(name, call, exact=False)


def _by_plans(convolution: Call, result: Tensor | None) -> Iterator[Alternative]:
    """One alternative for each plan of a convolution's call."""
    x, weight = (value_of(a) for a in convolution.args[:2])
    last = _format_of(result, x, weight)
    if last is None:
        return
    problem = forward_problem(x, weight, last, *convolution.args[3:])  # type: ignore[arg-type]
    for name, plan in _named(problem, result):  # type: ignore[arg-type]
        call = Call(monet.cudnn_convolution.default, (*convolution.args, last, plan), only=convolution.only)
        yield Alternative(name, call, exact=False)


def _format_of(first: Tensor | None, *others: Tensor | None) -> bool | None:
    """Whether tensors on a CUDA device are all channels-last or all contiguous; None where cuDNN does not take them."""
    if first is None or first.device.type != "cuda" or first.dtype not in DTYPES or unavailable_reason() is not None:
        return None
    if not torch.backends.cudnn.enabled:  # the script's choice
        return None
    last = is_channels_last(first)
    if last is None or any(
        v is None
        or not v.numel()
        or v.dtype != first.dtype
        or not v.is_contiguous(memory_format=memory_format(v.dim(), last))
        for v in (first, *others)
    ):
        return None
    return last


def _named(problem: Problem, like: Tensor) -> Sequence[tuple[str, str]]:
    """Pairs of an implementation's name, numbered in the plans' order, and its plan."""
    device = like.device
    with real_tensors():
        if not agrees(problem.operation, len(problem.image), problem.dtype, problem.channels_last, device):
            return ()
        plans = plans_on(problem, tensor_float_allowed(), device)
    return [(f"conv:cudnn-{place}", plan) for place, plan in enumerate(plans)]
