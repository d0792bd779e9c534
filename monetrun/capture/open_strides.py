"""Which strides are known only when a backward runs, and what may run in place of an operator that reads such tensors.

Gradients of outputs arrive with strides of the script's choosing (see ``gradient_forms``). Elementwise operators pass
them on: the result of ``a + b`` has the strides of ``a``. Written over ``b`` it has those of ``b``, and what is summed
from it then differs by rounding. And monetrun's own kernels read a gradient and what the forward kept for it, a packed
mask for example, in the order of their storages: they get the gradient with the strides that were traced, and what they
give gets those of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.storages import tensors_in
from monetrun.ops.registry import Alternative, Call

aten = torch.ops.aten

# their results have strides that do not depend on those of the gradients that they read
_OWN_STRIDES = frozenset(
    str(packet)
    for packet in (
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.convolution_backward,
        aten.embedding_dense_backward,
        aten.native_layer_norm_backward,
        aten.native_group_norm_backward,
        aten.native_batch_norm_backward,
        aten.cudnn_batch_norm_backward,
    )
)


def with_the_same_strides(
    module: fx.GraphModule, offered: Mapping[fx.Node, Sequence[Alternative]]
) -> dict[fx.Node, list[Alternative]]:
    """The alternatives whose result has the default's strides however gradients of the outputs arrive.

    Args:
        module: the joint module.
        offered: the alternatives of its nodes.
    """
    known = {node: list(alternatives) for node, alternatives in offered.items()}
    late = open_nodes(module.graph)
    for node in known.keys() & late.keys():
        known[node] = [a for a in known[node] if _same_strides(node, a, late)]
    return known


def open_nodes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """The nodes that read tensors with open strides, and whether their own are."""
    late: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and is_tangent(node):
            late[node] = has_order(node)
        elif node.op == "call_function" and any(late.get(n) for n in node.all_input_nodes):
            late[node] = str(getattr(node.target, "overloadpacket", "")) not in _OWN_STRIDES
    return late


def has_order(node: fx.Node) -> bool:
    """Whether there is more than one order of a tensor's dimensions."""
    return any(sum(n > 1 for n in v.shape) > 1 for v in tensors_in(node.meta.get("val")))


def _same_strides(node: fx.Node, alternative: Alternative, late: Mapping[fx.Node, bool]) -> bool:
    """Whether an alternative gives the strides that ``node`` gives, tried on tensors without memory."""
    call = alternative.call
    if not late[node]:
        return alternative.overwrites is None or not late.get(alternative.overwrites)
    read = [n for n in dict.fromkeys((*node.all_input_nodes, *call.nodes)) if late.get(n) and has_order(n)]
    with unset_fake_temporarily(), torch.no_grad():
        return all(_strides(Call.of(node), turned) == _strides(call, turned) for turned in _choices(read))


def _choices(nodes: Sequence[fx.Node]) -> Iterator[frozenset[fx.Node]]:
    """Which of some nodes arrive with turned strides: each alone, and all."""
    yield from (frozenset([node]) for node in nodes)
    if len(nodes) > 1:
        yield frozenset(nodes)


def _strides(call: Call, turned: frozenset[fx.Node]) -> Any:
    """The strides of what a call gives, where tensors among its arguments have turned strides."""
    values: dict[fx.Node, Any] = {}

    def empty(node: fx.Node) -> Any:
        if node not in values:
            values[node] = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda v: _empty(v, node in turned), node.meta.get("val")
            )
        return values[node]

    arguments, keywords = fx.map_arg((call.args, call.kwargs), empty)
    found = tensors_in(call.target(*arguments, **keywords))
    return found[0].stride()


def _empty(value: torch.Tensor, turned: bool) -> torch.Tensor:
    if not turned:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    backwards = torch.empty(*reversed(value.shape), dtype=value.dtype, device="meta")
    return backwards.permute(*reversed(range(value.dim())))
