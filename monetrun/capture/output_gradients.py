"""Keeps gradients of outputs absent where eager has none.

AOTAutograd's backward takes a gradient of every output. Of one that nothing used autograd would make zeros as large as
the output, and the backward would add them, into one tensor more. Here such a gradient stays None: the graph has an
operator for the sum that allocates nothing, and zeros are made only where something else reads the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture.boxed import passed_on
from monetrun.capture.gradient_terms import EARLIER, shaped
from monetrun.capture.in_turn import InTurn, Turns
from monetrun.capture.marks import AGAIN
from monetrun.ops.families.output_gradients import OPERATOR, add_output_gradient_

aten = torch.ops.aten

OVERWRITES = "monetrun_overwrites"  # in the meta of a call whose default implementation writes over this argument


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of an output."""
    return "tangents" in str(node.target)


def join_output_gradients(module: fx.GraphModule) -> None:
    """Replace each sum of an output's gradient, which nothing else reads, and one from inside the graph."""
    for tangent in module.graph.find_nodes(op="placeholder"):
        if not is_tangent(tangent) or not isinstance(tangent.meta.get("val"), torch.Tensor):
            continue
        summand = tangent
        while len(summand.users) == 1 and _is_reshape(user := next(iter(summand.users)), summand):
            summand = user
        if len(summand.users) == 1:
            _join(next(iter(summand.users)), summand, tangent)


def _join(total: fx.Node, summand: fx.Node, tangent: fx.Node) -> None:
    """Replace ``total`` if it adds ``summand``, a view of ``tangent``, to another tensor of its shape and dtype."""
    others = [n for n in total.all_input_nodes if n is not summand]
    if total.target is not aten.add.Tensor or total.kwargs or len(others) != 1:
        return
    (gradient,) = others
    form, of_gradient = _form(total), _form(gradient)
    if form is None or of_gradient is None or form != _form(summand) or form[:2] != of_gradient[:2]:
        return
    in_place = form == of_gradient and _is_read_once(gradient)
    outer_first = total.args[0] is not gradient
    graph = total.graph
    with graph.inserting_before(total):
        new = graph.call_function(OPERATOR, (gradient, tangent, outer_first, in_place))
    new.meta = {**total.meta, **({OVERWRITES: gradient} if in_place else {})}
    if EARLIER in total.meta:
        new.meta[EARLIER] = int(outer_first)
    total.replace_all_uses_with(new)
    graph.erase_node(total)
    while summand is not tangent:
        summand, unused = summand.all_input_nodes[0], summand
        graph.erase_node(unused)


def _is_reshape(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` is a view of all of ``source`` in the same order."""
    value, of = node.meta.get("val"), source.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and node.all_input_nodes == [source]
        and value.untyped_storage()._cdata == of.untyped_storage()._cdata
        and value.dtype == of.dtype
        and value.numel() == of.numel()
        and value.is_contiguous()
        and of.is_contiguous()
    )


def _form(node: fx.Node) -> tuple[Any, ...] | None:
    """Shape, dtype and strides; None where the node does not hold one strided tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return value.shape, value.dtype, value.stride()


def _is_read_once(node: fx.Node) -> bool:
    """Whether a call has allocated all of the node's storage, and only ``node``'s one user reads it from now on."""
    value = node.meta["val"]
    storage = value.untyped_storage()
    if storage.nbytes() != value.numel() * value.element_size():
        return False
    while True:
        if node.op != "call_function" or len(node.users) != 1:
            return False
        sources = [
            n
            for n in node.all_input_nodes
            if isinstance(v := n.meta.get("val"), torch.Tensor) and v.untyped_storage()._cdata == storage._cdata
        ]
        if not sources:
            return True
        node = sources[0]


# ---- in the modules that run


def stay_absent(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, whose backward gets None for the gradients of outputs that nothing used.

    Args:
        compiled: what AOTAutograd has made of a graph.
    """

    def call(*arguments: Any) -> Any:
        results = compiled(*arguments)
        for result in results:
            if isinstance(result, torch.Tensor) and (node := autograd_node(result)) is not None:
                node.set_materialize_grads(False)
                break
        return results

    return passed_on(call, compiled)


def autograd_node(result: torch.Tensor) -> Any:
    """The node of AOTAutograd's function that has just been called, of which ``result`` is an output or a view of one.

    None for a view of an input, which may be an output of an earlier call.
    """
    node: Any = result.grad_fn
    while node is not None and not hasattr(getattr(node, "_forward_cls", None), "_aot_id"):
        node = next((n for n, _ in node.next_functions if n is not None), None)
    return None if node is None or AGAIN in node.metadata else node


class AbsentGradients:
    """Where gradients of outputs are absent, what a backward takes and gives for them.

    It gets zeros for those that it cannot do without. And what it computes from absent gradients alone is absent, too,
    as in eager: an optimizer leaves a parameter without a gradient as it is, but decays one with zeros.

    Args:
        module: the backward.
        inputs: fake tensors of its arguments' shapes.
    """

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        tangents = {
            node: position
            for position, (node, v) in enumerate(zip(placeholders, inputs, strict=True))
            if is_tangent(node) and isinstance(v, torch.Tensor)
        }
        self._tangents = tuple(tangents.values())
        self._forms = {
            position: (torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta"), v.device)
            for node, position in tangents.items()
            if not all(_takes_none(user, node) for user in node.users)
            for v in (inputs[position],)
        }
        self._sources = _sources(module, tangents)

    def at_once(
        self, run: Callable[..., Any], run_without: Callable[[Sequence[int]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """``run``, which runs the backward on a list of arguments.

        Args:
            run: called where no gradient is absent.
            run_without: gives what is called where those at these positions are, which need not be there.
        """
        others: dict[tuple[int, ...], Callable[..., Any]] = {}

        def called(arguments: list[Any]) -> Any:
            if not (absent := tuple(sorted(self._absent(arguments)))):
                return run(arguments)
            if absent not in others:
                others[absent] = run_without(absent)
            return others[absent](arguments)

        called._boxed_call = True  # type: ignore[attr-defined]
        return called if self._tangents else run

    def by_turns(self, backward: InTurn, run: Turns) -> Turns:
        """``run``, which runs ``backward`` by turns."""

        def called(arguments: list[Any]) -> Generator[list[Any], None, Any]:
            if not (absent := self._absent(arguments)):
                return (yield from run(arguments))
            for positions, gradients in zip(backward.turns, run(self._filled(arguments)), strict=True):
                gradients[:] = map(self._given, positions, gradients, itertools.repeat(absent))
                yield gradients
            return None

        return called if self._tangents else run

    def _absent(self, arguments: Sequence[Any]) -> set[int]:
        return {position for position in self._tangents if arguments[position] is None}

    def _filled(self, arguments: list[Any]) -> list[Any]:
        for position, (form, device) in self._forms.items():
            if arguments[position] is None:
                arguments[position] = torch.zeros_like(form, device=device)
        return arguments

    def _given(self, position: int, result: Any, absent: set[int]) -> Any:
        of = self._sources[position]
        return None if of and of <= absent else result


def _sources(module: fx.GraphModule, tangents: Mapping[fx.Node, int]) -> list[set[int]]:
    """For each result of a backward module the positions of the ``tangents`` that it is computed from."""
    of: dict[fx.Node, set[int]] = {}
    for node in module.graph.nodes:
        own = {tangents[node]} if node in tangents else set()
        of[node] = own.union(*(of[n] for n in node.all_input_nodes))
    (output,) = module.graph.find_nodes(op="output")
    return [of[n] if isinstance(n, fx.Node) else set() for n in output.args[0]]


def _takes_none(user: fx.Node, node: fx.Node) -> bool:
    return (user.target in (OPERATOR, add_output_gradient_) and user.args[0] is not node) or user.target is shaped
