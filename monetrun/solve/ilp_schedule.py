"""Converts between schedules and solutions of an integer program (``monetrun.solve.ilp_program``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monetrun.core.graph import BACKWARD, FORWARD, Graph
from monetrun.core.plan import Schedule, Step
from monetrun.solve.ilp_program import Program
from monetrun.solve.mip.canonical import Vector
from monetrun.solve.slot import Slot


def read_schedule(program: Program, value: dict[str, Vector]) -> Schedule:
    """The schedule that a solution of the program stands for."""
    parts: dict[str, list[Step]] = {FORWARD: [], BACKWARD: []}
    layout = program.layout
    for slot, run, picks in zip(layout.slots, layout.runs, layout.picks, strict=True):
        if run < 0 or value["R"][run] > 0.5:
            k = max(range(len(picks)), key=lambda k: value["M"][picks[k]]) if picks else 0
            parts[slot.part].append(Step(slot.operator, slot.choices[k]))
    return Schedule(tuple(parts[FORWARD]), tuple(parts[BACKWARD]))


def start_from(graph: Graph, program: Program, schedule: Schedule) -> dict[str, Vector] | None:
    """The values of the program's variables that stand for ``schedule``; None if its slots cannot express it."""
    layout, slots = program.layout, program.slots
    used = _choices_used(slots, schedule)
    if used is None:
        return None
    value = {name: np.zeros(size) for name, size in layout.sizes.items()}
    for k, run, picks in zip(used, layout.runs, layout.picks, strict=True):
        if k >= 0 and run >= 0:
            value["R"][run] = 1.0
        if k >= 0 and picks:
            value["M"][picks[k]] = 1.0
    for t, intervals in layout.spans.items():
        wanted = False
        for _, until, name, j in reversed(intervals):
            if until < len(slots) and used[until] >= 0:
                op = graph.operators[slots[until].operator]
                if t in op.implementations[slots[until].choices[used[until]]].inputs:
                    wanted = True
                elif t in op.outputs:
                    wanted = False
            value[name][j] = wanted
        if graph.tensors[t].kept:
            present = False
            for index, _, name, j in intervals:
                writes = t in graph.operators[slots[index].operator].outputs
                present = present or (writes and used[index] >= 0)
                value[name][j] = present
    changes = [sum(a * value[name][j] for name, j, a in terms) for terms in program.balance]
    value["U"] = np.maximum(np.cumsum(changes), 0.0)
    if layout.sizes["E"]:
        value["E"] = program.memory.excess(value)
    return value


def _choices_used(slots: Sequence[Slot], schedule: Schedule) -> list[int] | None:
    """Per slot the choice with which it runs in ``schedule``, or -1; None if the slots cannot express it."""
    used = [-1] * len(slots)
    i = 0
    for step in schedule.forward + schedule.backward:
        while i < len(slots) and slots[i].operator != step.operator:
            if slots[i].compulsory:
                return None
            i += 1
        if i == len(slots):
            return None
        choices = slots[i].choices
        used[i] = choices.index(step.implementation) if step.implementation in choices else 0
        i += 1
    return used
