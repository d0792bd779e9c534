"""A gradient that comes from outside, added to one that the graph computes, unless there is none.

Where nothing that the script computes from an output reaches its loss (a language model's logits beside its loss),
eager has no gradient of that output: nothing is allocated and nothing is added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monetrun.ops.definition import operator


def _fake(gradient: Tensor, outer: Tensor | None, stride: Sequence[int] = ()) -> Tensor:
    if not stride:
        return torch.empty_like(gradient)
    if outer is not None and outer.shape == gradient.shape and tuple(stride) != gradient.stride():
        outer_stride = torch.empty_like(outer, device="meta").stride()
        stride = outer_stride if outer_stride == outer.stride() else stride
    return torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device)


@operator("add_output_gradient(Tensor gradient, Tensor? outer, int[] stride=[]) -> Tensor", _fake)
def add_output_gradient(gradient: Tensor, outer: Tensor | None, stride: Sequence[int] = ()) -> Tensor:
    """``gradient + outer``; ``outer`` may have another shape of as many elements, and None is zero.

    ``stride``: of the result, as traced; empty: those of ``gradient``. Where they are not those of ``gradient``,
    autograd would add ``gradient`` to ``outer``: the result has the strides with which that arrives, if it is dense.
    """
    result = _fake(gradient, outer, stride)
    if outer is None:
        return result.copy_(gradient)
    return torch.add(gradient, outer.reshape(gradient.shape), out=result)


def add_output_gradient_(gradient: Tensor, outer: Tensor | None) -> Tensor:
    """The same, written over ``gradient``."""
    return gradient if outer is None else gradient.add_(outer.reshape(gradient.shape))


OPERATOR = torch.ops.monet.add_output_gradient.default
