"""Output dtypes: where torch's fake kernels disagree with ATen, and where they are the default dtype of a moment."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from monetrun.ops.registry import value_of

aten = torch.ops.aten

# their second and third results are mean and inverse deviation
_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
)


def name_defaults(module: fx.GraphModule) -> None:
    """Name the dtype of what the forward fills with numbers where the default dtype is not torch's.

    Half-precision trainers (``bf16-true``) set the default dtype for the forward alone, and what runs again in the
    backward would get another.
    """
    if torch.get_default_dtype() is torch.float32:
        return
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if _fills(node) and isinstance(value, torch.Tensor):
            node.kwargs = {**node.kwargs, "dtype": value.dtype}


def depends_on_default(node: fx.Node) -> bool:
    """Whether the dtype of a call's result is that of the moment, which is not torch's: a quotient of integers."""
    inputs = [a.meta.get("val") for a in node.all_input_nodes]
    if torch.get_default_dtype() is torch.float32 or not inputs or node.kwargs.get("dtype") is not None:
        return False
    given, value = [v for v in inputs if isinstance(v, torch.Tensor)], node.meta.get("val")
    floats = [v for v in given if v.dtype.is_floating_point or v.dtype.is_complex]
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point and not floats


def _fills(node: fx.Node) -> bool:
    """Whether a call has no tensors, and a dtype that it could name and does not."""
    if node.op != "call_function" or node.all_input_nodes or node.kwargs.get("dtype") is not None:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.name == "dtype" and a.kwarg_only for a in schema.arguments)


def correct_norms(module: fx.GraphModule) -> None:
    """Correct the dtypes of norms whose parameters are wider than their input, as under autocast, on a CPU.

    Statistics have the dtype of the parameters, which backward kernels require, and the gradient of a group norm's
    input has the input's dtype. torch's fake kernels (2.11 to 2.15) say the opposite. The dtypes of nodes that read
    corrected ones are recomputed.
    """
    changed: set[fx.Node] = set()
    for node in module.graph.nodes:
        value: Any = node.meta.get("val")
        given = value
        inputs = node.all_input_nodes if node.op == "call_function" else []
        if not changed.isdisjoint(inputs) and all("val" in a.meta for a in inputs):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda a: a.meta["val"])
            given = node.target(*args, **kwargs)
        if node.target in _NORMS:
            x, *parameters = (v for v in map(value_of, node.args) if v is not None)
            if x.device.type == "cpu" and any(p.dtype != x.dtype for p in parameters):  # float32 parameters
                y, mean, invstd, *rest = given
                given = (y, mean.float(), invstd.float(), *rest)
        elif node.target is aten.native_group_norm_backward.default and given[0] is not None:
            given = (given[0].to(node.args[1].meta["val"].dtype), *given[1:])
        given = _corrected(value, given)
        if given is not value:
            node.meta["val"] = given
            changed.add(node)


def _corrected(value: Any, given: Any) -> Any:
    """``value``, where ``given`` replaces tensors whose dtype differs."""
    if isinstance(value, tuple | list):
        parts = tuple(map(_corrected, value, given))
        return value if all(map(operator.is_, value, parts)) else parts
    return given if isinstance(value, torch.Tensor) and value.dtype != given.dtype else value
