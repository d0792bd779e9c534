"""How an operator of ``torch.ops.monet`` is defined: its schema, reference, fake and cost, in one place::

    @operator("mask_scale(Tensor x, Tensor mask, float scale) -> Tensor", like_first)
    def mask_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ...

The decorated function is the *reference*: plain ATen, which runs wherever there is no native kernel (see ``kernels``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cost:
    """What the roofline model counts for a call (see ``capture.roofline``): bytes moved, and flops.

    Attributes:
        reads: how many times the operands' bytes are moved.
        writes: how many times the results' bytes are moved. A result that is copied once more counts two more: a read
            and a write.
        like: an ATen overload that takes the same first arguments and has the same flops, and that reads the same
            operands. None: no flops, and every operand is read.
    """

    reads: int = 1
    writes: int = 1
    like: Any = None


REFERENCES: dict[str, Callable[..., Any]] = {}
_COSTS: dict[str, Cost] = {}
_library = torch.library.Library("monet", "FRAGMENT")


def operator(
    schema: str, fake: Callable[..., Any], *, cost: Cost | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define the operator ``schema`` of ``torch.ops.monet`` by the decorated reference.

    Args:
        schema: as in ``torch.library``, without namespace.
        fake: takes the same arguments and gives results of the right shape, strides and dtype.
        cost: by default each operand is read once and each result written once.
    """
    name = schema.partition("(")[0]

    def define(reference: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, reference, "CompositeExplicitAutograd")
        _library.impl(name, fake, "Meta")
        REFERENCES[name] = reference
        if cost is not None:
            _COSTS[f"monet::{name}"] = cost
        return reference

    return define


def kernel(name: str, dispatch_key: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the kernel of an operator for one device ("CUDA"); most are native instead."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _library.impl(name, function, dispatch_key)
        return function

    return register


def register_autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., Any]) -> None:
    """Make an operator differentiable, as ``torch.library.register_autograd``."""
    torch.library.register_autograd(f"monet::{name}", backward, setup_context=setup_context, lib=_library)


def cost_of(target: Any) -> Cost:
    """The cost declared for an overload; the default for an operator of another library."""
    schema = getattr(target, "_schema", None)
    return _COSTS.get(getattr(schema, "name", ""), Cost())


def like_first(first: Tensor, *_: Any) -> Tensor:
    """Fake of an operator whose result has the first argument's shape, strides and dtype."""
    return torch.empty_like(first)


def overwritten_first(first: Tensor, *_: Any) -> Tensor:
    """Fake of an operator that writes over its first argument and returns it."""
    return first


def arithmetic_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ATen computes on values of ``dtype`` (its "opmath" type)."""
    return torch.float64 if dtype == torch.float64 else torch.float32
