"""MONeT's integer program (Shah et al., ICLR 2021, arXiv 2010.14501, section 4 and appendix) on the joint graph.

A program is written over *slots*: the places, in order, at which an operator runs or may run. With every replayable
forward operator allowed before every backward operator (``all_slots``) it is the paper's program; with a schedule's
own steps and a few operators allowed beside them it is a window of a larger one (``monetrun.solve.windows``).

The variables, named as in the paper:

* ``R`` (binary): an operator runs at a slot where it need not, the paper's recomputation of i at stage k.
* ``M`` (binary): which implementation a run uses, where there are several. The paper's choices of a convolution's
  algorithm, of what a backward operator reads, and of running in place are all ``M`` here.
* ``S``: a tensor is stored across a backward operator, from one stage into the next.
* ``P``: a tensor is present between two slots of one stage.
* ``U``: bytes of the tensors in S and P between two slots.
* ``E``: bytes over the budget at a slot (elastic programs only).
* ``SM``, the paper's product of S and M in its memory constraints, is not needed: the memory at a slot is the sum of
  what is stored or present there, which includes what the chosen implementation reads. So the program is linear,
  and, given R and M, the least S and P are integers. (They could be continuous; as binaries the solvers are about
  thirty times faster on windows of ResNet-50, SCIP 10 and HiGHS 1.15, November 2026.)

The class of schedules: between two backward operators each replayable forward operator runs at most once, in the
graph's order. The program's optimum is a cheapest schedule of that class under the rules of ``monetrun.core.simulate``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import cvxpy as cp
import numpy as np

from monetrun.core.graph import BACKWARD, Costs, Graph
from monetrun.solve.fixed_tensors import FixedTensors, events_of, settle_in_place, split
from monetrun.solve.mip.canonical import Vector
from monetrun.solve.mip.rows import Column, Rows, Term
from monetrun.solve.slot import Slot, reads_of, without_useless

_ELASTIC_PRICE = 100.0  # exceeding the budget by a thousandth costs as much as a tenth of the plain step
_SCALE = 1000.0  # budget and plain seconds in the program's units, so that solvers' tolerances mean the same everywhere

Interval = tuple[int, int, str, int]  # slot before, slot after, "S" or "P", index in it


@dataclass(frozen=True)
class Program:
    """An integer program and what its variables mean.

    Attributes:
        problem: minimizes the seconds of what is not fixed, in units of ``unit_seconds``.
        layout: which entry of a variable stands for what.
        memory: the memory constraints.
        balance: what each U adds to the one before it: terms of S and P.
        fixed_seconds: what the slots without a variable cost.
        unit_seconds: seconds per unit of the objective.
        infeasible: the fixed part alone is over the budget, or a read cannot be met.
    """

    problem: cp.Problem
    layout: Layout
    memory: Rows
    balance: list[list[Term]]
    fixed_seconds: float
    unit_seconds: float
    infeasible: bool

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots that are left; useless ones have been removed."""
        return self.layout.slots


@dataclass(frozen=True)
class Layout:
    """Which entry of R, M, S and P stands for what.

    Attributes:
        slots: the slots of the program.
        runs: per slot its index in R, or -1 where it is compulsory.
        picks: per slot its indices in M, one per choice, or () where there is one choice.
        spans: per variable tensor its intervals, in order.
        before: (slot, tensor) -> the interval that ends there.
        after: (slot, tensor) -> the interval that begins there.
        sizes: how many entries each of R, M, S, P, U and E has.
    """

    slots: tuple[Slot, ...]
    runs: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]
    spans: dict[int, list[Interval]] = field(default_factory=dict)
    before: dict[tuple[int, int], Column] = field(default_factory=dict)
    after: dict[tuple[int, int], Column] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: {"R": 0, "M": 0, "S": 0, "P": 0, "U": 0, "E": 0})

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot], fixed: FixedTensors) -> Layout:
        """Number the variables of ``slots``."""
        optional, several = itertools.count(), itertools.count()
        runs = tuple(-1 if slot.compulsory else next(optional) for slot in slots)
        picks = tuple(tuple(next(several) for _ in s.choices) if len(s.choices) > 1 else () for s in slots)
        layout = cls(tuple(slots), runs, picks)
        layout.sizes["R"], layout.sizes["M"] = next(optional), next(several)
        events = events_of(graph, slots)
        stage = list(itertools.accumulate(graph.operators[s.operator].phase == BACKWARD for s in slots))
        for t in fixed.variable:
            if graph.tensors[t].external:
                continue
            layout.spans[t] = []
            following = [index for index, _, _ in events[t]][1:] + ([len(slots)] if graph.tensors[t].kept else [])
            for (index, _, _), until in zip(events[t], following, strict=False):
                name = "S" if until == len(slots) or stage[index] < stage[until] else "P"
                j = layout.new(name)
                layout.spans[t].append((index, until, name, j))
                layout.after[index, t] = layout.before[until, t] = (name, j)
        return layout

    def new(self, name: str) -> int:
        """Add an entry to the variable ``name``."""
        self.sizes[name] += 1
        return self.sizes[name] - 1

    def run(self, i: int, a: float) -> tuple[list[Term], float]:
        """``a`` times whether slot i runs, as (terms, constant)."""
        return ([], a) if self.runs[i] < 0 else ([("R", self.runs[i], a)], 0.0)

    def pick(self, i: int, k: int, a: float) -> tuple[list[Term], float]:
        """``a`` times whether slot i runs with its k-th choice, as (terms, constant)."""
        return ([("M", self.picks[i][k], a)], 0.0) if self.picks[i] else self.run(i, a)


def build(graph: Graph, costs: Costs, budget_bytes: int, slots: Sequence[Slot], elastic: bool = False) -> Program:
    """Write the integer program of ``slots``: which optional ones run, and which implementation each uses.

    With ``elastic`` it may exceed the budget, by E at each slot, at a price that never pays where it is not needed.

    Source: arXiv 2010.14501, section 4.
    """
    slots = without_useless(graph, slots)
    fixed = split(graph, slots, events_of(graph, slots))
    slots = settle_in_place(graph, costs, slots, fixed)
    return _Builder(graph, costs, budget_bytes, fixed, Layout.of(graph, slots, fixed), elastic).program()


class _Builder:
    """Writes a program, one method per block of constraints."""

    def __init__(
        self, graph: Graph, costs: Costs, budget_bytes: int, fixed: FixedTensors, layout: Layout, elastic: bool
    ) -> None:
        self.graph, self.costs, self.budget_bytes = graph, costs, budget_bytes
        self.fixed, self.layout, self.elastic = fixed, layout, elastic
        self.unit_bytes = max(budget_bytes, 1) / _SCALE
        self.unit_seconds = max(sum(row[0] for row in costs.seconds), 1e-30) / _SCALE
        self.lower = {name: np.zeros(layout.sizes[name]) for name in ("S", "P")}
        self.balance: list[list[Term]] = []
        self.infeasible = False

    def program(self) -> Program:
        """The program; the order of its blocks and variables is part of what the solvers see."""
        memory, balances = self.memory_within_the_budget()
        blocks = (
            self.reads_what_is_present(),
            *self.present_only_if_stored_or_written(),
            self.in_place_ends_a_tensor(),
            self.not_written_while_stored(),
            balances,
            memory,
        )
        one_implementation = self.one_implementation()
        seconds, fixed_seconds = self.seconds()
        variables = _variables(self.layout, self.lower)
        constraints = [c for rows in blocks for c in rows.constraints(variables)]
        constraints += one_implementation.constraints(variables, equal=True)
        objective = sum((seconds[n] @ variables[n] for n in ("R", "M") if n in variables), cp.Constant(0.0))
        if "E" in variables:
            objective += np.full(self.layout.sizes["E"], _ELASTIC_PRICE) @ variables["E"]
        return Program(
            cp.Problem(cp.Minimize(objective), constraints),
            self.layout,
            memory,
            self.balance,
            fixed_seconds,
            self.unit_seconds,
            self.infeasible or any(rows.impossible for rows in blocks),
        )

    def one_implementation(self) -> Rows:
        """A run uses exactly one implementation: sum over l of M[i, l] = R[i]."""
        rows = Rows()
        for i, picks in enumerate(self.layout.picks):
            if picks:
                terms, constant = self.layout.run(i, -1.0)
                rows.add([("M", j, 1.0) for j in picks] + terms, -constant)
        return rows

    def reads_what_is_present(self) -> Rows:
        """A run reads only what is present: the M that read t sum up to at most t's S or P before the slot."""
        rows, layout = Rows(), self.layout
        for i, slot in enumerate(layout.slots):
            reads = reads_of(self.graph, slot)
            for t in dict.fromkeys(t for read in reads for t in read):
                if t not in layout.spans:
                    continue
                readers = [k for k, read in enumerate(reads) if t in read]
                present = layout.before.get((i, t))
                if len(readers) == len(reads) and slot.compulsory:
                    if present is None:
                        self.infeasible = True
                    else:
                        self.lower[present[0]][present[1]] = 1.0
                    continue
                terms = [term for k in readers for term in layout.pick(i, k, 1.0)[0]]
                if len(readers) == len(reads):
                    terms = layout.run(i, 1.0)[0]
                rows.add(terms + ([(*present, -1.0)] if present else []), 0.0)
        return rows

    def present_only_if_stored_or_written(self) -> tuple[Rows, Rows]:
        """A tensor is present after a slot only if it was before, or the slot writes it.

        Second: a kept tensor that is present, or is written, stays present.
        """
        rows, kept, layout = Rows(), Rows(), self.layout
        for i, slot in enumerate(layout.slots):
            outputs = self.graph.operators[slot.operator].outputs
            for t in [*outputs, *dict.fromkeys(t for read in reads_of(self.graph, slot) for t in read)]:
                if t not in layout.spans or (i, t) not in layout.after:
                    continue
                after, writes = layout.after[i, t], t in outputs
                earlier = [(*layout.before[i, t], -1.0)] if (i, t) in layout.before else []
                terms, constant = layout.run(i, -1.0) if writes else ([], 0.0)
                if not constant:
                    rows.add([(*after, 1.0), *earlier, *terms], 0.0)
                if self.graph.tensors[t].kept:
                    for name, j, _ in earlier:
                        kept.add([(*after, -1.0), (name, j, 1.0)], 0.0)
                    if writes:
                        terms, constant = layout.run(i, 1.0)
                        kept.add([(*after, -1.0), *terms], -constant)
        return rows, kept

    def in_place_ends_a_tensor(self) -> Rows:
        """Running in place of t ends t: M[i, l] <= 1 - (t's S or P after the slot)."""
        rows, layout = Rows(), self.layout
        for i, slot in enumerate(layout.slots):
            for k, choice in enumerate(slot.choices):
                t = self.graph.operators[slot.operator].implementations[choice].in_place_of
                if t is not None and (i, t) in layout.after:
                    terms, constant = layout.pick(i, k, 1.0)
                    rows.add([*terms, (*layout.after[i, t], 1.0)], 1.0 - constant)
        return rows

    def not_written_while_stored(self) -> Rows:
        """No tensor is written again while it is stored: that gains nothing, and the cut removes fractions only."""
        rows, layout = Rows(), self.layout
        for i, slot in enumerate(layout.slots):
            outputs = self.graph.operators[slot.operator].outputs
            single = outputs[0] if len(outputs) == 1 and not self.graph.tensors[outputs[0]].kept else -1
            if not slot.compulsory and (i, single) in layout.before:
                rows.add([("R", layout.runs[i], 1.0), (*layout.before[i, single], 1.0)], 1.0)
        return rows

    def memory_within_the_budget(self) -> tuple[Rows, Rows]:
        """What is alive before a slot, what it writes, and its workspace fit the budget, in every pass alike.

        A slot that does not run needs no exception, since what is alive there was alive in the last step that ran.
        Between two slots that touch variable tensors the same ones are alive, and only the largest row binds.

        Second: U is the bytes of the variable tensors, U[e] >= U[e - 1] + what begins - what ends, which is sparse.
        """
        memory, balances = Rows(), Rows()
        epoch = -1
        largest: dict[tuple[int, int], tuple[int, list[Term]]] = {}
        for i, slot in enumerate(self.layout.slots):
            own, constant = self._own_bytes(i)
            constant += self.fixed.before_bytes[i]
            key = (epoch, i if own else -1)
            if key not in largest or largest[key][0] < constant:
                stored = [("U", len(self.balance) - 1, self.unit_bytes)] if self.balance else []
                largest[key] = (constant, [*stored, *own])
            if touched := self._touched(slot):
                epoch = i
            if change := self._change(i, touched):
                earlier = [("U", len(self.balance) - 1, 1.0)] if self.balance else []
                balances.add([*earlier, ("U", self.layout.new("U"), -1.0), *change], 0.0)
                self.balance.append(change)
        for constant, terms in largest.values():
            over = [("E", self.layout.new("E"), -1.0)] if self.elastic and terms else []
            if terms or not self.elastic:
                scaled = [(name, j, a / self.unit_bytes) for name, j, a in terms]
                memory.add([*scaled, *over], (self.budget_bytes - constant) / self.unit_bytes)
        return memory, balances

    def seconds(self) -> tuple[dict[str, np.ndarray], float]:
        """The objective is the seconds of everything that runs: coefficients of R and M, and the fixed seconds."""
        coefficients = {name: np.zeros(self.layout.sizes[name]) for name in ("R", "M")}
        fixed_seconds = 0.0
        for i, slot in enumerate(self.layout.slots):
            row = self.costs.seconds[slot.operator]
            for k, choice in enumerate(slot.choices):
                terms, constant = self.layout.pick(i, k, row[choice])
                fixed_seconds += constant
                for name, j, a in terms:
                    coefficients[name][j] = a / self.unit_seconds
        return coefficients, fixed_seconds

    def _own_bytes(self, i: int) -> tuple[list[Term], int]:
        """What slot i writes, and its workspace, as (terms, constant)."""
        slot = self.layout.slots[i]
        op = self.graph.operators[slot.operator]
        own: list[Term] = []
        total = 0
        for k, choice in enumerate(slot.choices):
            in_place = op.implementations[choice].in_place_of is not None
            written = sum(self.graph.tensors[t].nbytes for t in op.outputs[in_place:])
            terms, constant = self.layout.pick(i, k, written + self.costs.workspace_bytes[op.id][choice])
            own += terms
            total += int(constant)
        return own, total

    def _touched(self, slot: Slot) -> set[int]:
        """The variable tensors that a slot may read or write."""
        reads = {t for read in reads_of(self.graph, slot) for t in read}
        return (reads | set(self.graph.operators[slot.operator].outputs)) & self.layout.spans.keys()

    def _change(self, i: int, touched: set[int]) -> list[Term]:
        """By how much U changes at slot i."""
        change: list[Term] = []
        for t in sorted(touched):
            nbytes = self.graph.tensors[t].nbytes / self.unit_bytes
            for interval, sign in ((self.layout.before.get((i, t)), -1), (self.layout.after.get((i, t)), 1)):
                if interval is not None:
                    change.append((*interval, sign * nbytes))
        return change


def _variables(layout: Layout, lower: dict[str, Vector]) -> dict[str, cp.Variable]:
    """The variables that have entries; ``lower`` bounds S and P."""
    made: dict[str, cp.Variable] = {}
    for name, size in layout.sizes.items():
        if not size:
            continue
        if name in ("R", "M"):
            made[name] = cp.Variable(size, name=name, boolean=True)
        elif name in ("S", "P"):
            made[name] = cp.Variable(size, name=name, boolean=True, bounds=[lower[name], np.ones(size)])
        else:
            made[name] = cp.Variable(size, name=name, nonneg=True)
    return made
