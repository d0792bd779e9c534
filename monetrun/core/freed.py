"""When the backward of a graph frees what does not outlive it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from monetrun.core.graph import BACKWARD, Graph, Operator
from monetrun.core.plan import Schedule


def freed_after(graph: Graph, schedule: Schedule, released: Sequence[int]) -> dict[int, int]:
    """The step of the backward (-1: none) after which each tensor that is ``released`` in it is freed.

    That is the last that reads it; of a gradient the one that has written it, or the rest of eager's call (see
    ``given_with``), and no step before those after which the gradients before it in ``released`` are freed.
    """
    last = dict.fromkeys(released, -1)
    for i, step in enumerate(schedule.backward) if last else ():
        op = graph.operators[step.operator]
        for t in (*op.implementations[step.implementation].inputs, *given_with(graph, op)):
            if t in last:
                last[t] = i
    turn = -1
    for t in gradients_among(graph, released):
        last[t] = turn = max(turn, last[t])
    return last


def freed_bytes(graph: Graph, schedule: Schedule, released: Sequence[int]) -> list[int]:
    """How many bytes of ``released`` are freed before each step of the backward, and, at last, at its end."""
    found = [0] * (len(schedule.backward) + 1)
    for t, last in freed_after(graph, schedule, released).items():
        found[last + 1] += graph.tensors[t].nbytes
    return list(itertools.accumulate(found))


def given_with(graph: Graph, op: Operator) -> tuple[int, ...]:
    """The tensors that may be gradients that eager has once ``op`` of the backward has run, and not before.

    They are its outputs and those of the operator before it, where eager runs the two as one call.
    """
    if op.phase != BACKWARD:
        return ()
    before = graph.operators[op.id - 1] if op.id else op
    return (*before.outputs, *op.outputs) if before.one_call_with_next else op.outputs


def gradients_among(graph: Graph, tensors: Sequence[int]) -> list[int]:
    """Those of ``tensors`` that the backward writes."""
    written = (t for t in tensors if not graph.tensors[t].external)
    return [t for t in written if graph.operators[graph.writer[t]].phase == BACKWARD]
