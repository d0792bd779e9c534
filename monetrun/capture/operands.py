"""Makes up the operands of a captured call, so that it can run alone: tensors of the captured shapes, strides, dtypes.

What an operator does can depend on its indices: if all rows of an embedding's gradient are added to the same row, they
wait for each other. So where asked for, indices are valid and spread over their range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from monetrun.capture.integer_operands import Fill, fills, index_bounds
from monetrun.ops.registry import Call


def empty_like(value: torch.Tensor) -> torch.Tensor:
    """A new tensor of the shape, strides, dtype and device of ``value``."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


New = Callable[[torch.Tensor], torch.Tensor]


def make(
    call: Call,
    *,
    made: dict[fx.Node, Any] | None = None,
    random: bool = False,
    spread_indices: bool = False,
    new: New = empty_like,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``call``, with a made-up tensor for each node.

    Floating-point and complex numbers are 0.5. Integers are zero, or what ``integer_operands.fills`` says: whether an
    operator may run with these, ``integer_operands.may_be_made_up`` says.

    Args:
        call: with fake tensors in its nodes.
        made: what was made so far, by node; new operands are added. Two calls that share it have the same operands.
        random: floating-point and complex numbers are normally distributed, booleans true or false alike, and what an
            optional operator gives is computed from its operands: for comparing two calls.
        spread_indices: operands that are indices are spread over their range (see ``index_bounds``).
        new: gives a tensor of a fake one's form.
    """
    bounds = index_bounds(call) if spread_indices else {}
    maker = _Maker({} if made is None else made, bounds, fills(call), random, new)
    return fx.map_arg((call.args, call.kwargs), maker.operand)  # type: ignore[return-value]


class _Maker:
    """Makes the operands of one call.

    Not a function with functions in it: they would refer to each other, and so keep the tensors after the call.
    """

    def __init__(
        self,
        made: dict[fx.Node, Any],
        bounds: Mapping[fx.Node, int],
        fills: Mapping[fx.Node, Fill],
        random: bool,
        new: New,
    ) -> None:
        self.made = made
        self.bounds = bounds
        self.fills = fills
        self.random = random
        self.new = new

    def operand(self, node: fx.Node) -> Any:
        if node not in self.made:
            self.made[node] = self._value(node)
        return self.made[node]

    def _value(self, node: fx.Node) -> Any:
        if self.random and "monetrun_optional" in node.meta:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), self.operand)
            return node.target(*arguments, **keywords)  # type: ignore[operator]
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            return type(value)(self._tensor(v) if isinstance(v, torch.Tensor) else v for v in value)
        if not isinstance(value, torch.Tensor):
            return value
        tensor = self._tensor(value)
        if node in self.fills:
            self.fills[node](tensor)
        elif node in self.bounds:
            spread(tensor, self.bounds[node])
        return tensor

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        tensor = self.new(value)
        whole = tensor.as_strided((span(value),), (1,)) if tensor.numel() else tensor
        if value.dtype.is_floating_point or value.dtype.is_complex:
            whole.normal_() if self.random else whole.fill_(0.5)
        elif value.dtype == torch.bool and self.random:
            whole.bernoulli_(0.5)
        else:
            whole.zero_()
        return tensor


class Arena:
    """One block of memory, from which tensors are taken one after the other.

    Many operands of changing sizes would leave the caching allocator with many blocks that fit nothing else.

    Args:
        nbytes: of the block.
        device: that it is on.
    """

    _ALIGNMENT_BYTES = 512  # as the caching allocator's

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._used = 0

    def clear(self) -> None:
        """Begin at its start again; tensors that were taken are overwritten."""
        self._used = 0

    def new(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the form of ``value``.

        Raises:
            MemoryError: the block has no room for it.
        """
        nbytes = span(value) * value.element_size() if value.numel() else 0
        if self._used + nbytes > self._block.numel():
            raise MemoryError(f"the arena has {self._block.numel() - self._used} bytes left, not {nbytes}")
        part = self._block[self._used : self._used + nbytes].view(value.dtype)
        self._used += -(-nbytes // self._ALIGNMENT_BYTES) * self._ALIGNMENT_BYTES
        return part.as_strided(value.shape, value.stride())


def span(value: torch.Tensor) -> int:
    """How many elements lie between the first and the last in memory, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


# ---- indices


def spread(tensor: torch.Tensor, bound: int) -> None:
    """Fill with integers of ``range(bound)``, far from their neighbours, none twice before each was used once."""
    whole = tensor.as_strided((span(tensor),), (1,)) if tensor.numel() else tensor
    step = max(1, round(bound * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, bound) != 1:
        step += 1
    whole.copy_(torch.arange(whole.numel(), device=tensor.device).mul_(step).remainder_(bound))
