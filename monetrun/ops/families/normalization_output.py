"""Backward of a normalization from its output, so that the input need not be kept.

The operators after a normalization often keep its output anyway (a linear layer's weight gradient reads it), or can be
recomputed from it, so that one tensor is kept where eager keeps two. ``normal = (output - bias) / weight`` recovers
what the backward reads of the input, with an error that grows with ``abs(bias / weight)``: a guard checks that ratio
(see ``capture.guards``). In reduced precision the rounding of the output alone is too large an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.definition import Cost, arithmetic_dtype, operator
from monetrun.ops.families import cudnn_batch_norm as _cudnn_batch_norm_operators  # noqa: F401  (defines them)
from monetrun.ops.memory_format import check_same_layout, is_images
from monetrun.ops.registry import (
    Alternative,
    Call,
    Joint,
    are_contiguous,
    argument,
    call_of,
    element,
    implementation,
    source,
    value_of,
    wide,
)

aten = torch.ops.aten
monet = torch.ops.monet

# At a ratio of abs(bias / weight) of 8 the gradients' error against float64 is up to 1.5 times eager's own, at 16 up
# to twice that, at 64 six times (CPU, float32, rows of 7 to 768): weights may drift to 16 before the next check.
LIMIT = 8.0
# Statistics over images average more, so that the output's rounding shows earlier: up to 1.8 times eager's error at 2,
# twice at 4, four times at 8 (CPU, float32, 1000 to 100,000 elements).
LIMIT_OF_CHANNELS = 2.0

# Not offered where only these read the output of a batch norm, so that networks of convolutions, batch norms and ReLUs
# stay bitwise identical to eager: ReLUs and sums are recomputed exactly, in one pass, from the batch norm's input (see
# ``normalization``), and keeping the output instead saves nothing more.
_READERS_OF_EXACT = {
    aten.relu.default,
    aten.hardtanh.default,
    aten.add.Tensor,
    aten.hardtanh_backward.default,
    aten.clone.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}


def _fake_gradients(
    grad: Tensor, result: Tensor, normalized_shape: Sequence[int], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    output_mask = rest[-1]
    of_input = torch.empty_like(result) if output_mask[0] else result.new_empty((0,))
    of_weight, of_bias = (result.new_empty(normalized_shape if wanted else (0,)) for wanted in output_mask[1:])
    return of_input, of_weight, of_bias


def _output_backward(
    grad: Tensor,
    result: Tensor,
    shape: tuple[int, int, int, int],
    over: tuple[int, ...],
    parameter_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    # `grad` and `result` are viewed as `shape`, [N, G, D, L]: statistics are over the dimensions `over`, parameters are
    # [G * D], their gradients of `parameter_shape`. Sums are in float64.
    dtype = arithmetic_dtype(result.dtype)
    g, normal = grad.reshape(shape).to(dtype), result.reshape(shape).to(dtype)
    scaled = g
    if bias is not None:
        normal = normal - bias.to(dtype).view(1, shape[1], shape[2], 1)
    if weight is not None:
        wide = weight.to(dtype).view(1, shape[1], shape[2], 1)
        normal, scaled = normal / wide, scaled * wide
    of_input, of_weight, of_bias = _fake_gradients(grad, result, parameter_shape, output_mask)
    if output_mask[0] and result.numel():
        scale = rstd.to(dtype).view([1 if d in over else size for d, size in enumerate(shape)])
        mean, slope = (v.mean(over, keepdim=True, dtype=torch.float64).to(dtype) for v in (scaled, scaled * normal))
        given = scale * (scaled - mean - normal * slope)
        of_input.copy_(given.reshape(result.shape))
    for out, of_each in ((of_weight, g * normal), (of_bias, g)):
        if out.numel():
            out.copy_(of_each.sum((0, 3), dtype=torch.float64).view(parameter_shape))
    return of_input, of_weight, of_bias


@operator(
    "layer_norm_output_backward(Tensor grad, Tensor result, int[] normalized_shape, Tensor rstd, Tensor? weight,"
    " Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    _fake_gradients,
)
def layer_norm_output_backward(
    grad: Tensor,
    result: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """native_layer_norm_backward from the layer's output, by ``normal = (result - bias) / weight``.

    ``grad`` and ``result`` are contiguous. Gradients (of input, weight and bias) that ``output_mask`` leaves out are
    empty. Within rounding of ATen's where ``affine_invertible`` holds; without it, the error has no bound.
    """
    if not (grad.is_contiguous() and result.is_contiguous()):
        raise RuntimeError("grad and result must be contiguous")
    check_same_layout(grad, result)
    length = math.prod(normalized_shape)
    shape = (result.numel() // max(1, length), 1, length, 1)
    return _output_backward(grad, result, shape, (1, 2, 3), normalized_shape, rstd, weight, bias, output_mask)


@operator(
    "channel_norm_output_backward(Tensor grad, Tensor result, Tensor rstd, Tensor? weight, Tensor? bias,"
    " bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    lambda grad, result, *rest: _fake_gradients(grad, result, result.shape[1:2], *rest),
    cost=Cost(reads=2),  # sums first, then gradients
)
def channel_norm_output_backward(
    grad: Tensor,
    result: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """native_group_norm_backward, or native_batch_norm_backward in training, from the layer's output.

    ``grad`` and ``result`` are [N, C, ...], both contiguous or both channels-last. The shape of ``rstd`` says
    which: [N, groups] of a group norm, [C] of a batch norm. Otherwise as ``layer_norm_output_backward``.
    """
    if result.dim() < 2 or not is_images(result):
        raise RuntimeError("grad and result must be [N, C, ...], contiguous or channels-last")
    check_same_layout(grad, result)
    images, channels = result.shape[:2]
    groups = channels if rstd.dim() == 1 else rstd.shape[-1]
    if rstd.shape not in ((channels,), (images, groups)) or groups == 0 or channels % groups:
        raise RuntimeError(f"rstd must be [{channels}], or [{images}, groups], got {list(rstd.shape)}")
    shape = (images, groups, channels // groups, math.prod(result.shape[2:]))
    over = (0, 2, 3) if rstd.dim() == 1 else (2, 3)
    return _output_backward(grad, result, shape, over, (channels,), rstd, weight, bias, output_mask)


@operator(
    "affine_invertible(Tensor? weight, Tensor? bias, float limit) -> Tensor",
    lambda weight, bias, _: (bias if weight is None else weight).new_empty((), dtype=torch.bool),
)
def affine_invertible(weight: Tensor | None, bias: Tensor | None, limit: float) -> Tensor:
    """Whether ``x`` can be recovered from ``x * weight + bias``.

    It can where every ``abs(bias) <= limit * abs(weight)``, and every weight is finite and not 0. The relative rounding
    error of what is recovered is up to ``1 + limit`` times that of the output.
    """
    given = bias if weight is None else weight
    if given is None:
        raise RuntimeError("there is neither weight nor bias")
    dtype = arithmetic_dtype(given.dtype)
    size = torch.ones_like(given, dtype=dtype) if weight is None else weight.to(dtype).abs()
    offset = torch.zeros_like(size) if bias is None else bias.to(dtype).abs()
    # far enough from underflow and overflow that products with it keep all their digits
    least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    return ((size >= least) & (size <= 1 / least) & (offset <= limit * size)).all()


def _guard(weight: Any, bias: Any, limit: float) -> Call | None:
    if weight is None and bias is None:
        return None
    return Call(monet.affine_invertible.default, (weight, bias, limit))


def _readable(grad: Any, result: Any, weight: Any, bias: Any, *others: Any) -> bool:
    """Whether the kernels, and those of guards, take the numbers and the parameters."""
    return wide(grad, result, weight, bias, *others) and are_contiguous(weight, bias)


def _alike(*nodes: Any) -> bool:
    """Whether nodes are tensors of the same shape and strides."""
    values = [value_of(n) for n in nodes]
    first = values[0]
    return first is not None and all(
        v is not None and v.shape == first.shape and v.stride() == first.stride() for v in values
    )


@implementation(aten.native_layer_norm_backward.default)
def _layer_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    names = ("grad_out", "input", "normalized_shape", "rstd", "weight", "bias", "output_mask")
    grad, x, shape, rstd, weight, bias, mask = (argument(node, name) for name in names)
    norm = call_of(rstd, aten.native_layer_norm.default, 2)
    if norm is None or source(norm.args[0]) is not source(x) or norm.args[1:4] != (shape, weight, bias):
        return
    result = element(norm, 0)
    values = [value_of(n) for n in (grad, result, x)]
    if any(v is None or not v.is_contiguous() for v in values) or not _readable(grad, result, weight, bias):
        return
    call = Call(monet.layer_norm_output_backward.default, (grad, result, shape, rstd, weight, bias, mask))
    yield Alternative("output:layer-norm", call, exact=False, guard=_guard(weight, bias, LIMIT))


@implementation(aten.native_group_norm_backward.default)
def _group_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    names = ("grad_out", "input", "rstd", "weight", "output_mask")
    grad, x, rstd, weight, mask = (argument(node, name) for name in names)
    norm = call_of(rstd, aten.native_group_norm.default, 2)
    if norm is None or source(norm.args[0]) is not source(x) or norm.args[1] is not weight:
        return
    yield from _of_channels("output:group-norm", grad, x, norm, rstd, mask)


@implementation(aten.native_batch_norm_backward.default)
def _batch_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    names = ("grad_out", "input", "weight", "save_invstd", "train", "output_mask")
    grad, x, weight, rstd, train, mask = (argument(node, name) for name in names)
    if not train:
        return
    for target in (aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats):
        norm = call_of(rstd, target, 2)
        if norm is None or source(norm.args[0]) is not source(x) or norm.args[1] is not weight:
            continue
        result = element(norm, 0)
        fused = target is aten._native_batch_norm_legit_functional.default
        if result is not None and not (fused and all(user.target in _READERS_OF_EXACT for user in result.users)):
            yield from _of_channels("output:batch-norm", grad, x, norm, rstd, mask)


@implementation(aten.cudnn_batch_norm_backward.default)
def _cudnn_batch_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x, weight, rstd = (argument(node, name) for name in ("grad_output", "input", "weight", "save_var"))
    norm = call_of(rstd, monet.cudnn_batch_norm.default, 2)
    if norm is None or source(norm.args[0]) is not source(x) or norm.args[1] is not weight:
        return
    result = element(norm, 0)
    if result is not None and not all(user.target in _READERS_OF_EXACT for user in result.users):
        yield from _of_channels("output:batch-norm", grad, x, norm, rstd, [True, True, True])


def _of_channels(name: str, grad: Any, x: Any, norm: fx.Node, rstd: Any, mask: Any) -> Iterator[Alternative]:
    weight, bias = norm.args[1:3]
    result = element(norm, 0)
    value = value_of(result)
    if value is None or not _alike(result, grad, x) or not _readable(grad, result, weight, bias, rstd):
        return
    if not is_images(value):
        return
    call = Call(monet.channel_norm_output_backward.default, (grad, result, rstd, weight, bias, mask))
    yield Alternative(name, call, exact=False, guard=_guard(weight, bias, LIMIT_OF_CHANNELS))
