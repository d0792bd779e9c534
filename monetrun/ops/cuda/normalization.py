"""Normalizations: again from saved statistics, and backward from the output."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monetrun.ops.cuda.launch import WARP, launch
from monetrun.ops.cuda.operands import aligned, check_same_layout, is_channels_last, packs, parameters
from monetrun.ops.definition import arithmetic_dtype

# Rows are summed up in at most _ROW_PARTS parts of at least _ROWS_PER_PART rows: runs are identical, on any device.
_ROW_PARTS, _ROWS_PER_PART = 128, 64
_STRETCH = 4096  # pixels of a channel that one warp sums up

Gradients = tuple[Tensor, Tensor, Tensor]


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
    """As ``families.normalization.batch_norm_act``."""
    if x.dim() < 2:
        raise RuntimeError(f"expected [N, C, ...], got {x.dim()} dimensions")
    contiguous = x.is_contiguous()
    if not contiguous and not is_channels_last(x):
        raise RuntimeError("x is neither contiguous nor channels-last")
    if residual is not None:
        check_same_layout(x, residual, "x and residual")
    to = torch.empty_like(x)
    count, channels = x.numel(), x.shape[1]
    weights, biases = parameters(weight, x, channels, "weight"), parameters(bias, x, channels, "bias")
    means, scales = parameters(mean, x, channels, "mean"), parameters(invstd, x, channels, "invstd")
    if count:
        inner = count // (x.shape[0] * channels) if contiguous else 1
        whole = aligned(x, to, residual)
        vectors = (*weights, *biases, *means, *scales)
        launch("batch_norm_act", x, packs(count), x, residual, to, *vectors, low, high, count, inner, channels, whole)
    return to


def _parts(rows: int) -> int:
    return min(max(rows // _ROWS_PER_PART, 1), _ROW_PARTS)


def _of_parameters(
    result: Tensor,
    sums: Tensor,
    of_weight: Tensor,
    of_bias: Tensor,
    weight: tuple[Tensor | None, bool],
    length: int,
    parts: int,
) -> None:
    """The gradients of weight and bias, those that have elements, from the sums of all parts."""
    to = [t if t.numel() else None for t in (of_weight, of_bias)]
    if any(t is not None for t in to):
        launch("parameters_from_sums", result, length * WARP, sums, *to, *weight, length, parts)


def layer_norm_output_backward(
    grad: Tensor,
    result: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Gradients:
    """As ``families.normalization_output.layer_norm_output_backward``."""
    if not (grad.is_contiguous() and result.is_contiguous()):
        raise RuntimeError("grad and result must be contiguous")
    check_same_layout(grad, result, "grad and result")
    of_input = result.new_empty(result.shape if output_mask[0] else (0,))
    of_weight, of_bias = (result.new_empty(normalized_shape if wanted else (0,)) for wanted in output_mask[1:])
    length = math.prod(normalized_shape)
    rows = result.numel() // length if length else 0
    weights, biases = parameters(weight, result, length, "weight"), parameters(bias, result, length, "bias")
    if output_mask[0]:
        scales = parameters(rstd, result, rows, "rstd")
        vectors = (*weights, *biases, *scales)
        launch("layer_norm_input", result, rows * WARP, grad, result, of_input, *vectors, rows, length)
    if output_mask[1] or output_mask[2]:
        parts = _parts(rows)
        sums = result.new_empty((2 * parts * length,), dtype=arithmetic_dtype(result.dtype))
        launch("sums_of_parts", result, parts * length, grad, result, sums, *biases, 1, rows, length, parts)
        _of_parameters(result, sums, of_weight, of_bias, weights, length, parts)
    return of_input, of_weight, of_bias


def channel_norm_output_backward(
    grad: Tensor,
    result: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Gradients:
    """As ``families.normalization_output.channel_norm_output_backward``."""
    last = not result.is_contiguous()
    if result.dim() < 2 or (last and not is_channels_last(result)):
        raise RuntimeError("grad and result must be [N, C, ...], contiguous or channels-last")
    check_same_layout(grad, result, "grad and result")
    images, channels = result.shape[:2]
    of_batch = rstd.dim() == 1
    groups = channels if of_batch else rstd.shape[-1]
    if rstd.shape not in ((channels,), (images, groups)) or groups == 0 or channels % groups:
        raise RuntimeError(f"rstd must be [{channels}], or [{images}, groups]")
    of_input = torch.empty_like(result) if output_mask[0] else result.new_empty((0,))
    of_weight, of_bias = (result.new_empty((channels,) if wanted else (0,)) for wanted in output_mask[1:])
    # A unit is what parameters are summed over beside its own elements: an image of a group norm, the batch of a batch
    # norm. A statistic is over `depth` channels of the images of its unit.
    units, of_unit, depth = (1, images, 1) if of_batch else (images, 1, channels // groups)
    pixels = result.numel() // (images * channels) if result.numel() else 0
    statistics, rows = units * groups, of_unit * pixels
    weights, biases = parameters(weight, result, channels, "weight"), parameters(bias, result, channels, "bias")
    scales = parameters(rstd, result, statistics, "rstd")

    stretches = max(1, -(-pixels // _STRETCH))
    parts = _parts(rows) if last else of_unit * stretches
    sums = result.new_empty((units * parts * 2 * channels,), dtype=arithmetic_dtype(result.dtype))
    if last:
        sizes = (units, rows, channels, parts)
        launch("sums_of_parts", result, units * parts * channels, grad, result, sums, *biases, *sizes)
    else:
        threads = images * channels * stretches * WARP
        sizes = (images * channels, pixels, stretches, channels)
        launch("sums_of_stretches", result, threads, grad, result, sums, *biases, *sizes)
    _of_parameters(result, sums, of_weight, of_bias, weights, channels, units * parts)
    if not output_mask[0] or result.numel() == 0:
        return of_input, of_weight, of_bias
    means, slopes = sums.new_empty((2, statistics)).unbind()
    scaled = (*weights, *scales, units, groups, depth, rows * depth, parts)
    launch("statistics_from_sums", result, statistics * WARP, sums, means, slopes, *scaled)
    read = (grad, result, of_input, means, slopes, *weights, *biases, *scales)
    inner, whole = 1 if last else pixels, aligned(grad, result, of_input)
    count, of_each_unit = result.numel(), rows * channels
    launch(
        "channel_norm_input", result, packs(count), *read, count, inner, channels, of_each_unit, groups, depth, whole
    )
    return of_input, of_weight, of_bias


def affine_invertible(weight: Tensor | None, bias: Tensor | None, limit: float) -> Tensor:
    """As ``families.normalization_output.affine_invertible``."""
    given = bias if weight is None else weight
    if given is None:
        raise RuntimeError("there is neither weight nor bias")
    count, to = given.numel(), given.new_empty((), dtype=torch.bool)
    vectors = (*parameters(weight, given, count, "weight"), *parameters(bias, given, count, "bias"))
    # far enough from underflow and overflow that products with it keep all their digits
    wide = torch.finfo(arithmetic_dtype(given.dtype))
    launch("affine_invertible", given, WARP, *vectors, wide.tiny / wide.eps, limit, count, to)
    return to
