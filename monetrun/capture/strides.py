"""Tensors with other strides: copied where gradients arrived with strides that were not traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
"""What a reshape becomes where the traced strides have a view."""

_FORM_BOUND = frozenset(str(p) for p in (torch.ops.aten.as_strided, torch.ops.aten.as_strided_scatter))


def is_form_bound(node: fx.Node) -> bool:
    """Whether a call is bound to its argument's strides."""
    return str(getattr(node.target, "overloadpacket", "")) in _FORM_BOUND


def is_foreign(target: Any) -> bool:
    """Whether a call is of no operator of torch's or ours: it may depend on its arguments' strides.

    A formula that gives such an operator ``gradient.contiguous()`` is traced without that, where the traced gradient is
    contiguous.
    """
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in ("aten", "prims", "monet")
    return isinstance(target, torch._ops.HigherOrderOperator)


def needs_traced_strides(node: fx.Node, target: Any) -> bool:
    """Whether a call of ``target``, in the place of ``node``, reads gradients with the strides that were traced."""
    # a convolution of a gradient takes the place of a convolution_backward (see ``ops.families.convolution``), whose
    # result's strides follow the convolution's input and weight
    of_torch = is_form_bound(node) or target is torch.ops.aten.convolution.default
    return of_torch or is_foreign(target) or str(target).startswith("monet.")


def with_strides(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """``value`` with these strides; it is copied if they put its elements into another order."""
    if alike(value.shape, value.stride(), strides):
        # those of dimensions of one element count, too (see ``is_dense``)
        same = value.stride() == tuple(strides)
        return value if same else value.as_strided(value.shape, strides)
    return value.new_empty_strided(value.shape, strides).copy_(value)


def with_strides_of(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``value`` with the strides of what an elementwise operator makes of ``other``; copied if its own are others."""
    strides = torch.empty_like(other, device="meta").stride()
    return value if alike(value.shape, value.stride(), strides) else with_strides(value, strides)


def alike(shape: Sequence[int], strides: Sequence[int], others: Sequence[int]) -> bool:
    """Whether strides differ only where there is one element."""
    return all(a == b or n == 1 for n, a, b in zip(shape, strides, others, strict=True)) or 0 in shape


def is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether these are the strides of dimensions that lie in memory in this order, without gaps.

    Those of dimensions of one element count, too: by them a convolution or a batch norm of an image of one pixel takes
    the kernel for channels-last format.
    """
    return list(strides) == dense(shape, order)


def dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """The strides of a tensor whose dimensions lie in memory in this order, the last one innermost, without gaps."""
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for d in reversed(order):
        strides[d] = step
        step = step * shape[d]
    return strides
