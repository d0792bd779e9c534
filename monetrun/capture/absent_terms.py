"""Backward modules for calls in which gradients of some outputs are absent: what eager would not compute is left out.

Where nothing that the script differentiates was computed from an output, eager has no gradient of it, and none of what
follows from that alone: sums have one term less. Zeros in their place would give sums the strides of the zeros, so that
what is summed later would differ by rounding, and take memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.generated import graph_module
from monetrun.capture.gradient_terms import shaped
from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.strides import VIEWS, alike, needs_traced_strides, with_strides
from monetrun.ops.families.output_gradients import OPERATOR, add_output_gradient_

aten = torch.ops.aten

_OUTPUT_SUMS = (OPERATOR, add_output_gradient_)
_SUMS = (aten.add.Tensor, aten.add_.Tensor, *_OUTPUT_SUMS)


def is_sum_of_two(node: fx.Node) -> bool:
    """Whether a call adds two tensors and does nothing else: without one of them it is the other."""
    return node.target in _SUMS and len(node.all_input_nodes) == 2 and not node.kwargs


def without(module: fx.GraphModule, absent: Collection[int]) -> tuple[fx.GraphModule, list[int]]:
    """A backward module that takes the same arguments, and the positions of those that it does not read.

    Args:
        module: of ``execute.build``; it is left as it is.
        absent: the positions of the gradients that are not there.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    shortened = _Shortened([placeholders[position] for position in absent])
    for node in module.graph.nodes:
        shortened.add(node)
    for node in reversed(shortened.graph.nodes):
        if node.op == "call_function" and not node.users and not node.is_impure():
            shortened.graph.erase_node(node)
    given = enumerate(shortened.graph.find_nodes(op="placeholder"))
    return graph_module(module, shortened.graph), [position for position, node in given if not node.users]


def with_nothing_at(positions: Sequence[int], run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``run``, which does not read its arguments at these positions: they are freed before."""

    def called(arguments: list[Any]) -> Any:
        for position in positions:
            arguments[position] = None
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


class _Shortened:
    """The graph of ``without`` while it is built.

    Attributes:
        graph: the new graph.
        values: the nodes of the old graph in the new one.
        absent: nodes of the old graph that are left out.
    """

    def __init__(self, absent: Collection[fx.Node]) -> None:
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}
        self.absent = set(absent)
        self._late: set[fx.Node] = set()  # what depends on gradients of outputs
        self._other_strides: set[fx.Node] = set()  # what depends on a term whose strides are not its sum's

    def add(self, node: fx.Node) -> None:
        """Go on with the next node of the old graph."""
        if node.op == "output":
            results = [None if n in self.absent else n for n in node.args[0]]  # type: ignore[union-attr]
            self.graph.output(fx.map_arg(tuple(results), self.values.__getitem__))
            return
        given = node.all_input_nodes
        if (node.op == "placeholder" and is_tangent(node)) or not self._late.isdisjoint(given):
            self._late.add(node)
        gone = [n for n in given if n in self.absent]
        if gone and not any(n in self._late and n not in self.absent for n in given):
            self.absent.add(node)
        elif gone and is_sum_of_two(node):
            self._pass_on(node, given)
        else:
            given_now = {n: self._zeros(n) for n in gone} | self._as_traced(node)
            new = self.graph.node_copy(node, lambda n: given_now.get(n) or self.values[n])
            if new.target in VIEWS and node in self._other_strides:
                new.target = aten.reshape.default
            self.values[node] = new

    def _as_traced(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """What ``node`` reads with the strides that were traced, where it needs them and they are others now."""
        others = [n for n in node.all_input_nodes if n in self._other_strides]
        if not others:
            return {}
        if not needs_traced_strides(node, node.target):
            self._other_strides.add(node)
            return {}
        found = {}
        for n in others:
            found[n] = self.graph.call_function(with_strides, (self.values[n], list(n.meta["val"].stride())))
            found[n].meta = dict(n.meta)
        return found

    def _pass_on(self, node: fx.Node, given: Sequence[fx.Node]) -> None:
        """A sum is the one term that is there; a copy of it where one of the two is written over and the other read."""
        (term,) = (n for n in given if n not in self.absent)
        value = self.values[term]
        if node.target in _OUTPUT_SUMS and term is node.args[1]:
            value = self.graph.call_function(shaped, (value, list(node.meta["val"].shape)))
        is_shared = len(term.users) > 1 or not _owns(term)
        if is_shared and (is_written_over(node) or is_written_over(_base(term), but=node)):
            value = self.graph.call_function(aten.clone.default, (value,))
        if value is not self.values[term]:
            value.meta = dict(node.meta)
        if not _same_strides(term.meta["val"], node.meta["val"]) or term in self._other_strides:
            self._other_strides.add(node)
        self.values[node] = value

    def _zeros(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        new = self.graph.call_function(_zeros, (list(value.shape), list(value.stride()), value.dtype, value.device))
        new.meta = dict(node.meta)
        return new


def _same_strides(term: torch.Tensor | Sequence[torch.Tensor], total: torch.Tensor) -> bool:
    """Whether a term of one shape with its sum differs in strides only where there is one element.

    A term that an implementation of an operator with several results computes alone has all their values, and a layout
    of its own.
    """
    if not isinstance(term, torch.Tensor):
        return False
    return term.shape == total.shape and alike(term.shape, term.stride(), total.stride())


def _zeros(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


def is_written_over(node: fx.Node, but: fx.Node | None = None) -> bool:
    """Whether a call other than ``but`` writes to what ``node`` gives, or to a view of it."""
    for user in node.users:
        if user is but:
            continue
        if user.target is add_output_gradient_:
            if user.args[0] is node:
                return True
        elif isinstance(user.target, torch._ops.OpOverload):
            schema = user.target._schema
            given: list[Any] = [*zip(schema.arguments, user.args, strict=False)]
            given += [(a, user.kwargs[a.name]) for a in schema.arguments if a.name in user.kwargs]
            info = [a.alias_info for a, value in given if value is node and a.alias_info is not None]
            if any(i.is_write for i in info) or (_gives_view(user) and is_written_over(user, but)):
                return True
        elif user.op == "call_function" and is_written_over(user, but):
            return True
    return False


def _base(node: fx.Node) -> fx.Node:
    """What ``node`` is a view of, else ``node``."""
    while node.op == "call_function" and node.all_input_nodes and (node.target is operator.getitem or _is_view(node)):
        node = node.all_input_nodes[0]
    return node


def _gives_view(node: fx.Node) -> bool:
    target: Any = node.target
    return target is aten.reshape.default or any(r.alias_info is not None for r in target._schema.returns)


def _is_view(node: fx.Node) -> bool:
    """Whether a call gives a view, and writes nothing."""
    return isinstance(node.target, torch._ops.OpOverload) and _gives_view(node) and not node.target._schema.is_mutable


def _owns(node: fx.Node) -> bool:
    """Whether a call has allocated what it gives, all of which is its result."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem and _owns(node.all_input_nodes[0])
    return not _gives_view(node)
