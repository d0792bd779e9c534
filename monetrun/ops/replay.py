"""Recomputation of operators whose second call differs from the first.

BatchNorm's second run must neither change the running statistics nor read them (the first run has changed them): it is
the same kernel without them, whose output is bitwise identical in training mode. A random operator draws the numbers of
its first run again (see ``random``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from monetrun.ops import random
from monetrun.ops.families import cudnn_batch_norm as _cudnn_batch_norm_operators  # noqa: F401  (defines them)
from monetrun.ops.registry import Call

aten = torch.ops.aten
monet = torch.ops.monet


def _batch_norm(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    x, weight, bias, _, _, training, momentum, eps = arguments
    return aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps)


def _cudnn_batch_norm(arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    x, weight, bias, _, _, _, eps, reserve_bytes = arguments
    return monet.cudnn_batch_norm_again.default, (x, weight, bias, eps, reserve_bytes)


# target -> (whether a call with these arguments has another second run, that run's target and arguments)
_SECOND_RUN: dict[Any, tuple[Callable[[Any], bool], Callable[[Any], tuple[Any, tuple[Any, ...]]]]] = {
    aten._native_batch_norm_legit_functional.default: (lambda args: args[5] is True, _batch_norm),
    monet.cudnn_batch_norm.default: (lambda args: True, _cudnn_batch_norm),
}


def reads_no_mutated_input(node: Node) -> bool:
    """Whether the second run of ``node`` reads none of the inputs that the graph mutates."""
    entry = _SECOND_RUN.get(node.target)
    return entry is not None and entry[0](node.args)


def second_run(node: Node, call: Call) -> Call:
    """The call that recomputes ``call``, which is of an implementation of ``node``."""
    entry = _SECOND_RUN.get(call.target)
    if entry is not None and entry[0](call.args):
        target, arguments = entry[1](call.args)
        call = Call(target, arguments, only=call.only)
    state = random.state_of(node)
    return call if state is None else random.again(state, call)


def gives(node: Node, call: Call, index: int) -> bool:
    """Whether ``call``, which replaces ``node``, gives the element ``index`` of the node's results."""
    return call.target in (node.target, random.draw_again) or index < len(call.target._schema.returns)
