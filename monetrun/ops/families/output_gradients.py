"""A gradient that comes from outside, added to one that the graph computes, unless there is none.

Where nothing that the script computes from an output reaches its loss (a language model's logits beside its loss),
eager has no gradient of that output: nothing is allocated and nothing is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monetrun.ops.definition import operator


def _sum(gradient: Tensor, outer: Tensor | None, outer_first: bool, in_place: bool) -> Tensor:
    if outer is None:
        return gradient.clone()
    outer = outer.reshape(gradient.shape)
    return torch.add(outer, gradient) if outer_first else torch.add(gradient, outer)


@operator("add_output_gradient(Tensor gradient, Tensor? outer, bool outer_first, bool in_place) -> Tensor", _sum)
def add_output_gradient(gradient: Tensor, outer: Tensor | None, outer_first: bool, in_place: bool) -> Tensor:
    """``gradient + outer``; ``outer`` may have another shape of as many elements, and None is zero.

    ``outer_first``: eager adds ``gradient`` to ``outer``, so that the result has the strides with which that arrives.
    ``in_place``: ``add_output_gradient_`` is to run.
    """
    return _sum(gradient, outer, outer_first, in_place)


def add_output_gradient_(gradient: Tensor, outer: Tensor | None, outer_first: bool) -> Tensor:
    """The same, written over ``gradient`` where that has the strides of the result."""
    if outer is None:
        return gradient
    outer = outer.reshape(gradient.shape)
    if outer_first and outer.stride() != gradient.stride():
        return torch.add(outer, gradient)
    return gradient.add_(outer)


OPERATOR = torch.ops.monet.add_output_gradient.default
