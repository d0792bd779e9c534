"""The numbers among the inputs of a joint graph whose sizes are left open: which of them decide what it computes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Form:
    """A number that does not follow from those among the inputs: of the form of a tensor there.

    Attributes:
        place: of the tensor.
        read: gives the number of a tensor.
    """

    place: int
    read: Callable[[torch.Tensor], Any]


def is_open(value: Any) -> bool:
    """Whether a value is a number that is left open."""
    return isinstance(value, _NUMBERS)


def only_in_forms(values: Sequence[Any]) -> list[Form]:
    """The numbers of tensors' forms that do not follow from the inputs that are numbers.

    A stride may be one, and so may the bytes of a storage of which the tensor is a part.
    """
    known = {value.node.expr for value in values if is_open(value)}
    found = []
    for place, value in enumerate(values):
        for read in _form_readers(value.dim()) if isinstance(value, torch.Tensor) else ():
            number = read(value)
            if is_open(number) and not number.node.expr.free_symbols <= known:
                known.add(number.node.expr)
                found.append(Form(place, read))
    return found


def _form_readers(dimensions: int) -> list[Callable[[torch.Tensor], Any]]:
    of_dimensions = (operator.methodcaller(kind, d) for kind in ("size", "stride") for d in range(dimensions))
    return [*of_dimensions, torch.Tensor.storage_offset, lambda tensor: tensor.untyped_storage().nbytes()]


def deciding_symbols(module: fx.GraphModule) -> set[Any]:
    """The symbols that a tensor's form has, or that an operator reads: of other values the graph is the same.

    A counter of calls that a module keeps is none of them, where it is only counted.
    """
    found: set[Any] = set()
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if node.op in ("output", "get_attr") or is_open(val):
            continue
        for one in val if isinstance(val, (tuple, list)) else [val]:
            if isinstance(one, torch.Tensor):
                found |= _symbols(*one.shape, *one.stride(), one.storage_offset(), one.untyped_storage().nbytes())
        if val is not None:  # else it checks numbers
            found |= _symbols(*(source.meta.get("val") for source in node.all_input_nodes))
    return found


def _symbols(*values: Any) -> set[Any]:
    return {symbol for value in values if is_open(value) for symbol in value.node.expr.free_symbols}


class NumberOutputs:
    """The numbers among a forward's outputs: they are computed from those that it is given.

    Args:
        inputs: the traced values of the joint graph's inputs.
        outputs: the forward's.

    Attributes:
        others: the symbols of those that are not, since they depend on a tensor's form.
    """

    def __init__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._symbols = {value.node.expr: k for k, value in enumerate(inputs) if is_open(value)}
        values = [(k, n.meta.get("val")) for k, n in enumerate(outputs) if isinstance(n, fx.Node)]
        numbers: list[tuple[int, Any]] = [(k, value) for k, value in values if is_open(value)]
        self._outputs = [(k, v) for k, v in numbers if v.node.expr.free_symbols <= self._symbols.keys()]
        known = {k for k, _ in self._outputs}
        self.others = _symbols(*(value for k, value in numbers if k not in known))

    def of(self, arguments: Sequence[Any]) -> list[tuple[int, Any]]:
        """The positions and numbers of a call with these inputs."""
        if not self._outputs:
            return []
        known = {symbol: arguments[k] for symbol, k in self._symbols.items()}
        return [(k, number_of(value, known)) for k, value in self._outputs]


def number_of(value: Any, known: Mapping[Any, Any]) -> Any:
    """What a symbolic number is where these values of symbols are known.

    Raises:
        TypeError: it does not follow from them.
    """
    kind = int if isinstance(value, torch.SymInt) else bool if isinstance(value, torch.SymBool) else float
    return kind(value.node.expr.xreplace(known))
