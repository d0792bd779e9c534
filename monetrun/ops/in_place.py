"""Operators that may write their result over an input that dies there.

Each is element by element: the same kernel, given its own input as output, computes the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

aten = torch.ops.aten

# target -> the overload that writes over the argument of that position
_OVERWRITE_ARGUMENT: dict[Any, tuple[int, Any]] = {
    getattr(getattr(aten, name), overload): (0, getattr(getattr(aten, name + "_"), overload))
    for name, overload in [
        ("relu", "default"),
        ("hardtanh", "default"),
        ("leaky_relu", "default"),
        ("elu", "default"),
        ("silu", "default"),
        ("gelu", "default"),
        ("hardswish", "default"),
        ("hardsigmoid", "default"),
        ("sigmoid", "default"),
        ("tanh", "default"),
        ("exp", "default"),
        ("neg", "default"),
        ("sqrt", "default"),
        ("rsqrt", "default"),
        ("add", "Tensor"),
        ("sub", "Tensor"),
        ("mul", "Tensor"),
        ("div", "Tensor"),
        ("add", "Scalar"),
        ("mul", "Scalar"),
        ("div", "Scalar"),
        ("masked_fill", "Scalar"),
    ]
    if hasattr(aten, name + "_") and overload in getattr(aten, name + "_").overloads()
}

# a + b and b + a, a * b and b * a have the same bits, so these may also overwrite their second operand
_COMMUTATIVE = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}

# backward kernels that write the gradient of their input over the gradient of their output
_OVERWRITE_GRADIENT: dict[Any, tuple[Any, str]] = {
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.hardswish_backward.default: (aten.hardswish_backward.out, "out"),
    aten.hardsigmoid_backward.default: (aten.hardsigmoid_backward.grad_input, "grad_input"),
}


def _whole(value: Any) -> bool:
    """Whether a (fake) tensor is all of its storage, without overlap."""
    if not isinstance(value, torch.Tensor) or value.storage_offset() != 0:
        return False
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(value))


def overwritable(node: Node) -> list[int]:
    """Positions of the arguments of ``node`` whose storage its result may take over.

    The argument is all of its storage, has the result's shape, strides and dtype, and no other argument shares its
    storage. Whether it dies there is the schedule's business.
    """
    if node.target in _OVERWRITE_ARGUMENT:
        positions = [0]
        if node.target in _COMMUTATIVE and node.kwargs.get("alpha", 1) == 1:
            positions.append(1)
    elif node.target in _OVERWRITE_GRADIENT:
        positions = [0]
    else:
        return []
    result: Any = node.meta.get("val")
    if not _whole(result):
        return []
    storages = [a.meta["val"].untyped_storage()._cdata for a in node.all_input_nodes if _is_tensor(a)]
    legal = []
    for position in positions:
        argument = node.args[position]
        if not isinstance(argument, Node) or not _is_tensor(argument):
            continue
        value = argument.meta["val"]
        same = (value.shape, value.stride(), value.dtype) == (result.shape, result.stride(), result.dtype)
        if same and _whole(value) and storages.count(value.untyped_storage()._cdata) == 1:
            legal.append(position)
    return legal


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def emit(graph: Graph, node: Node, position: int, load: Callable[[Node], Node]) -> Node:
    """Add to ``graph`` the call that does what ``node`` does, over its argument at ``position``.

    Args:
        graph: the graph that is being built.
        node: of the joint graph; one that ``overwritable`` knows.
        position: one that ``overwritable`` gave for it.
        load: maps an argument of ``node`` to the node of ``graph`` that holds it.
    """
    arguments = torch.fx.map_arg(node.args, load)
    keywords = torch.fx.map_arg(node.kwargs, load)
    target: Any = node.target
    if target in _OVERWRITE_GRADIENT:
        overload, name = _OVERWRITE_GRADIENT[target]
        return graph.call_function(overload, arguments, {**keywords, name: arguments[0]})
    if position == 1:
        return graph.call_function(_COMMUTATIVE[target], (arguments[1], arguments[0]), keywords)
    return graph.call_function(_OVERWRITE_ARGUMENT[target][1], arguments, keywords)
