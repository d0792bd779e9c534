"""What a backward takes where gradients of the outputs arrive with other strides than were traced.

Costs are measured with operands as AOTAutograd's trace has them. The gradient of a loss that compares a channels-last
output with a contiguous target arrives contiguous: each gradient of the convolution copies it, and a reshape may have
to. A recorded step shows the strides (see ``gradient_forms``), and calls that read them are measured with these.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from monetrun.capture.absent_terms import is_sum_of_two
from monetrun.capture.joint import JointGraph
from monetrun.capture.open_strides import has_strides, open_nodes
from monetrun.capture.operators import signature
from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.storages import tensors_in
from monetrun.capture.strides import VIEWS, alike, dense, needs_traced_strides
from monetrun.core.graph import Costs, Requests
from monetrun.ops.families import output_gradients
from monetrun.ops.registry import Call

_log = logging.getLogger("monetrun")

# Whether autograd gives a compiled backward its gradients away; else it holds them until that has run.
GIVES_AWAY = hasattr(torch.autograd.Function, "boxed_grads_call")


@dataclass(frozen=True, slots=True)
class Arriving:
    """A joint graph whose calls read gradients with the strides that these arrive with.

    Attributes:
        joint: with the signatures, and the calls to measure, of such operands beside the traced ones.
        beside: by (operator, implementation): bytes of copies of operands, which are there while the call runs.
        before: the same of copies that are made before the call, in place of what they are copied from.
    """

    joint: JointGraph
    beside: Mapping[tuple[int, int], int] = field(default_factory=dict)
    before: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def with_copies(self, costs: Costs) -> Costs:
        """``costs`` of the graph, with the copies counted as workspace."""
        places = dict.fromkeys((*self.beside, *self.before))
        if not places:
            return costs
        workspace, requests = [list(row) for row in costs.workspace_bytes], [list(row) for row in costs.requests]
        for operator, k in places:
            beside, before = self.beside.get((operator, k), 0), self.before.get((operator, k), 0)
            new_bytes = _new_bytes(self.joint, operator, k)
            workspace[operator][k] = max(workspace[operator][k] + beside, before + beside - new_bytes)
            if requests and requests[operator][k].results:
                requests[operator][k] = _with_copies(requests[operator][k], beside, before)
        rows = tuple(tuple(row) for row in requests)
        return replace(costs, workspace_bytes=tuple(map(tuple, workspace)), requests=rows)


def of(joint: JointGraph, given: Mapping[fx.Node, tuple[int, ...] | None], freed: Collection[fx.Node] = ()) -> Arriving:
    """``joint`` where gradients of its outputs arrive with other strides than were traced, or not at all.

    Args:
        joint: a graph.
        given: the strides of such gradients, by their nodes; None: it is absent.
        freed: the gradients that the backward frees once they were read.
    """
    if not given:
        return Arriving(joint)
    found, late = _Values(given), open_nodes(joint.module.graph)
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]
    # the script may be under an autocast now: graphs have their casts
    with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast(), fake:
        for node in joint.module.graph.nodes:
            found.add(node, has_open_strides=late.get(node, False))
    values = found.values
    beside, before = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    rows, timed = [list(row) for row in joint.signatures], dict(joint.timed)
    places = {node: i for i, node in enumerate(joint.nodes)}
    for op, node in zip(joint.graph.operators, joint.nodes, strict=True):
        for k in range(len(op.implementations)):
            call = joint.calls[op.id, k] if k else Call.of(node)
            changed = [n for n in call.nodes if n in values and _differs(n, values[n])]
            if not changed or signature(call) != rows[op.id][k]:  # or it has the costs of another call
                continue
            if _takes_traced_strides(call, node):
                for n in changed:
                    ends = (root := _root(n, places)) in freed and op.id == max(_read(root, places))
                    (before if ends else beside)[op.id, k] += sum(v.nbytes for v in tensors_in(n.meta["val"]))
            else:
                other = _with_values(call, values)
                rows[op.id][k] = signature(other)
                timed.setdefault(rows[op.id][k], (other, node))
    used = {*joint.exactness_trials, *(signature_ for row in rows for signature_ in row)}
    timed = {signature_: call for signature_, call in timed.items() if signature_ in used}
    for node in found.reshaped:
        read, nbytes, last = _read(node, places), node.meta["val"].nbytes, _last_use(node, places, freed)
        for place in range(min(read, default=0), max(read, default=-1) + 1):
            for k in range(len(joint.graph.operators[place].implementations)):
                if place <= last:
                    beside[place, k] += nbytes
                elif place == min(read):
                    before[place, k] += nbytes
    return Arriving(replace(joint, signatures=tuple(map(tuple, rows)), timed=timed), beside, before)


def given_as(joint: JointGraph, strides: Sequence[tuple[int, ...] | None]) -> dict[fx.Node, tuple[int, ...] | None]:
    """What ``of`` is given where gradients arrive as they have at other sizes.

    Args:
        joint: a graph.
        strides: with which the gradients of its outputs, in order, arrived there; None: it was absent.
    """
    found: dict[fx.Node, tuple[int, ...] | None] = {}
    tangents = joint.tangents
    for node, known in zip(tangents, strides, strict=True) if len(tangents) == len(strides) else ():
        value = node.meta.get("val")
        if known is None:
            found[node] = None
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided and value.dim() == len(known):
            order = sorted(range(len(known)), key=known.__getitem__, reverse=True)
            given = tuple(dense(value.shape, order))
            if 0 not in known and not alike(value.shape, given, value.stride()):
                found[node] = given
    return found


class _Values:
    """What nodes that read the gradients give then, in fake tensors; and the reshapes among them that copy."""

    def __init__(self, given: Mapping[fx.Node, tuple[int, ...] | None]) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.reshaped: list[fx.Node] = []
        self._given = given
        self._absent = {node for node, strides in given.items() if strides is None}
        self._late: set[fx.Node] = set()  # what depends on gradients of outputs
        self._as_traced: dict[fx.Node, Any] = {}

    def add(self, node: fx.Node, *, has_open_strides: bool) -> None:
        """Go on with the next node."""
        read = node.all_input_nodes
        if (node.op == "placeholder" and is_tangent(node)) or not self._late.isdisjoint(read):
            self._late.add(node)
        gone = self._absent.intersection(read)
        if (strides := self._given.get(node)) is not None:
            v = node.meta["val"]
            self.values[node] = torch.empty_strided(v.shape, strides, dtype=v.dtype, device=v.device)
        elif node.op != "call_function" or node not in self._late:
            return
        elif gone and not any(n in self._late and n not in gone for n in read):
            self._absent.add(node)
        elif gone and is_sum_of_two(node):  # see ``absent_terms``
            self._keep(node, self._term)
        elif has_open_strides and not self.values.keys().isdisjoint(read):
            self._keep(node, self._result)

    def _keep(self, node: fx.Node, result: Callable[[fx.Node], Any]) -> None:
        try:
            self.values[node] = result(node)
        except Exception as error:  # noqa: BLE001 - a library's operator may raise anything; what follows counts as traced
            _log.debug("%s is not followed with the strides that arrive: %s", node.name, error)

    def _term(self, total: fx.Node) -> Any:
        (term,) = (n for n in total.all_input_nodes if n not in self._absent)
        return self._value(term).reshape(total.meta["val"].shape)

    def _result(self, node: fx.Node) -> Any:
        arguments, keywords = _mapped(Call.of(node), self._value)
        if node.target not in VIEWS:
            return node.target(*arguments, **keywords)  # type: ignore[operator]
        source, sizes = arguments
        result = source.reshape(sizes)
        if result.untyped_storage()._cdata != source.untyped_storage()._cdata:
            self.reshaped.append(node)
        return result

    def _value(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        if node not in self._as_traced:
            self._as_traced[node] = tree_map_only(torch.Tensor, _again, node.meta.get("val"))
        return self._as_traced[node]


def _mapped(call: Call, to: Callable[[fx.Node], Any]) -> tuple[Any, Any]:
    return fx.map_arg((call.args, call.kwargs), to)  # type: ignore[return-value]


def _again(value: torch.Tensor) -> torch.Tensor:
    """A tensor of this form, fake in the present mode."""
    if value.layout != torch.strided:
        raise NotImplementedError(value.layout)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _differs(node: fx.Node, value: Any) -> bool:
    traced, given = tensors_in(node.meta.get("val")), tensors_in(value)
    return has_strides(node) and any(
        not alike(t.shape, t.stride(), g.stride()) for t, g in zip(traced, given, strict=False)
    )


def _takes_traced_strides(call: Call, node: fx.Node) -> bool:
    """Whether a call is given copies of its operands, with the strides that were traced (see ``lowering``)."""
    return call.target is not output_gradients.OPERATOR and needs_traced_strides(node, call.target)


def _with_values(call: Call, values: Mapping[fx.Node, Any]) -> Call:
    """The same call of operands that have these values."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}

    def shadow(node: fx.Node) -> fx.Node:
        if node not in values:
            return node
        if node not in made:
            made[node] = graph.placeholder(node.name)
            made[node].meta = {**node.meta, "val": values[node]}
        return made[node]

    arguments, keywords = _mapped(call, shadow)
    return replace(call, args=arguments, kwargs=keywords)


def _last_use(copy: fx.Node, places: Mapping[fx.Node, int], freed: Collection[fx.Node]) -> int:
    """The last operator during which what ``copy`` is a copy of is there."""
    root = _root(copy.all_input_nodes[0], places)
    if root.op == "placeholder" and root not in freed:  # autograd, or the script, holds it until the backward has run
        return len(places)
    return max(_read(root, places, but=copy), default=-1)


def _root(node: fx.Node, places: Mapping[fx.Node, int]) -> fx.Node:
    """What a view is a view of."""
    while node not in places and node.op == "call_function":
        node = node.all_input_nodes[0]
    return node


def _read(source: fx.Node, places: Mapping[fx.Node, int], but: fx.Node | None = None) -> list[int]:
    """The operators (by ``places``) that read a node or views of it, without those that read it through ``but``."""
    found, views = [], [source]
    while views:
        for user in views.pop().users:
            if user in places:
                found.append(places[user])
            elif user.op == "call_function" and user is not but:
                views.append(user)
    return found


def _new_bytes(joint: JointGraph, operator: int, k: int) -> int:
    """What an implementation allocates for its outputs."""
    op = joint.graph.operators[operator]
    if op.implementations[k].in_place_of is not None:
        return 0
    return sum(joint.graph.tensors[t].nbytes for t in op.outputs)


def _with_copies(own: Requests, beside: int, before: int) -> Requests:
    """``own``, with ``before`` bytes that are there before it, and ``beside`` that are freed after it."""
    made = [n for n in (before, beside) if n]
    first = [before, -1] if before else []
    last = [-len(made)] if beside else []
    shifted = [n if n > 0 else n - len(made) for n in own.sizes]
    sizes = (*first, *([beside] if beside else []), *shifted, *last)
    return Requests(sizes, tuple(k + len(made) for k in own.results))
