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

TRACED_STRIDES = "monetrun_traced_strides"  # in the meta of a call that gives the traced strides whatever it reads

aten = torch.ops.aten

# their results have strides that do not depend on those of the gradients that they read
_OWN_STRIDES = frozenset(
    str(packet)
    for packet in (
        aten.mm,
        aten.bmm,
        aten.addmm,
        aten.baddbmm,
        aten.convolution,
        aten.convolution_backward,
        aten.embedding_dense_backward,
        aten.native_layer_norm_backward,
        aten.native_group_norm_backward,
        aten.native_batch_norm_backward,
        aten.cudnn_batch_norm_backward,
        aten.nll_loss_backward,
        aten.nll_loss2d_backward,
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
            late[node] = has_strides(node)
        elif node.op == "call_function" and any(late.get(n) for n in node.all_input_nodes):
            late[node] = str(getattr(node.target, "overloadpacket", "")) not in _OWN_STRIDES
    return late


def has_strides(node: fx.Node) -> bool:
    """Whether strides decide where a tensor's elements are: an expanded vector, or a column, is not dense."""
    return any(n > 1 for v in tensors_in(node.meta.get("val")) for n in v.shape)


def _same_strides(node: fx.Node, alternative: Alternative, late: Mapping[fx.Node, bool]) -> bool:
    """Whether an alternative gives the strides that ``node`` gives, tried on small tensors."""
    call = alternative.call
    if not late[node]:
        return alternative.overwrites is None or not late.get(alternative.overwrites)
    if not _is_elementwise(node):
        return alternative.overwrites is None
    read = [n for n in dict.fromkeys((*node.all_input_nodes, *call.nodes)) if late.get(n) and has_strides(n)]
    with unset_fake_temporarily(), torch.no_grad():
        try:
            expected = {turned: _strides(Call.of(node), turned) for turned in _choices(read)}
            if str(call.target).startswith("monet."):
                return _can_be_given(node, call, expected, late)
            return all(_strides(call, turned) == strides for turned, strides in expected.items())
        except RuntimeError:  # it does not run on such tensors
            return False


def _is_elementwise(node: fx.Node) -> bool:
    """Whether all operands have the result's shape, or are broadcast to it."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return False
    shapes = [v.shape for n in node.all_input_nodes for v in tensors_in(n.meta.get("val"))]
    return all(
        len(shape) <= result.dim() and all(a in (1, b) for a, b in zip(shape[::-1], result.shape[::-1], strict=False))
        for shape in shapes
    )


def _choices(nodes: Sequence[fx.Node]) -> Iterator[frozenset[fx.Node]]:
    """Which of some nodes arrive with turned strides: each alone, and all."""
    yield from (frozenset([node]) for node in nodes)
    if len(nodes) > 1:
        yield frozenset(nodes)


def _can_be_given(
    node: fx.Node, call: Call, expected: Mapping[frozenset[fx.Node], Any], late: Mapping[fx.Node, bool]
) -> bool:
    """Whether a call of monetrun's can give the ``expected`` strides (see ``lowering``).

    These are a gradient's, or the traced ones; which of both, is noted at the node.
    """
    gradient = next((n for n in call.nodes if late.get(n) and has_strides(n)), None)
    if gradient is not None and all(
        torch.empty_like(_small(gradient.meta["val"], gradient in c)).stride() == s for c, s in expected.items()
    ):
        return True
    node.meta[TRACED_STRIDES] = True
    return set(expected.values()) == {_small(node.meta["val"], False).stride()}


def _strides(call: Call, turned: frozenset[fx.Node]) -> Any:
    """The strides of what a call gives, where tensors among its arguments have turned strides."""
    values: dict[fx.Node, Any] = {}

    def small(node: fx.Node) -> Any:
        if node not in values:
            values[node] = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda v: _small(v, node in turned), node.meta.get("val")
            )
        return values[node]

    arguments, keywords = fx.map_arg((call.args, call.kwargs), small)
    found = tensors_in(call.target(*arguments, **keywords))
    return found[0].stride()


def _small(value: torch.Tensor, turned: bool) -> torch.Tensor:
    """A tensor of a few elements, its dimensions in the order of ``value``'s strides; turned: in the reverse one."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: strides[d], reverse=not turned)
    shape = [min(value.shape[d], 1 + value.dim() - d) for d in order]
    zeros = torch.zeros(shape, dtype=value.dtype)
    return zeros.permute([order.index(d) for d in range(value.dim())])
