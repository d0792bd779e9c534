"""The relaxed program over blocks: memory is checked only at chosen points, and runs between two points have no order.

Each *point* is the run of one compulsory operator; what happens between two of them (a *segment*) is only a set of
runs. Any schedule that ``simulate`` accepts, however often it runs an operator and in whatever order, maps to a
solution that costs no more. The variables:

* ``S[t, p]``: tensor t is alive before point p;
* ``R[i, s]``: operator i reruns, at least once, in segment s;
* ``M[j, l]``: operator j, or a rerun of it, uses the l-th set of tensors that its implementations can read;
* ``Z[t, s]``: tensor t is alive throughout segment s;
* ``F``, ``A``, ``H``, ``D``: the order of the runs in a segment (``monetrun.solve.order``);
* ``B``: the budget, where the program minimizes it.

What is read in a segment is alive at the segment's beginning, or is written in it; and at every point what is alive,
together with what certainly is (outputs, kept tensors, workspace), fits the budget. Its linear relaxation is weak, and
weaker with more points; its integer optimum is not, and is found in seconds, since it has no order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from monetrun.core.graph import FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.solve.mip.minimize import Result
from monetrun.solve.mip.rows import Rows, Term
from monetrun.solve.order import Order
from monetrun.solve.places import Places
from monetrun.solve.segments import Segments
from monetrun.solve.slot import allowed_choices

_SCALE = 1000.0
_ORDERED_SHARE = 0.01  # of the budget: the order of runs is not modelled for smaller tensors

Key = tuple[int, int]  # (operator or tensor, segment)


@dataclass(frozen=True)
class Columns:
    """Which entry of R, S and M stands for what.

    Attributes:
        segments: what runs and what is wanted in each segment.
        runs: index in R of (operator, segment).
        alive: index in S of (tensor, segment): alive before the point at which the segment begins.
        picks: indices in M of a compulsory operator, one per read set.
        picks_again: the same of (operator, segment), for the runs that have an index in R.
        picked: per entry of M its operator and implementation.
    """

    segments: Segments
    runs: dict[Key, int]
    alive: dict[Key, int]
    picks: dict[int, tuple[int, ...]]
    picks_again: dict[Key, tuple[int, ...]]
    picked: list[Key]

    @classmethod
    def of(cls, segments: Segments) -> Columns:
        """Number the variables."""
        sets, picked = segments.read_sets, list[Key]()

        def new_picks(i: int) -> tuple[int, ...]:
            picked.extend((i, k) for _, k in sets[i])
            return tuple(range(len(picked) - len(sets[i]), len(picked)))

        numbers = range(segments.count + 1)
        runs = {key: n for n, key in enumerate((i, s) for s in numbers for i in segments.useful[s])}
        alive = {key: n for n, key in enumerate((t, s) for s in numbers[1:] for t in sorted(segments.alive_at(s)))}
        compulsory = itertools.chain.from_iterable(segments.members)
        picks = {i: new_picks(i) for i in compulsory if len(sets[i]) > 1}
        picks_again = {(i, s): new_picks(i) for i, s in runs if len(sets[i]) > 1}
        return cls(segments, runs, alive, picks, picks_again, picked)

    def using(self, t: int, i: int, picks: tuple[int, ...]) -> list[Term]:
        """The entries of ``picks`` (of operator i) whose read sets contain t."""
        sets = zip(picks, self.segments.read_sets[i], strict=True)
        return [("M", j, 1.0) for j, (reads, _) in sets if t in reads]

    def available(self, t: int, s: int, reader: int = -1) -> list[Term] | None:
        """What makes t available in segment s, to ``reader``; None where it is available in any case."""
        operators, w = self.segments.graph.operators, self.segments.graph.writer[t]
        if self.segments.certainly_written(t, s):
            return None
        terms = [("S", self.alive[t, s], -1.0)] if (t, s) in self.alive else []
        in_forward = reader >= 0 and operators[reader].phase == FORWARD  # where nothing reruns
        if (w, s) in self.runs and (self.segments.of_operator[w] == s or not in_forward):
            terms.append(("R", self.runs[w, s], -1.0))
        return terms

    def written_again(self, t: int, s: int) -> int | None:
        """The operator whose rerun in segment s may write t."""
        w = self.segments.graph.writer[t]
        return w if (w, s) in self.runs and self.from_before([t], s) else None

    def from_before(self, ts: Iterable[int], s: int) -> list[int]:
        """Those tensors that no operator of segment s writes except in a rerun."""
        operators, writer = self.segments.graph.operators, self.segments.graph.writer
        of_operator = self.segments.of_operator
        return sorted(t for t in ts if of_operator[writer[t]] < s and not operators[writer[t]].optional)


@dataclass(frozen=True)
class Relaxation:
    """A relaxed program and what its variables mean.

    Attributes:
        problem: minimizes what is not fixed, in units of ``unit_seconds`` (or ``unit_bytes``, with ``least_bytes``).
        columns: the entries of R, S and M.
        through: index in Z of (tensor, segment): alive throughout the segment.
        order: the variables for the order of runs.
        fixed_seconds: what is run in any case.
        unit_seconds: seconds per unit of the objective.
        unit_bytes: bytes per unit of memory.
        infeasible: what is certainly alive at a point is over the budget.
    """

    problem: cp.Problem
    columns: Columns
    through: dict[Key, int]
    order: Order
    fixed_seconds: float
    unit_seconds: float
    unit_bytes: float
    infeasible: bool

    def bound_seconds(self, result: Result) -> float:
        """The bound in seconds that follows from a solver's result."""
        # a part in a million less: the solver's optimum is exact only within its tolerances
        return self.fixed_seconds + result.bound * self.unit_seconds * (1 - 1e-6)


def relax(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    places: Places,
    options: Options,
    margins: Mapping[int, int] | None = None,
    least_bytes: bool = False,
) -> Relaxation:
    """Write the relaxed program that checks memory at ``places``.

    At a rerun: what it reads and writes, and what is alive throughout its segment, must fit; where it is ordered, also
    what runs before it in the segment for what runs after it.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: of every schedule.
        places: where memory is checked.
        options: which implementations and recomputations are allowed.
        margins: bytes to leave free at a point, for what recomputation needs around it. With margins (even empty) all
            runs are taken to be in the graph's order; the program is then no relaxation any more, but finds schedules.
        least_bytes: the budget is no limit; the program minimizes the bytes B that a budget must have.
    """
    return _Builder(graph, costs, budget_bytes, places, options, margins, least_bytes).program()


class _Builder:
    """Writes a relaxed program, one method per block of constraints."""

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        budget_bytes: int,
        places: Places,
        options: Options,
        margins: Mapping[int, int] | None,
        least_bytes: bool,
    ) -> None:
        self.graph, self.costs, self.options = graph, costs, options
        self.budget_bytes, self.places, self.margins, self.least_bytes = budget_bytes, places, margins, least_bytes
        self.segments = Segments.of(graph, costs, budget_bytes, places.points, options)
        self.columns = Columns.of(self.segments)
        self.unit_seconds = max(sum(row[0] for row in costs.seconds), 1e-30) / _SCALE
        self.unit_bytes = max(budget_bytes, 1) / _SCALE
        self.limit_bytes = 0 if least_bytes else budget_bytes
        self.limit: list[Term] = [("B", 0, -1.0)] if least_bytes else []
        self.rows = Rows()
        self.infeasible = False
        self.through: dict[Key, int] = {}
        self.order = Order(
            self.rows,
            self.columns.runs,
            self.columns.alive,
            self.columns.written_again,
            lambda i, s: self.columns.from_before(self.segments.all_reads[i], s),
            lambda t: graph.tensors[t].nbytes > _ORDERED_SHARE * budget_bytes,
        )

    def program(self) -> Relaxation:
        """The program; the order of its rows and variables is part of what the solvers see."""
        for s in range(self.segments.count + 1):
            self.certain_reads_are_available(s)
            self.chosen_reads_are_available(s)
            self.reruns_read_what_is_available(s)
            if s < self.segments.count:
                self.alive_only_if_available(s)
                self.the_points_reads_are_alive(s)
                self.memory_at_the_point(s)
        for i, s in itertools.product(sorted(self.places.runs), range(self.segments.count)):
            if (i, s) in self.columns.runs:
                self.memory_at_a_rerun(i, s)
        variables = self._variables()
        constraints = self.rows.constraints(variables)
        constraints += self.one_implementation().constraints(variables, equal=True)
        return Relaxation(
            cp.Problem(cp.Minimize(self.seconds_or_bytes(variables)), constraints),
            self.columns,
            self.through,
            self.order,
            _fixed_seconds(self.segments, self.costs),
            self.unit_seconds,
            self.unit_bytes,
            self.infeasible or self.rows.impossible,
        )

    def certain_reads_are_available(self, s: int) -> None:
        """What an operator of the segment certainly reads is available in it."""
        seg = self.segments
        reader_of = {(self.graph.operators[i].phase, t): i for i in seg.members[s] for t in seg.all_reads[i]}
        for (_, t), reader in reader_of.items():
            terms = self.columns.available(t, s, reader)
            if terms is not None:
                self.rows.add(terms, -1.0)

    def chosen_reads_are_available(self, s: int) -> None:
        """An implementation is used only where what it reads is available."""
        seg = self.segments
        for i in seg.members[s]:
            if i in self.columns.picks:
                for t in seg.any_reads[i] - seg.all_reads[i]:
                    terms = self.columns.available(t, s, i)
                    if terms is not None:
                        self.rows.add([*self.columns.using(t, i, self.columns.picks[i]), *terms], 0.0)

    def reruns_read_what_is_available(self, s: int) -> None:
        """A rerun reads what is available in the segment."""
        seg = self.segments
        for i in seg.useful[s]:
            for t in seg.all_reads[i]:
                terms = self.columns.available(t, s)
                if terms is not None:
                    self.rows.add([("R", self.columns.runs[i, s], 1.0), *terms], 0.0)
            for t in seg.any_reads[i] - seg.all_reads[i]:
                terms = self.columns.available(t, s)
                if terms is not None:
                    self.rows.add([*self.columns.using(t, i, self.columns.picks_again[i, s]), *terms], 0.0)

    def alive_only_if_available(self, s: int) -> None:
        """What is alive at the next point was available before it."""
        for t in self.segments.alive_at(s + 1):
            terms = self.columns.available(t, s)
            if terms is not None:
                self.rows.add([("S", self.columns.alive[t, s + 1], 1.0), *terms], 0.0)

    def the_points_reads_are_alive(self, s: int) -> None:
        """What the next point's operator reads is alive before it."""
        seg = self.segments
        point = seg.points[s]
        for t in seg.all_reads[point]:
            self.rows.add([("S", self.columns.alive[t, s + 1], -1.0)], -1.0)
        if point in self.columns.picks:
            for t in seg.any_reads[point] - seg.all_reads[point]:
                using = self.columns.using(t, point, self.columns.picks[point])
                self.rows.add([*using, ("S", self.columns.alive[t, s + 1], -1.0)], 0.0)

    def memory_at_the_point(self, s: int) -> None:
        """What is alive before the next point, what its operator writes, and its workspace fit the budget."""
        point = self.segments.points[s]
        outputs = self.graph.operators[point].outputs
        certain = _kept_bytes(self.graph, point) + _least_written_bytes(self.graph, self.costs, point, self.options)
        stored = [
            self._bytes_of(t, "S", self.columns.alive[t, s + 1])
            for t in self.segments.alive_at(s + 1)
            if t not in outputs
        ]
        margin = (self.margins or {}).get(point, 0)
        if certain + margin > self.limit_bytes and not self.least_bytes:
            self.infeasible = True
        self.rows.add([*stored, *self.limit], (self.limit_bytes - certain - margin) / self.unit_bytes)

    def memory_at_a_rerun(self, i: int, s: int) -> None:
        """What a rerun of i in segment s reads and writes, and what is alive throughout the segment, fit the budget.

        Z[t, s] >= S[t, s + 1] - R[writer of t, s]: t is alive throughout if it is alive at the end and not rewritten.
        """
        seg = self.segments
        own = {*seg.all_reads[i], *self.graph.operators[i].outputs}
        ends = seg.alive_at(s + 1)
        ordered = self.margins is None and i in self.places.ordered and not self.graph.operators[i].optional
        held = self.order.held(i, s, self.columns.from_before(ends, s), own) if ordered else {}
        terms = [self._bytes_of(t, *column) for t, column in held.items()]
        for t in sorted(ends - held.keys()):
            w = self.graph.writer[t]
            if t in own or seg.certainly_written(t, s):
                continue
            if (w, s) not in self.columns.runs or (self.margins is not None and w < i):
                terms.append(self._bytes_of(t, "S", self.columns.alive[t, s + 1]))
                continue
            if (t, s) not in self.through:
                self.through[t, s] = len(self.through)
                z = ("Z", self.through[t, s], -1.0)
                self.rows.add([("S", self.columns.alive[t, s + 1], 1.0), ("R", self.columns.runs[w, s], -1.0), z], 0.0)
            terms.append(self._bytes_of(t, "Z", self.through[t, s]))
        room = sum(self.graph.tensors[t].nbytes for t in seg.all_reads[i])
        room += _least_written_bytes(self.graph, self.costs, i, self.options)
        certain = _kept_bytes(self.graph, seg.points[s - 1] + 1 if s else 0)
        running = ("R", self.columns.runs[i, s], room / self.unit_bytes)
        self.rows.add([*terms, *self.limit, running], (self.limit_bytes - certain) / self.unit_bytes)

    def one_implementation(self) -> Rows:
        """A run uses one implementation: the sum over l of M[j, l] is 1, or R."""
        one = Rows()
        for columns in self.columns.picks.values():
            one.add([("M", j, 1.0) for j in columns], 1.0)
        for key, columns in self.columns.picks_again.items():
            one.add([*(("M", j, 1.0) for j in columns), ("R", self.columns.runs[key], -1.0)], 0.0)
        return one

    def seconds_or_bytes(self, variables: Mapping[str, cp.Variable]) -> cp.Expression:
        """The objective: the seconds of what is not fixed, or with ``least_bytes`` the budget."""
        if self.least_bytes:
            budget: cp.Expression = cp.sum(variables["B"])
            return budget
        objective: cp.Expression = cp.Constant(0.0)
        if self.columns.runs:
            objective += np.array([self._run_seconds(i) for i, _ in self.columns.runs]) @ variables["R"]
        if twice := self.order.twice:
            once_more = np.array(
                [min(self.costs.seconds[i][k] for _, k in self.segments.read_sets[i]) for i, _ in twice]
            )
            objective += once_more / self.unit_seconds @ variables["D"]
        if self.columns.picked:
            picked = [self.costs.seconds[i][k] / self.unit_seconds for i, k in self.columns.picked]
            objective += np.array(picked) @ variables["M"]
        return objective

    def _run_seconds(self, i: int) -> float:
        """What R costs of operator i, in the objective's unit; M costs it where there are several read sets."""
        read_sets = self.segments.read_sets[i]
        return self.costs.seconds[i][read_sets[0][1]] / self.unit_seconds if len(read_sets) == 1 else 0.0

    def _bytes_of(self, t: int, name: str, column: int) -> Term:
        """The bytes of tensor t, if the variable's entry is 1."""
        return name, column, self.graph.tensors[t].nbytes / self.unit_bytes

    def _variables(self) -> dict[str, cp.Variable]:
        variables = self.order.variables()
        if self.through:
            variables["Z"] = cp.Variable(len(self.through), name="Z", bounds=[0, 1])
        for name, entries in (("R", self.columns.runs), ("S", self.columns.alive), ("M", self.columns.picked)):
            if entries:
                variables[name] = cp.Variable(len(entries), name=name, boolean=True)
        if self.least_bytes:
            variables["B"] = cp.Variable(1, name="B", nonneg=True)
        return variables


def _fixed_seconds(segments: Segments, costs: Costs) -> float:
    """What the compulsory operators with one read set cost."""
    fixed_seconds = 0.0
    for i in itertools.chain.from_iterable(segments.members):
        if len(segments.read_sets[i]) == 1:
            fixed_seconds += costs.seconds[i][segments.read_sets[i][0][1]]
    return fixed_seconds


def _least_written_bytes(graph: Graph, costs: Costs, operator: int, options: Options) -> int:
    """What a run of ``operator`` allocates at least: its outputs and workspace, in place where possible."""
    op = graph.operators[operator]
    return min(
        sum(graph.tensors[t].nbytes for t in op.outputs[op.implementations[k].in_place_of is not None :])
        + costs.workspace_bytes[operator][k]
        for k in allowed_choices(graph, operator, options)
    )


def _kept_bytes(graph: Graph, before: int) -> int:
    """Bytes of the kept tensors that the compulsory operators below ``before`` write."""
    operators = graph.operators[:before]
    outputs = (graph.tensors[t] for op in operators if not op.optional for t in op.outputs)
    return sum(t.nbytes for t in outputs if t.kept)
