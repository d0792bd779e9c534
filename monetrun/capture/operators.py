"""Describes a captured graph's operators: what each reads and writes, and the implementations it can use."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from monetrun.capture.marks import ONE_CALL_WITH_NEXT
from monetrun.capture.output_gradients import OVERWRITES
from monetrun.capture.regions import Regions
from monetrun.capture.result_forms import ResultForms
from monetrun.capture.storages import Storages, mutates, tensors_in
from monetrun.core.graph import BACKWARD, FORWARD, Implementation, Operator
from monetrun.ops import dtypes, random, replay
from monetrun.ops.collective_operators import is_collective
from monetrun.ops.registry import Alternative, Call

aten = torch.ops.aten
# those of torch.use_deterministic_algorithms' list that a forward runs: with atomics on CUDA
_ATOMIC = {
    aten.cumsum.default,
    aten.index_add.default,
    aten.index_reduce.default,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
}
# A single row is scanned in parts, which are combined as they come.
_SCANS = {aten.cumprod.default, aten.logcumsumexp.default}
_PUTS = (aten.index_put.default, aten.put.default)  # with atomics on a CPU; or the value that comes last stays
_KEEPS = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a joint module.

    Attributes:
        positions: for each placeholder its position among the inputs.
        static: positions of the inputs that are parameters or buffers.
    """

    positions: Mapping[fx.Node, int]
    static: frozenset[int]

    def is_static(self, node: fx.Node) -> bool:
        """Whether a node is a parameter or a buffer."""
        return self.positions.get(node, -1) in self.static


@dataclass(frozen=True)
class Described:
    """One operator of the graph and what runs it.

    Attributes:
        operator: its description.
        node: the fx node: the call of the default implementation.
        alternatives: the other implementations, in the order of ``operator.implementations[1:]``.
        measured: for each implementation the call whose cost counts as its cost.
        signatures: of these calls.
    """

    operator: Operator
    node: fx.Node
    alternatives: tuple[Alternative, ...]
    measured: tuple[Call, ...]
    signatures: tuple[str, ...]


def describe(
    phases: Iterable[tuple[str, Sequence[fx.Node]]],
    storages: Storages,
    offered: Mapping[fx.Node, Sequence[Alternative]],
    inputs: Inputs,
    regions: Regions,
    mutated: frozenset[int],
) -> list[Described]:
    """All operators, in the order in which the plain step runs them.

    Args:
        phases: the name of each phase and its calls, in order; views among them are no operators.
        storages: of the joint module.
        offered: for each node the alternatives that ``ops`` declares for it.
        inputs: of the module.
        regions: the checkpoint regions found so far.
        mutated: see ``JointGraph``.
    """
    described: list[Described] = []
    readable = {t.id for t in storages.tensors if t.external}
    forms = ResultForms(signature)
    for phase, nodes in phases:
        for node in nodes:
            written = storages.written.get(node)
            if written is None:
                continue
            usable = _usable(offered.get(node, ()), written, storages, readable, inputs)
            alternatives = tuple(a for a in usable if forms.same(node, a))
            measured = (Call.of(node), *(a.costs_as or a.call for a in alternatives))
            signatures = tuple(signature(call) for call in measured)
            op = Operator(
                id=len(described),
                name=_name(node),
                target=str(node.target),
                phase=phase,
                outputs=written,
                implementations=_implementations(node, alternatives, storages),
                replayable=phase == FORWARD and _replayable(node, storages, mutated, regions),
                optional="monetrun_optional" in node.meta,
                plain="monetrun_optional" not in node.meta,
                signature=signatures[0],
                checkpoint=regions.number(node),
                checkpoint_keeps=node.meta.get("recompute") in _KEEPS,
                one_call_with_next=ONE_CALL_WITH_NEXT in node.meta,
            )
            described.append(Described(op, node, alternatives, measured, signatures))
            readable.update(written)
    return described


def _usable(
    offered: Iterable[Alternative], written: Sequence[int], storages: Storages, readable: set[int], inputs: Inputs
) -> Iterable[Alternative]:
    """The alternatives that can run where their operator runs.

    They read only what exists by then (``readable``), overwrite neither external nor kept tensors, and their guards
    read only parameters and buffers, so that guards can be evaluated at any time.
    """
    for alternative in offered:
        if not storages.read_by(alternative.call) <= readable:
            continue
        if alternative.guard is not None and not all(inputs.is_static(n) for n in alternative.guard.nodes):
            continue
        if alternative.overwrites is not None:
            target = storages.tensors[storages.by_node[alternative.overwrites]]
            fits = bool(written) and target.nbytes == storages.tensors[written[0]].nbytes
            if not fits or target.external or target.kept:
                continue
        yield alternative


def _implementations(
    node: fx.Node, alternatives: Iterable[Alternative], storages: Storages
) -> tuple[Implementation, ...]:
    state = random.state_of(node)
    of_state = set() if state is None else {storages.by_node[state]}

    def reads(call: Call) -> tuple[int, ...]:
        return tuple(sorted(storages.read_by(call) | of_state))

    others = (
        Implementation(
            a.name,
            reads(a.call),
            in_place_of=None if a.overwrites is None else storages.by_node[a.overwrites],
            exact=bool(a.exact),
        )
        for a in alternatives
    )
    overwrites = node.meta.get(OVERWRITES)
    in_place_of = None if overwrites is None else storages.by_node[overwrites]
    return (Implementation("default", reads(Call.of(node)), in_place_of=in_place_of), *others)


def _replayable(node: fx.Node, storages: Storages, mutated: frozenset[int], regions: Regions) -> bool:
    """Whether a forward operator may run again in the backward pass and compute the same, or as eager does.

    What a checkpoint of the script's runs again, eager does, too.
    """
    if mutates(node) or "monetrun_optional" in node.meta or is_collective(node.target):
        return False
    if (random.state_of(node) is None and random.is_random(node)) or dtypes.depends_on_default(node):
        return False
    any_order = _is_in_any_order(node) and not torch.are_deterministic_algorithms_enabled()
    if any_order and (regions.number(node) is None or node.meta.get("recompute") in _KEEPS):
        return False
    reads_mutated = any(t in mutated for a in node.all_input_nodes for t in storages.of(a))
    return not reads_mutated or replay.reads_no_mutated_input(node)


def _is_in_any_order(node: fx.Node) -> bool:
    """Whether a kernel writes to the same places in any order.

    With atomics each run of a sum rounds otherwise, and so may what is chosen by its result; of several values for a
    place, which a script's indices may have, another one may stay.
    """
    value = node.meta.get("val")
    if node.target is aten.nll_loss2d_forward.default:  # (loss, total weight): without a reduction nothing is added
        return bool(node.meta["val"][0].is_cuda and node.args[3])
    if not isinstance(value, torch.Tensor):
        return False
    if node.target in _SCANS and value.is_cuda and value.is_floating_point() and value.dim():
        return bool(value.numel() == value.shape[node.args[1]])  # type: ignore[index]
    adds = value.is_floating_point() and value.is_cuda and node.target in _ATOMIC
    if node.target in _PUTS:
        accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
        if accumulates:  # on CUDA the indices are sorted first
            return value.is_floating_point() and not value.is_cuda
        given = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
        indices = [v for n in given if isinstance(n, fx.Node) for v in tensors_in(n.meta.get("val"))]
        return any(v.dtype not in (torch.bool, torch.uint8) for v in indices)  # a mask has each place once
    return adds or node.target is aten.index_copy.default or (value.is_cuda and node.target is aten.scatter.src)


def _name(node: fx.Node) -> str:
    """The path of the module that made the call, and the node's name."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return node.name
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", str(path)).replace("._modules", "")
    path = re.sub(r"\['(\w+)'\]", r".\1", path).strip(".")
    return f"{path}.{node.name}" if path else node.name


def signature(call: Call) -> str:
    """Hash of a call's target, of its arguments' shapes, strides and dtypes, and of its constants."""

    def form(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return [
                (tuple(v.shape), v.stride() if v.layout == torch.strided else (), str(v.dtype), v.device.type)
                for v in tensors_in(value.meta.get("val"))
            ]
        if isinstance(value, (tuple, list)):
            return [form(v) for v in value]
        return value.type if isinstance(value, torch.device) else str(value)  # each rank has its own device

    described = [str(call.target), form(call.args), {k: form(v) for k, v in sorted(call.kwargs.items())}]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:24]


def mark_joint_calls(
    operators: Sequence[Operator], nodes: Sequence[fx.Node], gradients: Mapping[int, int]
) -> tuple[Operator, ...]:
    """``operators``, with ``one_call_with_next`` set for those that give an input's gradient, and then read the input.

    Of a linear layer without bias, autograd's one node multiplies twice: for the weight's gradient, then, by the
    weight, for its input's.

    Args:
        operators: of the whole graph, in order.
        nodes: for each operator its fx node.
        gradients: for each gradient (an id of a tensor) what it is the gradient of.
    """
    marked = list(operators)
    for op, following in pairwise(operators):
        same = nodes[op.id].meta.get("seq_nr", -1) == nodes[following.id].meta.get("seq_nr")
        reads = any(gradients.get(t) in following.inputs for t in op.outputs)
        if op.phase == BACKWARD and same and reads:
            marked[op.id] = dataclasses.replace(op, one_call_with_next=True)
    return tuple(marked)


def mark_held(operators: Sequence[Operator], nodes: Sequence[fx.Node]) -> tuple[Operator, ...]:
    """``operators``, with ``plain_holds`` set for the last one of each node of autograd's graph in the backward.

    Autograd releases what a node has saved, and the gradients it was given, once the node has returned, and the
    gradient of what was broadcast has been summed (``Engine::evaluate_function``).

    Args:
        operators: of the whole graph, in order.
        nodes: for each operator its fx node.
    """
    overwritten = {op.implementations[0].in_place_of for op in operators}
    marked = list(operators)
    backward = (op for op in operators if op.phase == BACKWARD and op.plain)
    for number, run in groupby(backward, key=lambda op: _autograd_node(nodes[op.id])):
        *earlier, last = run
        held = {t for op in earlier for t in op.inputs}.difference(last.inputs, last.outputs, overwritten)
        if number >= 0 and held:
            marked[last.id] = dataclasses.replace(last, plain_holds=tuple(sorted(held)))
    return tuple(marked)


def _autograd_node(node: fx.Node) -> int:
    """The number of autograd's node that has made a call of the backward; -1: none, a sum of gradients for instance."""
    return -1 if node.meta.get("is_gradient_acc") else int(node.meta.get("seq_nr", -1))
