"""Torch's own partitioner as a schedule, which ``simulate`` replays like monetrun's.

``min_cut_rematerialization_partition`` decides what is saved, what is recomputed, and the order of its two modules, by
``torch._functorch.config.activation_memory_budget``. The schedule has the calls of these modules as they are, without
a compiler that fuses them.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._guards import detect_fake_mode

from monetrun.capture.joint import JointGraph, is_tangent
from monetrun.core.errors import CaptureFailed
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.plan import Schedule, Step
from monetrun.ops import random
from monetrun.solve import tidy

monet = torch.ops.monet

_OPERATORS = (
    "monetrun_operators"  # in a node's meta: the graph's operators that it stands for; copies of the node have it too
)


@dataclass(frozen=True)
class Partition:
    """What torch decided, as a schedule.

    Attributes:
        graph: the joint graph's tensors, and its operators in the order and the phases of torch's two modules.
        costs: of ``graph``.
        schedule: over ``graph``, default implementations.
        again: how many operators are rerun. Random ones draw the same numbers; in torch they draw others.
        deferred: how many forward operators run in the backward pass only, because nothing else reads them.
    """

    graph: Graph
    costs: Costs
    schedule: Schedule
    again: int
    deferred: int


def partition(joint: JointGraph, costs: Costs, budget: float, estimator: str = "flops") -> Partition:
    """Partition ``joint`` with torch.

    Args:
        joint: as captured; it is not changed.
        costs: of ``joint.graph``.
        budget: torch's ``activation_memory_budget``, from 0 (recompute everything) to 1 (the fastest).
        estimator: torch's ``activation_memory_budget_runtime_estimator``.

    Raises:
        CaptureFailed: the graph was captured from real tensors.
    """
    module = _without_monetruns_operators(joint)
    inputs = [n for n in module.graph.find_nodes(op="placeholder") if not is_tangent(n)]
    own = {n.name: t for n, t in joint.storage.items()}
    static = [i for i, n in enumerate(inputs) if own.get(n.name, -1) not in joint.transient]
    mode = detect_fake_mode([n.meta.get("val") for n in inputs])
    if mode is None:
        raise CaptureFailed(f"{joint.graph.name} has no fake inputs", "capture it with lib.offline")
    # cse=False: without it an operator of the graph is either in a module or dead
    patched = config.patch(
        activation_memory_budget=budget, activation_memory_budget_runtime_estimator=estimator, cse=False
    )
    with mode, patched:
        forward, backward = partitioners.min_cut_rematerialization_partition(
            module, (), num_fwd_outputs=len(joint.outputs), static_lifetime_input_indices=static
        )
    return _read(joint, costs, _operators(forward), _operators(backward))


def _without_monetruns_operators(joint: JointGraph) -> fx.GraphModule:
    """The joint module without optional operators, and with torch's random operators for monetrun's."""
    module = fx.GraphModule(joint.module, copy.deepcopy(joint.module.graph))
    number = {node: i for i, node in enumerate(joint.nodes)}
    stands_for = {n.name: [number[o] for o in (random.state_of(n), n) if o is not None] for n in joint.nodes}
    for node in reversed(module.graph.nodes):
        if "monetrun_optional" in node.meta or node.target is monet.generator_state.default:
            module.graph.erase_node(node)
            continue
        if node.name in stands_for:
            node.meta[_OPERATORS] = stands_for[node.name]
        if node.target is monet.bernoulli.default:
            *form, p = node.args
            with module.graph.inserting_before(node):
                like = module.graph.call_function(torch.ops.aten.empty_strided.default, tuple(form), node.kwargs)
            like.meta = {k: v for k, v in node.meta.items() if k != _OPERATORS}
            node.target, node.args, node.kwargs = torch.ops.aten.bernoulli.p, (like, p), {}
    return module


def _operators(module: fx.GraphModule) -> list[int]:
    """The operators that one of torch's modules runs, in order."""
    return [o for n in module.graph.nodes if n.op == "call_function" for o in n.meta.get(_OPERATORS, ())]


def _read(joint: JointGraph, costs: Costs, forward: list[int], backward: list[int]) -> Partition:
    operators = joint.graph.operators
    first = set(forward)
    twice = [o for o in backward if o in first]
    unsaved = {o for o in twice if operators[o].phase == FORWARD and not operators[o].replayable}
    late = [o for o in backward if o not in first]
    dead = sorted(set(range(len(operators))) - first - set(late))  # in no module: never run
    order = forward + late + dead
    number = {o: i for i, o in enumerate(order)}
    graph = dataclasses.replace(
        joint.graph,
        operators=tuple(
            dataclasses.replace(
                operators[o],
                id=i,
                phase=FORWARD if o in first else BACKWARD,
                replayable=o in first and o not in unsaved,
                optional=i >= len(forward) + len(late),
                plain=i < len(forward) + len(late),
            )
            for i, o in enumerate(order)
        ),
    )
    permuted = dataclasses.replace(
        costs,
        seconds=tuple(costs.seconds[o] for o in order),
        workspace_bytes=tuple(costs.workspace_bytes[o] for o in order),
    )
    schedule = tidy.without_dead_runs(
        graph,
        Schedule(tuple(Step(number[o]) for o in forward), tuple(Step(number[o]) for o in backward if o not in unsaved)),
    )
    again = len(schedule.backward) - len(late)
    deferred = sum(operators[o].phase == FORWARD for o in late)
    return Partition(graph, permuted, schedule, again, deferred)
