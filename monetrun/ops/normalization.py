"""What follows a BatchNorm, recomputed from the BatchNorm's input and its saved statistics in one pass.

Without it, running ReLU(BatchNorm(x) + y) again costs the statistics' passes over x, one for the affine part, one for
the sum, one for the ReLU. Mean and inverse deviation are kept anyway, for the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops import kernels
from monetrun.ops.registry import (
    Alternative,
    Call,
    Joint,
    alike,
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


def _batch_norm(node: Any) -> fx.Node | None:
    """The training BatchNorm whose output ``node`` is."""
    norm = call_of(node, aten._native_batch_norm_legit_functional.default, 0)
    return norm if norm is not None and norm.args[5] is True else None


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
    if mean is None or invstd is None or value is None or not alike(node, x):
        return
    with real_tensors():
        exact = kernels.batch_norm_act_is_exact(value.dtype, not value.is_contiguous())
    call = Call(monet.batch_norm_act.default, (x, weight, bias, mean, invstd, residual, low, high))
    yield Alternative("fused:batch-norm", call, exact=exact)
