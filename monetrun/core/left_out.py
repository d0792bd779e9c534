"""Graphs in which something is not allowed, and what no schedule needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Operator, replace


def without(graph: Graph, left_out: Collection[tuple[int, int]]) -> Graph:
    """``graph`` with the implementations ``left_out``, pairs (operator, index), marked as not usable."""
    if not left_out:
        return graph

    def marked(op: Operator) -> Operator:
        implementations = tuple(
            dataclasses.replace(impl, usable=False) if (op.id, k) in left_out else impl
            for k, impl in enumerate(op.implementations)
        )
        return dataclasses.replace(op, implementations=implementations)

    changed = {operator for operator, _ in left_out}
    return replace(graph, operators=tuple(marked(op) if op.id in changed else op for op in graph.operators))


def without_reading_again(graph: Graph, changed: Collection[int]) -> Graph:
    """``graph``, of which no schedule reads some inputs and outputs in the backward if the plain step does not.

    What reads them in a checkpoint region of the script runs again in the plain step, too.

    Args:
        graph: as captured, or with some already left out.
        changed: ids of the tensors; the script changes them between forward and backward.
    """
    found: set[tuple[int, int]] = set()
    for op in graph.operators:
        if op.phase == BACKWARD:
            found |= {
                (op.id, k) for k, i in enumerate(op.implementations) if k and not set(changed).isdisjoint(i.inputs)
            }

    def marked(op: Operator) -> Operator:
        read = {t for i in op.implementations for t in i.inputs}
        if op.phase != FORWARD or op.checkpoint is not None or not op.replayable or read.isdisjoint(changed):
            return op
        return dataclasses.replace(op, replayable=False, reads_changed=True)

    return without(replace(graph, operators=tuple(map(marked, graph.operators))), found) if changed else graph


def dominated(graph: Graph, costs: Costs) -> set[tuple[int, int]]:
    """The implementations (operator, index) that no schedule needs.

    Another implementation of the operator can replace such a one in every schedule, with no more seconds and no more
    workspace. It reads nothing else; and it is the default, or of the same kind and as exact, so that all options that
    allow the dominated one allow it too. Of two that dominate each other the first stays.
    """
    found: set[tuple[int, int]] = set()
    for op in graph.operators:
        each = range(len(op.implementations))
        for k in each:
            better = (j for j in each if j != k and (op.id, j) not in found and _can_replace(op, costs, j, k))
            if any(j < k or not _can_replace(op, costs, k, j) for j in better):
                found.add((op.id, k))
    return found


def _can_replace(op: Operator, costs: Costs, j: int, k: int) -> bool:
    """Whether implementation j can replace k in every schedule, with no more seconds and no more workspace."""
    one, other = op.implementations[j], op.implementations[k]
    seconds, workspaces = costs.seconds[op.id], costs.workspace_bytes[op.id]
    allowed = one.name == "default" or (one.kind == other.kind and one.exact >= other.exact)
    return (
        one.usable
        and other.name != "default"
        and allowed
        and one.in_place_of == other.in_place_of
        and set(one.inputs) <= set(other.inputs)
        and seconds[j] <= seconds[k]
        and workspaces[j] <= workspaces[k]
    )
