"""BatchNorm with the sum and activation that follow it, recomputed in one pass from its input and saved statistics.

Otherwise, recomputing ReLU(BatchNorm(x) + y) takes the passes over x for its statistics, one for the affine part, one
for the sum and one for the ReLU. Mean and inverse deviation are saved for the backward pass anyway.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops import device_errors, kernels
from monetrun.ops.definition import arithmetic_dtype, like_first, operator
from monetrun.ops.families import cudnn_batch_norm as _cudnn_batch_norm  # noqa: F401  (defines the operator)
from monetrun.ops.memory_format import check_same_layout, memory_format
from monetrun.ops.registry import (
    Alternative,
    Call,
    Joint,
    alike,
    are_contiguous,
    argument,
    call_of,
    element,
    implementation,
    real_tensors,
    source,
    value_of,
)

aten = torch.ops.aten
monet = torch.ops.monet

CPU = torch.device("cpu")

_log = logging.getLogger("monetrun")


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

    ``x`` is [N, C, ...]; NaN is no bound (relu: 0 and NaN). Rounded to the dtype of ``x`` after the normalization and
    after the addition, as the separate operators do. Whether it is bitwise identical to them:
    ``batch_norm_act_is_exact``.
    """
    dtype = arithmetic_dtype(x.dtype)
    scale = invstd.to(dtype) if weight is None else invstd.to(dtype) * weight.to(dtype)
    shift = -mean.to(dtype) * scale if bias is None else bias.to(dtype) - mean.to(dtype) * scale
    by_channel = (-1,) + (1,) * (x.dim() - 2)
    y = (x.to(dtype) * scale.view(by_channel) + shift.view(by_channel)).to(x.dtype)
    if residual is not None:
        check_same_layout(x, residual)
        y = y + residual
    if not (math.isnan(low) and math.isnan(high)):
        y = torch.clamp(y, _bound(low), _bound(high))
    return y


@functools.cache
def batch_norm_act_is_exact(
    dtype: torch.dtype,
    channels_last: bool,
    device: torch.device = CPU,
    dimensions: int = 4,
    by_cudnn: bool = False,
    parameters: torch.dtype | None = None,
) -> bool:
    """Whether ``batch_norm_act`` is bitwise identical to torch's batch norm in training, followed by add and relu.

    That depends on torch's version and on the instructions that its dispatch picked, so both run here, on ``device``,
    on the same numbers. Their mean is large against their spread, so that one rounding more or less also shows in the 8
    bits of bfloat16. Where the device is not there or refuses the trial it is False.

    Args:
        dtype: of ``x``.
        channels_last: the memory format of ``x``; else it is contiguous.
        device: of ``x``.
        dimensions: of ``x``.
        by_cudnn: compare with cuDNN's batch norm, not with ATen's.
        parameters: the dtype of weight and bias; None: float32, or float64 for such an ``x``.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return False
    kernels.load(device.type)
    try:
        with torch.no_grad():
            return _agrees_with_torch(dtype, channels_last, device, dimensions, by_cudnn, parameters)
    except RuntimeError as error:
        if device.type == "cpu" or device_errors.is_sticky(error, lambda: torch.cuda.synchronize(device)):
            raise
        _log.debug("batch_norm_act cannot be tried on %s (%s): not called exact", device, error)
        return False


def _agrees_with_torch(
    dtype: torch.dtype,
    channels_last: bool,
    device: torch.device,
    dimensions: int,
    by_cudnn: bool,
    parameters: torch.dtype | None,
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, *shape: int, mean: float = 0) -> Tensor:
        return (torch.randn(shape, generator=generator, device="cpu") * 3 + mean).to(device, dtype)

    form = memory_format(dimensions, channels_last)
    parameters = parameters or (torch.float64 if dtype == torch.float64 else torch.float32)
    sizes, small = (17, 19, 5)[: dimensions - 2], (3, 3, 3)[: dimensions - 2]
    # of parameters in 16 bits one channel in a hundred may round otherwise
    for channels, shape in ((3, sizes), (40, sizes), (4096, small)):
        x = draw(dtype, 4, channels, *shape, mean=60).contiguous(memory_format=form)
        weight, bias = draw(parameters, channels), draw(parameters, channels)
        if by_cudnn:
            y, mean, invstd, _ = monet.cudnn_batch_norm_again(x, weight, bias, 1e-5, 0)
        else:
            y, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        residual = torch.empty_like(x).copy_(draw(dtype, *x.shape))
        for *bounds, expected in ((None, math.nan, math.nan, y), (residual, 0.0, math.nan, torch.relu(y + residual))):
            if not torch.equal(monet.batch_norm_act(x, weight, bias, mean, invstd, *bounds), expected):
                return False
    return True


def _dtype_of(weight: Any) -> torch.dtype | None:
    return weight.meta["val"].dtype if isinstance(weight, fx.Node) else None


def _batch_norm(node: Any) -> fx.Node | None:
    """The training BatchNorm whose output ``node`` is."""
    norm = call_of(node, aten._native_batch_norm_legit_functional.default, 0)
    if norm is not None and norm.args[5] is True:
        return norm
    return call_of(node, monet.cudnn_batch_norm.default, 0)


@implementation(aten.relu.default, aten.hardtanh.default)
def _activation(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    low, high = 0.0, math.nan
    if node.target is aten.hardtanh.default:
        low, high = float(argument(node, "min_val")), float(argument(node, "max_val"))
    before: Any = source(node.args[0])
    norm = _batch_norm(before)
    if norm is not None:
        yield from _fused(node, norm, None, low, high)
    elif isinstance(before, fx.Node) and before.target is aten.add.Tensor and before.kwargs.get("alpha", 1) == 1:
        for one, other in (before.args, before.args[::-1]):
            norm = _batch_norm(one)
            if norm is not None and alike(node, other):
                yield from _fused(node, norm, other, low, high)


@implementation(aten.add.Tensor)
def _sum(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if node.kwargs.get("alpha", 1) != 1:
        return
    for one, other in (node.args, node.args[::-1]):
        norm = _batch_norm(one)
        if norm is not None and alike(node, other):
            yield from _fused(node, norm, other, math.nan, math.nan)


def _fused(node: fx.Node, norm: fx.Node, residual: Any, low: float, high: float) -> Iterator[Alternative]:
    x, weight, bias = norm.args[:3]
    mean, invstd = element(norm, 1), element(norm, 2)
    value = value_of(x)
    if mean is None or invstd is None or value is None or not alike(node, x) or not are_contiguous(weight, bias):
        return
    by_cudnn = norm.target is monet.cudnn_batch_norm.default
    with real_tensors():
        exact = batch_norm_act_is_exact(
            value.dtype, not value.is_contiguous(), value.device, max(3, value.dim()), by_cudnn, _dtype_of(weight)
        )
    call = Call(monet.batch_norm_act.default, (x, weight, bias, mean, invstd, residual, low, high))
    yield Alternative("fused:batch-norm", call, exact=exact)
