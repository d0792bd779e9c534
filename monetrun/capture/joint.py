"""Describes AOTAutograd's joint module as a ``core.graph.Graph``, and keeps the fx nodes that run it.

TorchDynamo and AOTAutograd trace the model. ``storages`` finds out which memory its fx nodes write, ``operators`` what
each operator reads and how else it can run, ``optional_operators`` which may be left out; here the results are put
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from monetrun.capture.guards import Guard, Guards
from monetrun.capture.open_strides import with_the_same_strides
from monetrun.capture.operators import Described, Inputs, describe, mark_held, mark_joint_calls
from monetrun.capture.optional_operators import mark_optional
from monetrun.capture.output_gradients import is_tangent, join_output_gradients
from monetrun.capture.output_views import twins_are_views
from monetrun.capture.regions import Regions, refuse_updates
from monetrun.capture.storages import Storages, mutated_inputs, results_of
from monetrun.capture.tracing import split_convolution_backward, take_new_statistics
from monetrun.core.errors import CaptureFailed
from monetrun.core.graph import BACKWARD, FORWARD, Graph
from monetrun.ops import dtypes, random, registry
from monetrun.ops.registry import Call


@dataclass(frozen=True)
class JointGraph:
    """A captured joint graph and the fx nodes behind it.

    Attributes:
        module: AOTAutograd's fx module, with convolution backwards split.
        graph: what solvers see.
        nodes: for each operator its fx node: the call of its default implementation.
        calls: for each (operator, implementation) other than a default, its call.
        signatures: for each operator and implementation the signature whose cost it has: a key of ``timed``.
        timed: for each signature a call to measure, and a node whose result has the shape of the call's result.
        exactness_trials: for each signature whose exactness only a trial can show, the call and the default's.
        no_faster_than_default: the (operator, implementation) whose seconds are at least the default's.
        storage: for each fx node that holds one tensor, the id of the tensor (storage) in ``graph``.
        outputs: the forward's outputs (nodes, or constants) in AOTAutograd's order.
        gradients: the backward's outputs, in the same way.
        transient: external tensors that are neither parameters nor buffers: the batch, another graph's activations,
            tangents.
        mutated: external tensors that the graph writes to.
        guards: of the implementations that depend on the weights.
    """

    module: fx.GraphModule
    graph: Graph
    nodes: tuple[fx.Node, ...]
    calls: dict[tuple[int, int], Call]
    signatures: tuple[tuple[str, ...], ...]
    timed: dict[str, tuple[Call, fx.Node]]
    exactness_trials: dict[str, tuple[Call, Call]]
    no_faster_than_default: frozenset[tuple[int, int]]
    storage: dict[fx.Node, int]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    transient: frozenset[int]
    mutated: frozenset[int]
    guards: Guards

    @property
    def primals(self) -> list[fx.Node]:
        """The forward's inputs, in order."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if not is_tangent(n)]

    @property
    def tangents(self) -> list[fx.Node]:
        """The gradients of the outputs, in order."""
        return [n for n in self.module.graph.find_nodes(op="placeholder") if is_tangent(n)]


def capture(
    module: fx.GraphModule,
    forward_outputs: int,
    name: str,
    static_inputs: Sequence[int] = (),
    *,
    split_convolutions: bool = True,
) -> JointGraph:
    """Describe a joint module.

    Args:
        module: AOTAutograd's joint module; it is changed in place, where eager's step is another.
        forward_outputs: how many of its outputs are the forward's; the others are gradients.
        name: of the model, for messages.
        static_inputs: positions of the inputs that are parameters or buffers.
        split_convolutions: a convolution's two gradients are operators of their own.

    Raises:
        CaptureFailed: the module has symbolic shapes, or an operator whose outputs are not tensors.
    """
    refuse_updates(module)
    twins_are_views(module.graph)
    if split_convolutions:
        split_convolution_backward(module)
    take_new_statistics(module)
    join_output_gradients(module)
    dtypes.name_defaults(module)
    dtypes.correct_norms(module)
    random.note_states(module)
    offered = with_the_same_strides(module, registry.alternatives(module))

    forward, backward = _phases(module, name)
    results = tuple(results_of(module.graph))
    storages = Storages(module, (*forward, *backward), results, name)
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = Inputs({node: position for position, node in enumerate(placeholders)}, frozenset(static_inputs))
    regions = Regions()
    mutated = mutated_inputs(module, storages)
    phases = (FORWARD, forward), (BACKWARD, backward)
    described = describe(phases, storages, offered, inputs, regions, mutated)

    nodes = tuple(d.node for d in described)
    tensors = tuple(storages.tensors)
    gradients = _gradients(placeholders, results[forward_outputs:], storages)
    operators = mark_joint_calls([d.operator for d in described], nodes, gradients)
    operators = mark_optional(mark_held(operators, nodes), tensors, nodes)
    graph = Graph(name, tensors, operators, tuple(regions.found))
    alternatives = [(d, k, a) for d in described for k, a in enumerate(d.alternatives, 1)]
    return JointGraph(
        module=module,
        graph=graph,
        nodes=nodes,
        calls={(d.operator.id, k): a.call for d, k, a in alternatives},
        signatures=tuple(d.signatures for d in described),
        timed=_calls_to_measure(described),
        exactness_trials={d.signatures[k]: (a.call, Call.of(d.node)) for d, k, a in alternatives if a.exact is None},
        no_faster_than_default=frozenset((d.operator.id, k) for d, k, a in alternatives if a.no_faster_than_default),
        storage=storages.by_node,
        outputs=results[:forward_outputs],
        gradients=results[forward_outputs:],
        transient=_transient(storages, inputs),
        mutated=mutated,
        guards=Guards(graph, _guards(described, inputs)),
    )


def _phases(module: fx.GraphModule, name: str) -> tuple[list[fx.Node], list[fx.Node]]:
    """Calls of the forward and of the backward, in order; the forward ends with the mutations of inputs."""
    forward, backward, mutations = [], [], []
    late: set[fx.Node] = set()  # tangents, and what depends on them
    for node in module.graph.nodes:
        tag = node.meta.get("partitioner_tag")
        if node.op == "placeholder":
            if is_tangent(node):
                late.add(node)
            continue
        if node.op != "call_function":
            if node.op not in ("get_attr", "output"):
                raise CaptureFailed(f"{name}: the graph has a {node.op} node, {node.name}")
            continue
        if tag == "must_be_in_forward":
            mutations.append(node)
        elif tag in ("is_backward", "must_be_in_backward") or any(a in late for a in node.all_input_nodes):
            late.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return forward + mutations, backward


def _calls_to_measure(described: Sequence[Described]) -> dict[str, tuple[Call, fx.Node]]:
    """For each signature the first call that has it, and the node of the call's operator."""
    found: dict[str, tuple[Call, fx.Node]] = {}
    for d in described:
        for signature, call in zip(d.signatures, d.measured, strict=True):
            found.setdefault(signature, (call, d.node))
    return found


def _guards(described: Sequence[Described], inputs: Inputs) -> list[Guard]:
    return [
        Guard.of(a.guard, inputs.positions, d.operator.id, k, f"{d.operator.name} as {a.name}")
        for d in described
        for k, a in enumerate(d.alternatives, 1)
        if a.guard is not None
    ]


def _transient(storages: Storages, inputs: Inputs) -> frozenset[int]:
    given = [n for n in inputs.positions if n in storages.by_node]
    static = {storages.by_node[n] for n in given if inputs.is_static(n)}
    return frozenset(storages.by_node[n] for n in given) - static


def _gradients(placeholders: Sequence[fx.Node], results: Sequence[Any], storages: Storages) -> dict[int, int]:
    """For each gradient (an id of a tensor) the input that it is the gradient of."""
    found = {}
    for given in placeholders:  # without the numbers, which have a place among the results
        place = getattr(given.meta.get("desc"), "idx", -1)
        gradient = None if is_tangent(given) or not 0 <= place < len(results) else results[place]
        if gradient in storages.by_node and given in storages.by_node:
            found[storages.by_node[gradient]] = storages.by_node[given]
    return found
