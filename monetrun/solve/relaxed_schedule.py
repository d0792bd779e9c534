"""Converts between schedules and solutions of a relaxed program (``monetrun.solve.relaxation``)."""

from __future__ import annotations

import numpy as np

from monetrun.core.graph import BACKWARD, FORWARD, Graph, Operator, counterpart
from monetrun.core.plan import Schedule, Step
from monetrun.solve import tidy
from monetrun.solve.mip.canonical import Vector
from monetrun.solve.relaxation import Relaxation


def relaxed_schedule(graph: Graph, relaxation: Relaxation, value: dict[str, Vector]) -> Schedule | None:
    """A solution of a relaxed program as a schedule in which every run is as late as it can be.

    Before a point, what takes most room beside what it leaves runs first. The schedule follows all rules of the replay
    except the budget. None if it cannot be written (a random operator would have to rerun).
    """
    writer = _Writer(graph, relaxation, value)
    segments = relaxation.columns.segments
    if not all(writer.write_segment(s) for s in range(segments.count + 1)):
        return None
    return tidy.without_dead_runs(graph, Schedule(tuple(writer.forward), tuple(writer.backward)))


class _Writer:
    """Writes a schedule segment by segment.

    Attributes:
        forward: the steps of the forward pass so far.
        backward: the steps of the backward pass so far.
        present: the tensors that are in memory.
        once_more: operators that are to run twice in the segment, and have not yet.
    """

    def __init__(self, graph: Graph, relaxation: Relaxation, value: dict[str, Vector]) -> None:
        self.graph, self.relaxation, self.value = graph, relaxation, value
        self.columns = relaxation.columns
        self.segments = relaxation.columns.segments
        self.forward: list[Step] = []
        self.backward: list[Step] = []
        self.present: set[int] = set(self.segments.free)
        self.once_more: set[int] = set()

    def write_segment(self, s: int) -> bool:
        """Write the steps of segment s; False if that is impossible."""
        points, operators = self.segments.points, self.graph.operators
        begin = points[s - 1] + 1 if s else 0
        end = points[s] + 1 if s < len(points) else len(operators)
        alive = {t for (t, at), column in self.columns.alive.items() if at == s + 1 and self._is_on("S", column)}
        twice = self.relaxation.order.twice
        self.once_more = {w for (w, at), column in twice.items() if at == s and self._is_on("D", column)}
        for op in operators[begin:end]:
            needed_after = alive if op.id + 1 == end else set[int]()
            write = self._write_optional(op, s) if op.optional else self._write_compulsory(op, s, needed_after)
            if not write:
                return False
        if s < len(points):
            self.present = alive | self.segments.free
        return True

    def _write_optional(self, op: Operator, s: int) -> bool:
        """Write an optional operator's first run, if it has one."""
        if not self._is_on("R", self.columns.runs.get((op.id, s))):
            return True
        k = self._choice(op.id, self.columns.picks_again.get((op.id, s), ()))
        reads = op.implementations[k].inputs
        if op.phase == FORWARD:
            possible = self.present.issuperset(reads)
        else:
            possible = all(self._provide(t, s) for t in reads)
        return possible and self._write(op, k)

    def _write_compulsory(self, op: Operator, s: int, needed_after: set[int]) -> bool:
        """Write a compulsory operator, before it what it reads and what is needed after it."""
        k = self._choice(op.id, self.columns.picks.get(op.id, ()))
        reads = op.implementations[k].inputs
        if op.phase != BACKWARD:
            return self.present.issuperset(reads) and self._write(op, k)
        needed = set(reads)
        needed |= needed_after - set(op.outputs)
        places = {t: (*self._room_of(t, needed), t) for t in needed}
        return all(self._provide(t, s) for t in sorted(needed, key=places.__getitem__)) and self._write(op, k)

    def _write(self, op: Operator, k: int) -> bool:
        (self.forward if op.phase == FORWARD else self.backward).append(Step(op.id, k))
        self.present.update(op.outputs)
        return True

    def _provide(self, t: int, s: int) -> bool:
        """Rerun what it takes to have tensor t; False if that is impossible."""
        wanted = [t]  # each is read by the operator that writes the one before: thousands, in a deep network
        while wanted:
            if wanted[-1] in self.present:
                wanted.pop()
                continue
            op = self.graph.operators[self.graph.writer[wanted[-1]]]
            if not op.replayable:
                return False
            k = self._choice(op.id, self.columns.picks_again.get((op.id, s), ()))
            reads = op.implementations[k].inputs
            missing = next((u for u in reads if u not in self.present), None)
            if missing is not None:  # providing one may free another, once
                wanted.append(missing)
                continue
            self.backward.append(Step(op.id, k))
            self.present.update(op.outputs)
            again = {self.graph.writer[u] for u in reads} & self.once_more
            self.once_more.difference_update(again)
            self.present.difference_update(*(self.graph.operators[w].outputs for w in again))
        return True

    def _room_of(self, t: int, alive: set[int]) -> tuple[bool, int]:
        """Whether t is written once more later, and minus the bytes that providing it takes beside those that stay."""
        graph = self.graph
        order: dict[int, None] = {}

        waiting = [(t, False)]
        while waiting:
            u, are_read = waiting.pop()
            w = graph.writer[u]
            if are_read:
                order.setdefault(w)
            elif u not in self.present and w not in order:
                waiting.append((u, True))
                waiting += [(v, False) for v in reversed(graph.operators[w].inputs)]
        last = {u: w for w in order for u in graph.operators[w].inputs}
        held = most = 0
        for w in order:
            held += sum(graph.tensors[u].nbytes for u in graph.operators[w].outputs)
            most = max(most, held)
            read = (
                u for u in graph.operators[w].inputs if graph.writer[u] in order and last[u] == w and u not in alive
            )
            held -= sum(graph.tensors[u].nbytes for u in read)
        return graph.writer[t] in self.once_more, held - most

    def _choice(self, i: int, picks: tuple[int, ...]) -> int:
        """The implementation that the solution chose for operator i."""
        implementations = [k for _, k in self.segments.read_sets[i]]
        chosen = [k for k, column in zip(implementations, picks, strict=False) if self._is_on("M", column)]
        k = chosen[0] if chosen else implementations[0]
        return counterpart(self.graph.operators[i], k)  # whether it may run in place is not modelled

    def _is_on(self, name: str, column: int | None) -> bool:
        return column is not None and bool(self.value[name][column] > 0.5)


def start_from(graph: Graph, relaxation: Relaxation, schedule: Schedule) -> dict[str, Vector]:
    """The values of the program's variables that stand for ``schedule``: feasible if its memory at the points is."""
    columns = relaxation.columns
    value = {name: np.zeros(len(of)) for name, of in (("R", columns.runs), ("S", columns.alive), ("M", columns.picked))}
    points = columns.segments.points
    place_of = {point: s for s, point in enumerate(points)}
    steps = schedule.forward + schedule.backward
    again: list[bool] = []
    ran: dict[int, list[int]] = {}
    place = 0
    at: list[int] = []  # the segment of each step
    for i, step in enumerate(steps):
        at.append(place)
        op = graph.operators[step.operator]
        again.append(op.optional or (op.phase == FORWARD and i >= len(schedule.forward)))
        if again[i]:
            ran.setdefault(place, []).append(op.id)
            _switch_on(value["R"], columns.runs.get((op.id, place)))
        elif op.id in place_of:
            place = place_of[op.id] + 1
    wanted: set[int] = set()
    for i in range(len(steps) - 1, -1, -1):
        op = graph.operators[steps[i].operator]
        reads = op.implementations[steps[i].implementation].inputs
        after = {t for t in op.outputs if t in wanted}
        wanted.difference_update(op.outputs)
        wanted.update(reads)
        if at[i] < len(points) and points[at[i]] == op.id:
            for t in wanted | after:
                _switch_on(value["S"], columns.alive.get((t, at[i] + 1)))
        picks = columns.picks_again.get((op.id, at[i]), ()) if again[i] else columns.picks.get(op.id, ())
        if picks and not value["M"][list(picks)].any():
            # the read set that is used, or a cheaper one within it
            sets = zip(picks, columns.segments.read_sets[op.id], strict=True)
            used = (column for column, (_, k) in sets if set(op.implementations[k].inputs) <= set(reads))
            _switch_on(value["M"], next(used, None))
    value["Z"] = np.zeros(len(relaxation.through))
    for (t, s), column in relaxation.through.items():
        ends = value["S"][columns.alive[t, s + 1]]
        value["Z"][column] = max(0.0, ends - value["R"][columns.runs[graph.writer[t], s]])
    relaxation.order.start(value, ran)
    return value


def _switch_on(vector: Vector, column: int | None) -> None:
    if column is not None:
        vector[column] = 1.0
