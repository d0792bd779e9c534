"""Finds the operators that a schedule may leave out of their pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from monetrun.capture.storages import mutates
from monetrun.core.graph import FORWARD, Operator, Tensor
from monetrun.ops import random
from monetrun.ops.collective_operators import is_collective


def mark_optional(
    operators: Sequence[Operator], tensors: Sequence[Tensor], nodes: Sequence[fx.Node]
) -> tuple[Operator, ...]:
    """``operators``, with ``optional`` set for those that need not run in their pass.

    Such an operator has no effect but its outputs, none of which is kept; in the forward pass it is also replayable.
    And every operator of its pass that cannot run without it, in any implementation, is optional too. Examples: a copy
    of what an activation overwrites, which only the backward pass reads; an addition that a fused kernel includes.

    Args:
        operators: of the whole graph, in order.
        tensors: of the graph.
        nodes: for each operator its fx node.
    """
    optional: set[int] = set()
    readers: dict[int, list[Operator]] = {}
    for op in reversed(operators):
        node = nodes[op.id]
        pure = not random.is_random(node) and (op.replayable if op.phase == FORWARD else not mutates(node))
        pure &= not is_collective(node.target)
        kept = any(tensors[t].kept for t in op.outputs)
        if op.outputs and pure and not kept and _can_be_left_out(op, readers, optional):
            optional.add(op.id)
        for t in {t for k in op.implementations for t in k.inputs}:
            readers.setdefault(t, []).append(op)
    return tuple(dataclasses.replace(op, optional=op.optional or op.id in optional) for op in operators)


def _can_be_left_out(op: Operator, readers: dict[int, list[Operator]], optional: set[int]) -> bool:
    """Whether all operators of ``op``'s pass that cannot run without it, in any implementation, are ``optional``."""
    missing, waiting = set(op.outputs), list(op.outputs)
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if reader.phase != op.phase or any(missing.isdisjoint(k.inputs) for k in reader.implementations):
                continue
            if not (reader.optional or reader.id in optional):
                return False
            waiting += (t for t in reader.outputs if t not in missing)
            missing.update(reader.outputs)
    return True
