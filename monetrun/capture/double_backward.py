"""What a compiled backward cannot give: what was compiled runs again, as it is, under autograd.

AOTAutograd's backward has no derivative, and is traced for one autocast. Each call of a compiled graph therefore leaves
in its autograd node what it takes to run it again: the graph as TorchDynamo traced it, and references to its inputs,
which keep nothing alive. When the script differentiates with ``create_graph`` through such a node, or under another
autocast, ``run_again`` has autograd replace the gradients that the node gives by those of that second run. With
``create_graph`` these are the same values, with a graph of their own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from monetrun.capture import backward_autocast
from monetrun.capture.gradient_order import give_instead, through_gates
from monetrun.capture.gradient_terms import Edge, edge_of
from monetrun.capture.output_gradients import autograd_node
from monetrun.core.errors import CaptureFailed
from monetrun.ops.random import generator, uncounted_state

_KEY = "monetrun"  # in a node's metadata
_HOOKED = "monetrun hook"


@dataclass(frozen=True, slots=True)
class TracedBackward:
    """What a backward was traced for.

    Attributes:
        draws_on: the devices whose generators the graph draws from.
        autocast: under which it was traced.
        depends_on: the device types whose autocast makes it another one.
        sums: the inputs of whose gradients it gives a sum over several uses.
    """

    draws_on: tuple[torch.device, ...] = ()
    autocast: backward_autocast.State = backward_autocast.OFF
    depends_on: frozenset[str] = frozenset()
    sums: tuple[int, ...] = ()

    def differs_under(self, state: backward_autocast.State) -> bool:
        """Whether eager's backward, called under ``state``, is another one."""
        return any(device_type in self.depends_on for device_type, _ in {*self.autocast} ^ {*state})


@dataclass(frozen=True, slots=True)
class Again:
    """What runs a call of a compiled graph again.

    Attributes:
        module: TorchDynamo's graph, of torch's own functions.
        inputs: the call's, tensors as weak references.
        places: of each output that the node gives: its index among the node's outputs; -1 for others.
        sums: edges of the inputs of whose gradients the backward gives a sum over several uses.
        autocast: whether autocast was on for the device type, and its dtype.
        generators: states before the call, by device; empty where it draws no random numbers.
        traced: what its backward was traced for.
        watched: what is called with the gradients of outputs, as ``register_hook`` has it: by the output's index.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    places: tuple[int, ...]
    sums: tuple[Edge, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    generators: tuple[tuple[torch.device, torch.Tensor], ...]
    traced: TracedBackward
    watched: dict[int, OrderedDict[int, Callable[..., Any]]] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Whether the script has dropped an input."""
        return any(isinstance(value, weakref.ref) and value() is None for value in self.inputs)

    def given(self, absent: Any = None) -> list[Any]:
        """The inputs, buffers and other tensors without a gradient as copies: they have been changed already.

        Args:
            absent: in place of one that the script has dropped.

        Raises:
            CaptureFailed: the script has dropped one, and ``absent`` is None.
        """
        if self.incomplete and absent is None:
            raise CaptureFailed(
                "an input of the model is gone that its gradients' gradients need", "keep it until then"
            )
        found = [_referenced(value, absent) if isinstance(value, weakref.ref) else value for value in self.inputs]
        return [v.clone() if isinstance(v, torch.Tensor) and not v.requires_grad else v for v in found]


def _referenced(reference: weakref.ref[Any], absent: Any) -> Any:
    value = reference()
    return absent if value is None else value


def repeatable(compiled: Callable[..., Any], module: fx.GraphModule, traced: TracedBackward) -> Any:
    """``compiled``, made of ``module``, with calls that can be run again.

    Args:
        compiled: takes the inputs of ``module``.
        module: TorchDynamo's graph.
        traced: its backward.
    """
    types = {"cpu", *(v.device.type for v in _examples(module))}
    autocast = tuple((t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in sorted(types))

    def call(*arguments: Any) -> Any:
        given = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments  # boxed
        inputs = tuple(weakref.ref(v) if isinstance(v, torch.Tensor) else v for v in given)
        generators = tuple((device, uncounted_state(device)) for device in traced.draws_on)
        results = compiled(*arguments)
        node = next((n for r in results if isinstance(r, torch.Tensor) and (n := autograd_node(r))), None)
        if node is not None:
            node._forward_cls.metadata.bw_donated_idxs = []  # unset, torch refuses a later ``retain_graph=True``
            places = tuple(r.output_nr if getattr(r, "grad_fn", None) is node else -1 for r in results)
            sums = tuple(edge for i in traced.sums if (edge := edge_of(given[i])) is not None)
            node.metadata[_KEY] = Again(module, inputs, places, sums, autocast, generators, traced)
        return results

    if hasattr(compiled, "_boxed_call"):
        call._boxed_call = compiled._boxed_call  # type: ignore[attr-defined]
    return call


def again_of(node: Any) -> Again | None:
    """What runs the compiled call behind an autograd node again; None where it is no such node."""
    again = node.metadata.get(_KEY) if hasattr(node, "_forward_cls") else None
    return again if isinstance(again, Again) else None


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
        node.metadata[_HOOKED] = True
        node.register_hook(_hook(again, node.next_functions))


def _hook(again: Again, edges: Sequence[tuple[Any, int]]) -> Callable[..., Any]:
    def replace(gradients: tuple[Any, ...], of_outputs: tuple[Any, ...]) -> Any:
        create_graph = torch.is_grad_enabled()
        as_it_was = not again.traced.differs_under(backward_autocast.present()) or again.incomplete
        if not create_graph and not again.watched and as_it_was:
            return None
        given = again.given()
        wanted = [v for v in given if isinstance(v, torch.Tensor) and v.requires_grad]
        places = {(edge.node, edge.output_nr): v for v in wanted for edge in (get_gradient_edge(v),)}
        with as_before(again), torch.enable_grad():
            results = again.module(*given)
        for number, called in again.watched.items():
            for one in list(called.values()):
                results[number].register_hook(one)
        pairs = [
            (result, of_outputs[place])
            for result, place in zip(results, again.places, strict=True)
            if place >= 0 and of_outputs[place] is not None
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs], wanted, [g for _, g in pairs], create_graph=create_graph, allow_unused=True
        )
        by_input = {id(v): gradient for v, gradient in zip(wanted, found, strict=True)}
        others = [
            by_input[id(places[edge])] if edge in places else old
            for old, edge in zip(gradients, through_gates(edges), strict=True)
        ]
        return give_instead(edges, gradients, others)

    return replace


@contextlib.contextmanager
def as_before(again: Again) -> Iterator[None]:
    """Autocast and the generators are as they were in the call; the generators are restored at the end."""
    now = [(device, uncounted_state(device)) for device, _ in again.generators]
    with contextlib.ExitStack() as stack:
        for device_type, enabled, dtype in again.autocast:
            stack.enter_context(torch.autocast(device_type, dtype, enabled=enabled))
        for device, state in again.generators:
            generator(device).set_state(state)
        try:
            yield
        finally:
            for device, state in now:
                generator(device).set_state(state)


def _examples(module: fx.GraphModule) -> Iterator[torch.Tensor]:
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            yield value
