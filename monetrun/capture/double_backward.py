"""What a compiled backward cannot give: what was compiled runs again, as it is, under autograd.

AOTAutograd's backward has no derivative, and is traced for one autocast. Each call of a compiled graph therefore leaves
in its autograd node what it takes to run it again (``capture.again``). When the script differentiates with
``create_graph`` through such a node, or under another autocast, ``run_again`` has autograd replace the gradients that
the node gives by those of that second run. With ``create_graph`` these are the same values, with a graph of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture import backward_autocast
from monetrun.capture.again import Again, TracedBackward, again_of, gradients_of, run
from monetrun.capture.boxed import passed_on
from monetrun.capture.gradient_order import give_instead, through_gates
from monetrun.capture.gradient_terms import Edge, edge_of
from monetrun.capture.marks import AGAIN
from monetrun.capture.output_gradients import autograd_node
from monetrun.capture.second_backward import repeat_backwards
from monetrun.core.errors import CaptureFailed
from monetrun.ops.random import uncounted_state

_HOOKED = "monetrun hook"


def repeatable(
    compiled: Callable[..., Any], module: fx.GraphModule, traced: TracedBackward, apart: Callable[[bool], bool]
) -> Any:
    """``compiled``, made of ``module``, with calls that can be run again.

    Args:
        compiled: takes the inputs of ``module``.
        module: TorchDynamo's graph.
        traced: its backward.
        apart: called when a call is differentiated further, for outputs of which no backward has run: with whether one
            has run for others, and not only through the call. Gives whether the gradients count.
    """
    examples = _examples(module)
    tensors = [k for k, v in enumerate(examples) if isinstance(v, torch.Tensor)]
    types = {"cpu", *(examples[k].device.type for k in tensors)}
    autocast = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in sorted(types))

    def call(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*arguments)
        boxed = len(arguments) == 1 and isinstance(arguments[0], list)
        given: Any = arguments[0] if boxed else arguments
        try:  # there are hundreds: no further code of Python's runs for each
            versions = [given[k]._version for k in tensors]
        except RuntimeError:  # one is made in inference mode
            if boxed:
                given[:] = map(_for_autograd, given)  # the caller's list, which is emptied
            else:
                arguments = given = tuple(map(_for_autograd, given))
            versions = [given[k]._version for k in tensors]
        inputs = _weakly(given, tensors)
        generators = tuple((device, uncounted_state(device)) for device in traced.draws_on)
        results = compiled(*arguments)
        node = next((n for r in results if isinstance(r, torch.Tensor) and (n := autograd_node(r))), None)
        if node is not None:
            node._forward_cls.metadata.bw_donated_idxs = []  # unset, torch refuses a later ``retain_graph=True``
            repeat_backwards(node._forward_cls)
            places = tuple(r.output_nr if getattr(r, "grad_fn", None) is node else -1 for r in results)
            viewed = tuple(
                _place_of_base(r, node) if place < 0 else -1 for r, place in zip(results, places, strict=True)
            )
            sums = tuple(edge for i in traced.sums if (edge := edge_of(given[i])) is not None)
            node.metadata[AGAIN] = Again(
                module, inputs, places, viewed, sums, autocast, generators, traced, apart, tuple(versions)
            )
        return results

    return passed_on(call, compiled)


def _place_of_base(result: Any, node: Any) -> int:
    """Which output of ``node`` a result is a view of; -1: of none."""
    base = result._base if isinstance(result, torch.Tensor) else None
    return -1 if base is None or base.grad_fn is not node else int(base.output_nr)


def _weakly(given: Sequence[Any], tensors: Sequence[int]) -> tuple[Any, ...]:
    """What is ``given``, with weak references in place of the tensors, which are at these places, ascending."""
    if len(tensors) == len(given):
        return tuple(map(weakref.ref, given))
    found = list(given)
    for k in tensors:
        found[k] = weakref.ref(given[k])
    return tuple(found)


def _for_autograd(value: Any) -> Any:
    """A tensor made in inference mode, such as a table from an evaluation, as one that may be saved for a backward."""
    if not isinstance(value, torch.Tensor) or not value.is_inference():
        return value
    alias = torch.empty(0, dtype=value.dtype, device=value.device)
    return alias.set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())


def _unhooked(node: Any) -> Again | None:
    """``again_of``, where ``run_again`` was not called for it."""
    again = again_of(node)
    return None if again is None or _HOOKED in node.metadata else again


def traced_otherwise(node: Any, state: backward_autocast.State) -> bool:
    """Whether the backward behind an autograd node was traced for another autocast than ``state``, and differs."""
    again = _unhooked(node)
    return again is not None and again.traced.differs_under(state)


def sums_of(node: Any) -> tuple[Edge, ...]:
    """Edges of the inputs of whose gradients the call behind an autograd node gives a sum over several uses."""
    again = _unhooked(node)
    return () if again is None else again.sums


def can_run_again(node: Any) -> bool:
    """Whether the script has dropped none of the inputs of the call behind an autograd node."""
    again = _unhooked(node)
    return again is None or not again.incomplete


def run_again(nodes: Sequence[Any]) -> None:
    """Have the calls behind these autograd nodes run again where their backward has to be another one.

    Raises:
        CaptureFailed: a call cannot run again.
    """
    for node in nodes:
        again = again_of(node)
        if again is None:
            raise CaptureFailed("a compiled call cannot run again for gradients of gradients", "use torchrun")
        if _HOOKED in node.metadata:
            continue
        node.metadata[_HOOKED] = again.of_views.read_twice = True
        node.register_hook(_hook(again, node.next_functions))


def _hook(again: Again, edges: Sequence[tuple[Any, int]]) -> Callable[..., Any]:
    # inputs may be there for the node alone, which frees them before this runs
    held = [value() for value in again.inputs if isinstance(value, weakref.ref)]

    def replace(gradients: tuple[Any, ...], of_outputs: tuple[Any, ...]) -> Any:
        try:
            return replaced(gradients, again.of_views.filled(of_outputs, again=True))
        finally:
            held.clear()

    def replaced(gradients: tuple[Any, ...], of_outputs: Sequence[Any]) -> Any:
        create_graph = torch.is_grad_enabled()
        as_it_was = not again.traced.differs_under(backward_autocast.present()) or again.incomplete
        if not create_graph and not again.watched and as_it_was:
            return None
        given, results = run(again)
        for number, called in again.watched.items():
            for one in list(called.values()):
                results[number].register_hook(one)
        by_edge = gradients_of(again, given, results, of_outputs)
        others = [by_edge.get(edge, old) for old, edge in zip(gradients, through_gates(edges), strict=True)]
        return give_instead(edges, gradients, others)

    # Dynamo may be at work where the script differentiates: it would compile what runs again, too
    return torch.compiler.disable(replace)


def _examples(module: fx.GraphModule) -> list[Any]:
    return [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
