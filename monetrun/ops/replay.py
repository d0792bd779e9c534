"""How an operator runs a second time, where that differs from the first.

BatchNorm run again must leave the running statistics alone, and must not read them (the first run has changed them):
its second run is the same kernel without them, which computes the same output bits in training mode. A random operator
draws the numbers of its first run again (see ``random``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from monetrun.ops import random
from monetrun.ops.registry import Call

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


def second_run(node: Node, call: Call) -> Call:
    """What runs where ``call``, of an implementation of ``node``, runs again."""
    entry = _SECOND_RUN.get(call.target)
    if entry is not None and entry[0](call.args):
        target, arguments = entry[1](call.args)
        call = Call(target, arguments, only=call.only)
    state = random.state_of(node)
    return call if state is None else random.again(state, call)


def gives(node: Node, call: Call, index: int) -> bool:
    """Whether ``call``, which stands for ``node``, gives the element ``index`` of its results."""
    return call.target in (node.target, random.draw_again) or index < len(call.target._schema.returns)
