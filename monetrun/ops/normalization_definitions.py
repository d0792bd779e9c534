"""Normalization in ``torch.ops.monet``: forward from saved statistics, backward from the output.

Tensors are as ``definitions`` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monetrun.ops.definitions import arithmetic, is_images, like_first, operator, same_layout


def _bound(value: float) -> float | None:
    return None if math.isnan(value) else value


@operator(
    "batch_norm_act(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, Tensor? residual, float low,"
    " float high) -> Tensor",
    like_first,
)
def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None,
    low: float,
    high: float,
) -> Tensor:
    """clamp(batch_norm(x) + residual, low, high) in one pass, from the statistics that training saved.

    ``x`` is [N, C, ...]; a bound of NaN is none (relu: 0 and NaN). Rounded to the dtype of ``x`` after the
    normalization and after the addition, as the separate operators do. See ``batch_norm_act_is_exact``.
    """
    dtype = arithmetic(x.dtype)
    scale = invstd.to(dtype) if weight is None else invstd.to(dtype) * weight.to(dtype)
    shift = -mean.to(dtype) * scale if bias is None else bias.to(dtype) - mean.to(dtype) * scale
    by_channel = (-1,) + (1,) * (x.dim() - 2)
    y = (x.to(dtype) * scale.view(by_channel) + shift.view(by_channel)).to(x.dtype)
    if residual is not None:
        same_layout(x, residual)
        y = y + residual
    if not (math.isnan(low) and math.isnan(high)):
        y = torch.clamp(y, _bound(low), _bound(high))
    return y


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
    # Seen as `shape`, [N, G, D, L]: a statistic is over the dimensions `over`, parameters are [G * D], their gradients
    # of `parameter_shape`. Sums are in float64.
    dtype = arithmetic(result.dtype)
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

    ``grad`` and ``result`` are contiguous; of the gradients of input, weight and bias those that ``output_mask`` leaves
    out are empty. Within rounding of ATen's where ``affine_invertible`` holds, wrong without bound where it does not.
    """
    if not (grad.is_contiguous() and result.is_contiguous()):
        raise RuntimeError("grad and result must be contiguous")
    same_layout(grad, result)
    length = math.prod(normalized_shape)
    shape = (result.numel() // max(1, length), 1, length, 1)
    return _output_backward(grad, result, shape, (1, 2, 3), normalized_shape, rstd, weight, bias, output_mask)


@operator(
    "channel_norm_output_backward(Tensor grad, Tensor result, Tensor rstd, Tensor? weight, Tensor? bias,"
    " bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    lambda grad, result, *rest: _fake_gradients(grad, result, result.shape[1:2], *rest),
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

    ``grad`` and ``result`` are [N, C, ...], both contiguous or both channels-last. ``rstd`` tells which: [N, groups] of
    a group norm, [C] of a batch norm. Otherwise as ``layer_norm_output_backward``.
    """
    if result.dim() < 2 or not is_images(result):
        raise RuntimeError("grad and result must be [N, C, ...], contiguous or channels-last")
    same_layout(grad, result)
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
    """Whether ``x * weight + bias`` tells ``x``: each ``abs(bias) <= limit * abs(weight)``, no weight 0 or not finite.

    The rounding of the output, relative to it, is larger by up to ``1 + limit`` relative to what is recovered.
    """
    given = bias if weight is None else weight
    if given is None:
        raise RuntimeError("there is neither weight nor bias")
    dtype = arithmetic(given.dtype)
    size = torch.ones_like(given, dtype=dtype) if weight is None else weight.to(dtype).abs()
    offset = torch.zeros_like(size) if bias is None else bias.to(dtype).abs()
    # room for the digits of what is multiplied by it, on both sides
    least = torch.finfo(dtype).tiny / torch.finfo(dtype).eps
    return ((size >= least) & (size <= 1 / least) & (offset <= limit * size)).all()
