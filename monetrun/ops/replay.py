"""How an operator runs a second time, where that differs from the first.

BatchNorm run again must leave the running statistics alone, and must not read them (the first run has changed them):
its second run is the same kernel without them, which computes the same output bits in training mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def _batch_norm(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    x, weight, bias, _, _, training, momentum, eps = arguments
    return aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)


# target -> (may this call be replaced?, (arguments) -> (target, arguments) of the second run)
_SECOND_RUN: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], tuple[Any, tuple[Any, ...]]]]] = {
    aten._native_batch_norm_legit_functional.default: (lambda args: args[5] is True, _batch_norm),
}


def reads_no_mutated_input(node: Node) -> bool:
    """Whether the second run of ``node`` does not read the inputs that the graph changes."""
    entry = _SECOND_RUN.get(node.target)
    return entry is not None and entry[0](node.args)


def second_run(node: Node) -> tuple[Any, tuple[Any, ...]]:
    """Target and arguments (nodes of the joint graph among them) for running ``node`` again."""
    entry = _SECOND_RUN.get(node.target)
    if entry is None or not entry[0](node.args):
        return node.target, node.args
    return entry[1](node.args)
