"""Replaces operators of ``torch.ops.monet`` that only describe one of ATen's by ATen's, in the modules that run.

A kernel in Python would cost the host time at every call.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from monetrun.ops.families import cudnn_batch_norm as _cudnn_batch_norm  # noqa: F401  (defines the operators)

aten = torch.ops.aten
monet = torch.ops.monet


def lower(graph: fx.Graph) -> None:
    """Have a graph that is to run call cuDNN's batch norm directly, where it runs on CUDA."""
    for target, replace in _REPLACEMENTS.items():
        for node in list(graph.find_nodes(op="call_function", target=target)):
            if _device_type(node.meta["val"]) == "cuda":
                with graph.inserting_before(node):
                    replace(graph, node)
                graph.erase_node(node)


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
