"""Slots: the places of an integer program at which an operator runs or may run, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.options import Options


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the order at which an operator runs (``compulsory``) or may run.

    Attributes:
        operator: its id.
        choices: indices of the implementations that it may use.
        compulsory: the operator certainly runs here.
        part: the pass of the slot; a slot for rerunning a forward operator is in the backward one.
    """

    operator: int
    choices: tuple[int, ...]
    compulsory: bool
    part: str


def reads_of(graph: Graph, slot: Slot) -> list[tuple[int, ...]]:
    """What each choice of ``slot`` reads."""
    implementations = graph.operators[slot.operator].implementations
    return [implementations[k].inputs for k in slot.choices]


def allowed_choices(graph: Graph, operator: int, options: Options) -> tuple[int, ...]:
    """Indices of the implementations of ``operator`` that ``options`` allow and that are legal in some schedule."""
    op = graph.operators[operator]
    allowed = [0]
    for k, impl in enumerate(op.implementations[1:], 1):
        if not impl.allowed_by(options.implementations):
            continue
        if impl.in_place_of is not None:
            target = graph.tensors[impl.in_place_of]
            if target.external or target.kept or target.nbytes != graph.tensors[op.outputs[0]].nbytes:
                continue
        allowed.append(k)
    return tuple(allowed)


def all_slots(graph: Graph, options: Options) -> list[Slot]:
    """The slots of the paper's program: each replayable forward operator once before every backward operator."""
    choices = [allowed_choices(graph, op.id, options) for op in graph.operators]
    forward = [op for op in graph.operators if op.phase == FORWARD]
    slots = [Slot(op.id, choices[op.id], not op.optional, FORWARD) for op in forward]
    for op in graph.operators[len(forward) :]:
        if options.recompute:
            slots += [Slot(again.id, choices[again.id], False, BACKWARD) for again in forward if again.replayable]
        slots.append(Slot(op.id, choices[op.id], not op.optional, BACKWARD))
    return slots


def necessary(graph: Graph, options: Options) -> set[int]:
    """The operators that every schedule runs: compulsory ones, and the writers of what these read in any case."""
    found = {op.id for op in graph.operators if not op.optional}
    for op in reversed(graph.operators):
        if op.id in found:
            reads = (set(op.implementations[k].inputs) for k in allowed_choices(graph, op.id, options))
            found.update(graph.writer[t] for t in set.intersection(*reads) if graph.writer[t] >= 0)
    return found


def floor_seconds(graph: Graph, costs: Costs, options: Options) -> float:
    """What every schedule costs at least: each necessary operator once, with its cheapest allowed implementation."""
    return sum(min(costs.seconds[i][k] for k in allowed_choices(graph, i, options)) for i in necessary(graph, options))


def without_useless(graph: Graph, slots: Sequence[Slot]) -> list[Slot]:
    """Remove the slots none of whose outputs can be read before they are certainly written again.

    One sweep from the last slot: what a removed slot would have read is then not wanted either. No useful schedule is
    lost; about half of the paper's R are removed.
    """
    wanted: set[int] = set()
    left = []
    for slot in reversed(slots):
        op = graph.operators[slot.operator]
        if not slot.compulsory and not any(
            t in wanted and (op.optional or not graph.tensors[t].kept) for t in op.outputs
        ):
            continue
        left.append(slot)
        if slot.compulsory:
            wanted.difference_update(op.outputs)
        wanted.update(t for k in slot.choices for t in op.implementations[k].inputs)
    return left[::-1]
