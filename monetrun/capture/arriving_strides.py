"""What a backward takes where gradients of the outputs arrive with other strides than were traced.

Costs are measured with operands as AOTAutograd's trace has them. The gradient of a loss that compares a channels-last
output with a contiguous target arrives contiguous: each gradient of the convolution copies it, and a reshape may have
to. A recorded step shows the strides (see ``gradient_forms``), and calls that read them are measured with these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map_only

from monetrun.capture.joint import JointGraph
from monetrun.capture.open_strides import has_strides, open_nodes
from monetrun.capture.operators import signature
from monetrun.capture.storages import tensors_in
from monetrun.capture.strides import VIEWS, alike, is_form_bound
from monetrun.core.graph import Costs, Requests
from monetrun.ops.families import output_gradients
from monetrun.ops.registry import Call

aten = torch.ops.aten


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
            workspace[operator][k] = max(workspace[operator][k] + beside, before - new_bytes)
            if requests and requests[operator][k].results:
                requests[operator][k] = _with_copies(requests[operator][k], beside, before)
        rows = tuple(tuple(row) for row in requests)
        return replace(costs, workspace_bytes=tuple(map(tuple, workspace)), requests=rows)


def of(joint: JointGraph, strides: Mapping[fx.Node, tuple[int, ...]]) -> Arriving:
    """``joint`` where gradients of its outputs (``strides`` by their nodes) arrive with others than were traced."""
    if not strides:
        return Arriving(joint)
    values, reshaped = _values(joint, strides)
    beside, before = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    rows, timed = [list(row) for row in joint.signatures], dict(joint.timed)
    for op, node in zip(joint.graph.operators, joint.nodes, strict=True):
        for k in range(len(op.implementations)):
            call = joint.calls[op.id, k] if k else Call.of(node)
            changed = [n for n in call.nodes if n in values and _differs(n, values[n])]
            if not changed or signature(call) != rows[op.id][k]:  # or it has the costs of another call
                continue
            if _takes_traced_strides(call, node):
                beside[op.id, k] += sum(v.nbytes for n in changed for v in tensors_in(n.meta["val"]))
            else:
                other = _with_values(call, values)
                rows[op.id][k] = signature(other)
                timed.setdefault(rows[op.id][k], (other, node))
    places = {node: i for i, node in enumerate(joint.nodes)}
    for node in reshaped:
        read, nbytes, last = _read(node, places), node.meta["val"].nbytes, _last_use(node, places)
        for place in range(min(read, default=0), max(read, default=-1) + 1):
            for k in range(len(joint.graph.operators[place].implementations)):
                if place <= last:
                    beside[place, k] += nbytes
                elif place == min(read):
                    before[place, k] += nbytes
    return Arriving(replace(joint, signatures=tuple(map(tuple, rows)), timed=timed), beside, before)


def _values(joint: JointGraph, strides: Mapping[fx.Node, tuple[int, ...]]) -> tuple[dict[fx.Node, Any], list[fx.Node]]:
    """What nodes that read the gradients give then, in fake tensors; and the reshapes among them that copy."""
    values: dict[fx.Node, Any] = {}
    reshaped = []
    late = open_nodes(joint.module.graph)
    with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True):  # type: ignore[no-untyped-call]

        def value(node: fx.Node) -> Any:
            if node not in values:
                values[node] = tree_map_only(torch.Tensor, _again, node.meta.get("val"))
            return values[node]

        for node, has_open_strides in late.items():
            if node in strides:
                traced = node.meta["val"]
                values[node] = torch.empty_strided(
                    traced.shape, strides[node], dtype=traced.dtype, device=traced.device
                )
            elif has_open_strides and node.op == "call_function" and any(n in values for n in node.all_input_nodes):
                try:
                    arguments, keywords = _mapped(Call.of(node), value)
                    if node.target in VIEWS:
                        source, sizes = arguments
                        values[node] = source.reshape(sizes)
                        if values[node].untyped_storage()._cdata != source.untyped_storage()._cdata:
                            reshaped.append(node)
                    else:
                        values[node] = node.target(*arguments, **keywords)  # type: ignore[operator]
                except (RuntimeError, NotImplementedError, ValueError):  # what follows counts as traced
                    values.pop(node, None)
    return {node: v for node, v in values.items() if node in late}, reshaped


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
    ours = str(call.target).startswith("monet.") and call.target is not output_gradients.OPERATOR
    return ours or is_form_bound(node) or call.target is aten.convolution.default


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


def _last_use(copy: fx.Node, places: Mapping[fx.Node, int]) -> int:
    """The last operator during which what ``copy`` is a copy of is there."""
    source = copy.all_input_nodes[0]
    root = source
    while root not in places and root.op == "call_function":
        root = root.all_input_nodes[0]
    if root.op == "placeholder":  # autograd holds it until the backward has run
        return len(places)
    return max(_read(source, places, but=copy), default=-1)


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
