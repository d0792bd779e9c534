"""Corrects output dtypes where torch's fake kernels disagree with ATen."""

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
