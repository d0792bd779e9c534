"""Backward of a layer norm from its output, so that the input need not be kept.

What follows a normalization keeps its output anyway (a linear layer's weight gradient reads it), so that a transformer
keeps one tensor where eager keeps two. ``normal = (output - bias) / weight`` recovers what the backward needs of the
input, with an error that grows with ``abs(bias / weight)``: a guard asks for that ratio (see ``guards``). In reduced
precision the output's rounding alone is too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

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
)

aten = torch.ops.aten
monet = torch.ops.monet

# At a ratio of abs(bias / weight) of 8 the gradients' error against float64 is up to 1.5 times eager's own, at 16 up
# to twice that, at 64 six times (CPU, float32, rows of 7 to 768): the weights may drift to 16 before anyone looks.
LIMIT = 8.0


def _guard(weight: Any, bias: Any) -> Call | None:
    if weight is None and bias is None:
        return None
    return Call(monet.affine_invertible.default, (weight, bias, LIMIT))


@implementation(aten.native_layer_norm_backward.default)
def _layer_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    names = ("grad_out", "input", "normalized_shape", "rstd", "weight", "bias", "output_mask")
    grad, x, shape, rstd, weight, bias, mask = (argument(node, name) for name in names)
    norm = call_of(rstd, aten.native_layer_norm.default, 2)
    if norm is None:
        return
    result = element(norm, 0)
    same = source(norm.args[0]) is source(x) and norm.args[1:4] == (shape, weight, bias)
    values = [value_of(n) for n in (grad, result, x)]
    if not same or any(v is None or not v.is_contiguous() for v in values):
        return
    dtypes = {v.dtype for n in (grad, result, weight, bias) if (v := value_of(n)) is not None}
    if dtypes not in ({torch.float32}, {torch.float64}):
        return
    call = Call(monet.layer_norm_output_backward.default, (grad, result, shape, rstd, weight, bias, mask))
    yield Alternative("output:layer-norm", call, exact=False, guard=_guard(weight, bias))
