"""Backward of a normalization from its output, so that the input need not be kept.

What follows a normalization often keeps its output anyway (a linear layer's weight gradient reads it), or can run again
from it, so that one tensor is kept where eager keeps two. ``normal = (output - bias) / weight`` recovers what the
backward needs of the input, with an error that grows with ``abs(bias / weight)``: a guard asks for that ratio (see
``guards``). In reduced precision the output's rounding alone is too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops.definitions import is_images
from monetrun.ops.registry import (
    Alternative,
    Call,
    Joint,
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
# to twice that, at 64 six times (CPU, float32, rows of 7 to 768): the weights may drift to 16 before anyone looks.
LIMIT = 8.0
# Statistics over images average more, so that the output's rounding shows earlier: up to 1.8 times at 2, twice that of
# eager at 4, four times at 8 (CPU, float32, 1000 to 100,000 elements).
LIMIT_OF_CHANNELS = 2.0

# Where only these read the output of a batch norm, it is not offered, so that networks of convolutions, batch norms and
# ReLUs have eager's bits: ReLUs and sums run again from the batch norm's input in one pass and to the bit (see
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


def _guard(weight: Any, bias: Any, limit: float) -> Call | None:
    if weight is None and bias is None:
        return None
    return Call(monet.affine_invertible.default, (weight, bias, limit))


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
    if any(v is None or not v.is_contiguous() for v in values) or not wide(grad, result, weight, bias):
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


def _of_channels(name: str, grad: Any, x: Any, norm: fx.Node, rstd: Any, mask: Any) -> Iterator[Alternative]:
    weight, bias = norm.args[1:3]
    result = element(norm, 0)
    value = value_of(result)
    if value is None or not _alike(result, grad, x) or not wide(grad, result, rstd, weight, bias):
        return
    if not is_images(value):
        return
    call = Call(monet.channel_norm_output_backward.default, (grad, result, rstd, weight, bias, mask))
    yield Alternative(name, call, exact=False, guard=_guard(weight, bias, LIMIT_OF_CHANNELS))
