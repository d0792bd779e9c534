"""Makes of a module what eager would call: without what AOTAutograd's functional graph needs, and nobody reads.

Operators of ``torch.ops.monet`` that only describe one of ATen's become ATen's: a kernel in Python would cost the host
time at every call. Buffers are updated in place, without a copy and its copy back, and views of views that come to the
same are left out: each call costs the host microseconds, and each kernel the device.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from monetrun.capture.open_strides import TRACED_STRIDES, has_strides, open_nodes
from monetrun.capture.strides import (
    VIEWS,
    is_foreign,
    is_form_bound,
    needs_traced_strides,
    with_strides,
    with_strides_of,
)
from monetrun.ops.families import cudnn_batch_norm as _cudnn_batch_norm  # noqa: F401  (defines the operators)
from monetrun.ops.families import output_gradients

aten = torch.ops.aten
monet = torch.ops.monet

# monetrun's operators whose result has strides of its own, as that of the operator whose place they take
_OWN_LAYOUT = re.compile("norm|pool|convolution|affine|softmax")


def lower(graph: fx.Graph) -> None:
    """Have a graph that is to run call cuDNN's batch norm directly, where it runs on CUDA, and write in place."""
    for node in graph.find_nodes(op="call_function", target=output_gradients.OPERATOR):
        *arguments, in_place = node.args
        if in_place:
            node.target, node.args = output_gradients.add_output_gradient_, tuple(arguments)
    for target, replace in _REPLACEMENTS.items():
        for node in list(graph.find_nodes(op="call_function", target=target)):
            if _device_type(node.meta["val"]) == "cuda":
                with graph.inserting_before(node):
                    replace(graph, node)
                graph.erase_node(node)
    _leave_out_views(graph)
    _take_any_strides(graph)
    _update_in_place(graph)


def _device_type(value: Any) -> str:
    first: torch.Tensor = value[0] if isinstance(value, (tuple, list)) else value
    return first.device.type


def _call(graph: fx.Graph, like: fx.Node, target: Any, *arguments: Any) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta = {k: v for k, v in like.meta.items() if k != "val"}
    return node


def _training(graph: fx.Graph, node: fx.Node) -> None:
    """It writes the running statistics that it is given: they are copies, which are the new statistics then."""
    x, weight, bias, *statistics, momentum, eps, _ = node.args
    copies = [s if s is None else _call(graph, node, aten.clone.default, s) for s in statistics]
    new = _call(graph, node, aten.cudnn_batch_norm.default, x, weight, bias, *copies, True, momentum, eps)
    for user in list(node.users):
        index: Any = user.args[1]
        copy = copies[index - 4] if index >= 4 else None
        if copy is not None:
            user.replace_all_uses_with(copy)
            graph.erase_node(user)
        else:
            user.replace_input_with(node, new)


def _again(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, eps, _ = node.args
    arguments = (x, weight, bias, None, None, True, 0.0, eps)
    node.replace_all_uses_with(_call(graph, node, aten.cudnn_batch_norm.default, *arguments))


def _inference(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, mean, var, eps = node.args
    found = _call(graph, node, aten.cudnn_batch_norm.default, x, weight, bias, mean, var, False, 0.0, eps)
    node.replace_all_uses_with(_call(graph, node, operator.getitem, found, 0))


_REPLACEMENTS = {
    monet.cudnn_batch_norm.default: _training,
    monet.cudnn_batch_norm_again.default: _again,
    monet.cudnn_batch_norm_inference.default: _inference,
}


# ---- outputs


def own_outputs(graph: fx.Graph, count: int) -> None:
    """Detach those of the first ``count`` results that are views of what the graph has allocated.

    Where a call writes over its operand, its result may be a view of another's, which eager's is not; and autograd lets
    no script change a view in place that such a call gives.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for i, node in enumerate(results[:count]):
        if isinstance(node, fx.Node) and _is_view(node):
            with graph.inserting_before(output):
                results[i] = graph.call_function(aten.detach.default, (node,))
            results[i].meta = dict(node.meta)
    output.args = (tuple(results),)


def share_output_versions() -> None:
    """While AOTAutograd compiles a forward: such results come to the script as they are.

    It would give them another counter of changes in place than what they are views of: nobody would see that the script
    changes what the backward reads.
    """
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is not None:
        metadata.unsafe_view_out_indices, metadata.num_unsafe_view_outputs = [], 0


def _is_view(node: fx.Node) -> bool:
    """Whether a call gives a view of what another one has allocated; not of one of the graph's inputs."""
    source, whole = _aliased(node)
    if source is None:
        return False
    return _is_view(source) if whole else _root(source).op != "placeholder"


def _root(node: fx.Node) -> fx.Node:
    """The call that has allocated what ``node`` is or is a view of, or the graph's input."""
    source, _ = _aliased(node)
    return node if source is None else _root(source)


def _aliased(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """What a call gives a view of, None where it allocates; and whether it gives just that, written over or an item."""
    if node.op != "call_function":
        return None, False
    if node.target is operator.getitem or node.target is aten.reshape.default:
        return node.args[0], node.target is operator.getitem  # type: ignore[return-value]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None, False
    given = {name for a in schema.returns if a.alias_info for name in a.alias_info.before_set}
    for argument, value in zip(schema.arguments if given else (), node.args, strict=False):
        if argument.alias_info is not None and given & set(argument.alias_info.before_set):
            return (value, argument.alias_info.is_write) if isinstance(value, fx.Node) else (None, False)
    return None, False


# ---- calls that nothing needs


def _leave_out_views(graph: fx.Graph) -> None:
    """Leave out detachments, since autograd is not there, and pairs of transpositions."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        _replace(node, node.all_input_nodes[0])
    for node in graph.find_nodes(op="call_function", target=aten.t.default):
        (source,) = node.all_input_nodes
        if source.target is aten.t.default:
            _replace(node, source.all_input_nodes[0])


def _replace(view: fx.Node, source: fx.Node) -> None:
    """Read ``source`` in place of ``view``, except where that would make an input an output."""
    readers = [u for u in view.users if u.op != "output" or source.op == "call_function"]
    for reader in readers:
        reader.replace_input_with(view, source)
    while view.op == "call_function" and not view.users:
        graph, given = view.graph, view.all_input_nodes
        graph.erase_node(view)
        if given != [source] and given:
            view = given[0]
        else:
            break


def _take_any_strides(graph: fx.Graph) -> None:
    """Have calls take what is computed from gradients of outputs: these may arrive with other strides than traced.

    Autograd's formulas reshape; where the traced strides have a view, only that is in the graph.
    """
    late = open_nodes(graph)
    for node in late:
        if node.target in VIEWS:
            node.target = aten.reshape.default
        elif is_form_bound(node) or node.target is aten.convolution.default:
            _with_traced_strides(graph, node, node.args[0])  # type: ignore[arg-type]
        elif node.target is not output_gradients.OPERATOR and needs_traced_strides(node, node.target):
            sources = [n for n in node.all_input_nodes if late.get(n) and has_strides(n)]
            for source in sources:
                _with_traced_strides(graph, node, source)
            own_layout = is_foreign(node.target) or _OWN_LAYOUT.search(str(node.target))
            if sources and TRACED_STRIDES not in node.meta and not own_layout:
                _with_strides_of(graph, node, sources[0])


def _with_traced_strides(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Have ``node`` read ``source`` with the strides that were traced."""
    value = source.meta["val"]
    if not isinstance(value, torch.Tensor):
        return  # the one result of an implementation of an operator that has several, in a layout of its own
    with graph.inserting_before(node):
        traced = _call(graph, source, with_strides, source, list(value.stride()))
    traced.meta["val"] = value
    node.replace_input_with(source, traced)


def _with_strides_of(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    """Have what ``node`` computes from ``source``, element by element, read with the strides of that."""
    with graph.inserting_after(node):
        result = _call(graph, node, with_strides_of, node, source)
    result.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)


def _update_in_place(graph: fx.Graph) -> None:
    """Write new running statistics and counts of batches, on CUDA, where they are kept."""
    counts: dict[tuple[Any, torch.dtype, torch.device], list[tuple[fx.Node, fx.Node, fx.Node]]] = {}
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        kept, new = copy.args[0], copy.args[1]
        if copy.users or len(copy.args) != 2 or not _is_buffer(kept):
            continue
        if _is_only_for_batch_norm(new, kept, copy):
            new.replace_all_uses_with(kept, delete_user_cb=lambda user, copy=copy: user is not copy)
            graph.erase_node(copy)
            graph.erase_node(new)
        elif new.target is aten.add.Tensor and _adds_number(new, kept):
            value = kept.meta["val"]
            counts.setdefault((new.args[1], value.dtype, value.device), []).append((kept, new, copy))
    for (number, *_), found in counts.items():
        _count_together(graph, number, found)


def _is_buffer(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) and node.op == "placeholder" else None
    return isinstance(value, torch.Tensor) and value.is_cuda


def _is_only_for_batch_norm(new: Any, kept: fx.Node, copy: fx.Node) -> bool:
    """Whether ``new`` is a clone of ``kept`` that batch norms write and ``copy`` copies back; nothing reads either."""
    return (
        isinstance(new, fx.Node)
        and new.target is aten.clone.default
        and new.args == (kept,)
        and not new.kwargs
        and set(kept.users) == {new, copy}
        and all(user is copy or user.target is aten.cudnn_batch_norm.default for user in new.users)
    )


def _adds_number(new: fx.Node, kept: fx.Node) -> bool:
    value, result = kept.meta["val"], new.meta.get("val")
    return (
        len(new.args) == 2
        and new.args[0] is kept
        and isinstance(new.args[1], (int, float))
        and not new.kwargs
        and len(new.users) == 1
        and isinstance(result, torch.Tensor)
        and (result.dtype, result.shape) == (value.dtype, value.shape)
    )


def _count_together(graph: fx.Graph, number: Any, found: Iterable[tuple[fx.Node, fx.Node, fx.Node]]) -> None:
    """Add ``number`` to all of these where the last of them was written: one call, and a kernel for many of them."""
    kept, new, copies = (list(nodes) for nodes in zip(*found, strict=True))
    with graph.inserting_before(copies[-1]):
        _call(graph, copies[-1], aten._foreach_add_.Scalar, kept, number)
    for node in (*copies, *new):
        graph.erase_node(node)
