"""Separates the tensors whose lifetimes depend on a decision of an integer program from those that are fixed.

The fixed tensors need no variables: they are a profile of bytes under the program's memory constraints.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from monetrun.core.graph import Costs, Graph
from monetrun.solve import tidy
from monetrun.solve.slot import Slot

Event = tuple[int, bool, bool]  # slot, whether it may read, whether it may write


@dataclass(frozen=True, slots=True)
class FixedTensors:
    """Where the fixed tensors are alive.

    Attributes:
        variable: the other tensors, whose lifetimes depend on a decision.
        before_bytes: per slot the bytes of fixed tensors alive before it.
        last_reads: (slot, tensor) of the last read of a fixed tensor, where running in place of it is legal.
    """

    variable: set[int]
    before_bytes: list[int]
    last_reads: set[tuple[int, int]]


def events_of(graph: Graph, slots: Sequence[Slot]) -> dict[int, list[Event]]:
    """Per tensor that is not external the slots that may read or write it, in order."""
    events: dict[int, list[Event]] = defaultdict(list)
    for index, slot in enumerate(slots):
        op = graph.operators[slot.operator]
        for t in dict.fromkeys(t for k in slot.choices for t in op.implementations[k].inputs):
            if not graph.tensors[t].external:
                events[t].append((index, True, False))
        for t in op.outputs:
            events[t].append((index, False, True))
    return events


def split(graph: Graph, slots: Sequence[Slot], events: Mapping[int, Sequence[Event]]) -> FixedTensors:
    """Separate variable from fixed tensors, and follow the fixed ones through the slots."""
    tensors = graph.tensors
    variable: set[int] = set()
    for slot in slots:
        op = graph.operators[slot.operator]
        inputs = [frozenset(op.implementations[k].inputs) for k in slot.choices]
        if not slot.compulsory:
            variable.update(op.outputs, *inputs)
        elif len(inputs) > 1:
            variable |= frozenset().union(*inputs) - frozenset.intersection(*inputs)
    last_reads: set[tuple[int, int]] = set()
    change = [0] * (len(slots) + 2)
    for t, slots_of_t in events.items():
        if t in variable:
            continue
        begin = end = -1
        for index, reads, _ in [*slots_of_t, (len(slots), False, True)]:
            if reads:
                end = index
                continue
            if tensors[t].kept:
                if begin < 0:
                    change[index + 1] += tensors[t].nbytes  # to the end
                begin = index
                continue
            if begin >= 0 and end > begin:
                last_reads.add((end, t))
                change[begin + 1] += tensors[t].nbytes
                change[end + 1] -= tensors[t].nbytes
            begin, end = index, -1
    before = list(itertools.accumulate(change))
    return FixedTensors(variable, before[: len(slots)], last_reads)


def settle_in_place(graph: Graph, costs: Costs, slots: Sequence[Slot], fixed: FixedTensors) -> list[Slot]:
    """Decide on running in place wherever that depends on fixed tensors alone."""
    settled = []
    for index, slot in enumerate(slots):
        op, choices = graph.operators[slot.operator], slot.choices
        if slot.compulsory and len(choices) > 1:
            targets = {k: op.implementations[k].in_place_of for k in choices}
            choices = tuple(
                k
                for k in choices
                if targets[k] is None or targets[k] in fixed.variable or (index, targets[k]) in fixed.last_reads
            )
            for k in choices:
                if targets[k] is not None and targets[k] not in fixed.variable:
                    choices = tuple(
                        j for j in choices if j == k or not tidy.at_least_as_good(graph, costs, op.id, k, j)
                    )
        settled.append(Slot(slot.operator, choices, slot.compulsory, slot.part))
    return settled
