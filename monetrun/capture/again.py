"""What it takes to run a call of a compiled graph again, as it is, under autograd.

Each call leaves in its autograd node the graph as TorchDynamo traced it, and references to its inputs, which keep
nothing alive.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monetrun.capture import backward_autocast
from monetrun.capture.gradient_terms import Edge, edge_of
from monetrun.capture.marks import AGAIN
from monetrun.capture.output_views import GradientsOfViews
from monetrun.capture.storages import results_of, version_of
from monetrun.core.errors import CaptureFailed
from monetrun.ops.random import generator, uncounted_state

ABSENT = object()  # in the place of an input


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
        viewed: of each other output that is a view of one of the node's: the index of that; -1 for others.
        sums: edges of the inputs of whose gradients the backward gives a sum over several uses.
        autocast: whether autocast was on for the device type, and its dtype.
        generators: states before the call, by device; empty where it draws no random numbers.
        traced: what its backward was traced for.
        apart: called when a second backward runs (see ``second_backward``); gives whether its numbers count.
        versions: of the tensors among the inputs, before the call.
        watched: what is called with the gradients of outputs, as ``register_hook`` has it: by the output's index.
        of_views: gradients of outputs that autograd does not give the node itself.
        freed: the node's outputs whose backward has run, and its graph was not kept.
        kept: those whose backward has run, and its graph was kept.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    places: tuple[int, ...]
    viewed: tuple[int, ...]
    sums: tuple[Edge, ...]
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    generators: tuple[tuple[torch.device, torch.Tensor], ...]
    traced: TracedBackward
    apart: Callable[[bool], bool]
    versions: tuple[int, ...]
    watched: dict[int, OrderedDict[int, Callable[..., Any]]] = field(default_factory=dict)
    of_views: GradientsOfViews = field(default_factory=GradientsOfViews)
    freed: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)

    @property
    def incomplete(self) -> bool:
        """Whether the script has dropped an input."""
        return any(isinstance(value, weakref.ref) and value() is None for value in self.inputs)

    @property
    def weights_changed(self) -> bool:
        """Whether the script has written to an input with a gradient since the call."""
        references = [value for value in self.inputs if isinstance(value, weakref.ref)]
        tensors = ((value(), version) for value, version in zip(references, self.versions, strict=True))
        return any(t is not None and t.requires_grad and version_of(t) != version for t, version in tensors)

    def unchanged(self) -> list[Any]:
        """The inputs as they were in the call; ``ABSENT`` for those that the script has dropped or written to since."""
        versions = iter(self.versions)
        return [
            ABSENT if isinstance(v, weakref.ref) and version_of(v()) != next(versions) else value
            for v, value in zip(self.inputs, self.given(ABSENT), strict=True)
        ]

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
        found = [_referenced(value, absent) for value in self.inputs]
        return [v.clone() if isinstance(v, torch.Tensor) and not v.requires_grad else v for v in found]


def _referenced(value: Any, absent: Any) -> Any:
    if not isinstance(value, weakref.ref):
        return value
    found = value()
    return absent if found is None else found


def again_of(node: Any) -> Again | None:
    """What runs the compiled call behind an autograd node again; None where it is no such node."""
    again = node.metadata.get(AGAIN) if hasattr(node, "_forward_cls") else None
    return again if isinstance(again, Again) else None


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


def run(again: Again) -> tuple[list[Any], Sequence[Any]]:
    """Run a call again: its inputs, and its results.

    Raises:
        CaptureFailed: the script has dropped an input.
    """
    given = again.given()
    with as_before(again), torch.enable_grad():
        return given, again.module(*given)


def run_from(
    again: Again, given: Sequence[Any], known: Mapping[int, torch.Tensor]
) -> tuple[list[Any], Sequence[Any], set[int]]:
    """Run a call again of which not all inputs are there.

    In the place of those that are not there are zeros: so as many random numbers are drawn.

    Args:
        again: the call.
        given: its inputs, ``ABSENT`` where they are not there.
        known: results that are taken as they are, by their number.

    Returns:
        The inputs, the results, and the numbers of those that depend on what is not there.
    """
    nodes, interpreter = results_of(again.module.graph), _From(again.module)
    interpreter.given.update((nodes[number], tensor) for number, tensor in known.items())
    inputs = list(given)
    for i, node in enumerate(again.module.graph.find_nodes(op="placeholder")):
        if inputs[i] is ABSENT:
            interpreter.unknown.add(node)
            inputs[i] = _zeros_like(node.meta["example_value"])
    with as_before(again), torch.enable_grad():
        results = interpreter.run(*inputs)
    return inputs, results, {number for number, node in enumerate(nodes) if node in interpreter.unknown}


def gradients_of(
    again: Again, given: Sequence[Any], results: Sequence[Any], of_outputs: Sequence[Any]
) -> dict[Edge, torch.Tensor | None]:
    """The gradients of the inputs ``given``, by edge, of the ``results`` of a second run.

    With a graph of their own where the script wants one.

    Args:
        again: the call.
        given: its inputs.
        results: of the run.
        of_outputs: gradients of the node's outputs.
    """
    wanted = {edge: v for v in given if (edge := edge_of(v)) is not None}
    by_place = {place: result for result, place in zip(results, again.places, strict=True) if place >= 0}
    for result, place in zip(results, again.viewed, strict=True):
        if place >= 0 and place not in by_place and of_outputs[place] is not None:
            by_place[place] = _base_like(result, of_outputs[place])
    pairs = [(result, of_outputs[place]) for place, result in by_place.items() if of_outputs[place] is not None]
    plain: Any = inspect.unwrap(torch.autograd.grad)  # what stands there now looks for what the script differentiates
    found = plain(
        [result for result, _ in pairs],
        list(wanted.values()),
        [gradient for _, gradient in pairs],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
    return dict(zip(wanted, found, strict=True))


def _base_like(result: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What a result of a second run is a view of, where it has such a gradient.

    Raises:
        CaptureFailed: it is a view of another tensor than in the call.
    """
    base = result._base
    if base is None or base.shape != gradient.shape:
        raise CaptureFailed(
            "an output of the model that is a view of another was changed in place, and is differentiated again",
            "change a copy",
        )
    return base


def _zeros_like(example: torch.Tensor) -> torch.Tensor:
    sizes = [size if isinstance(size, int) else size.node.hint for size in example.shape]
    return torch.zeros(sizes, dtype=example.dtype, device=example.device)


class _From(fx.Interpreter):
    """Runs one of TorchDynamo's graphs.

    Attributes:
        given: what some nodes are.
        unknown: nodes whose values are not the call's.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.given: dict[fx.Node, torch.Tensor] = {}
        self.unknown: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        """As it is; what reads something unknown is unknown, and so is what it changes."""
        reads = n.op != "output" and not self.unknown.isdisjoint(n.all_input_nodes)
        before = [(node, _versions(value)) for node, value in self.env.items()] if reads else []
        result = super().run_node(n)
        if n in self.given:
            return self.given[n]
        if reads:  # views have the version of what they are views of
            self.unknown.add(n)
            self.unknown.update(node for node, versions in before if _versions(self.env[node]) != versions)
        return result


def _versions(value: Any) -> list[int]:
    return [version_of(leaf) for leaf in torch.utils._pytree.tree_leaves(value)]
