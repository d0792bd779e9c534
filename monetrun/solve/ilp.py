"""MONeT's integer program (Shah et al., ICLR 2021, arXiv 2010.14501, section 4 and appendix) on the joint graph.

A program is written over *slots*: the places, in order, at which an operator runs or may run. With every replayable
forward operator allowed before every backward operator (``all_slots``) it is the paper's program; with a schedule's
own steps and a few operators allowed beside them it is a window of a larger one (``monetrun.solve.hierarchical``).

The variables, named as in the paper:

* ``R`` (binary): an operator runs at a slot where it need not, the paper's recomputation of i at stage k.
* ``M`` (binary): which implementation a run uses, where there are several. The paper's choice of a convolution's
  algorithm, of what a backward operator reads, and of running in place are all of them ``M`` here.
* ``S``: a tensor is stored across a backward operator, from one stage into the next.
* ``P``: a tensor is present between two slots of one stage.
* ``SM``, the paper's product of S and M in its memory constraints, is not needed: the memory at a slot is the sum of
  what is stored or present there, which holds what the chosen implementation reads. That keeps the program linear,
  and, given R and M, the least S and P are integers. (They could be continuous; as binaries the solvers are about
  thirty times faster on windows of ResNet-50, SCIP 10 and HiGHS 1.15, November 2026.)

The class of schedules: between two backward operators each replayable forward operator runs at most once, in the
graph's order. Of those the program's optimum is a cheapest one under the rules of ``monetrun.core.simulate``.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve import mip, tidy
from monetrun.solve.slot import Slot, all_slots, without_useless

_ELASTIC_PRICE = 100.0  # a thousandth of the budget too much costs as much as a tenth of the plain step
_SCALE = 1000.0  # budget and plain seconds in the program's units, so that solvers' tolerances mean the same everywhere


@dataclass(frozen=True)
class Program:
    """An integer program and what its columns mean.

    Attributes:
        problem: minimizes the seconds of what is not fixed, in units of ``unit_seconds``.
        sizes: how many columns each of R, M, S, P, U, E has.
        memory: the memory constraints.
        balance: what each U adds to the one before it: terms of S and P.
        slots: the slots that are left; useless ones have been removed.
        runs: per slot its column in R, or -1 where it is compulsory.
        picks: per slot its columns in M, one per choice, or () where there is one choice.
        spans: per variable tensor its intervals: (slot before, slot after, "S" or "P", column).
        fixed_seconds: what the slots cost that have no variable.
        unit_seconds: seconds per unit of the objective.
        infeasible: the fixed part alone is over the budget, or a read can not be met.
    """

    problem: cp.Problem
    sizes: dict[str, int]
    memory: mip.Rows
    balance: list[list[tuple[str, int, float]]]
    slots: tuple[Slot, ...]
    runs: tuple[int, ...]
    picks: tuple[tuple[int, ...], ...]
    spans: dict[int, list[tuple[int, int, str, int]]]
    fixed_seconds: float
    unit_seconds: float
    infeasible: bool


@dataclass
class _Fixed:
    """What no decision changes.

    Attributes:
        variable: the tensors that do depend on a decision.
        before_bytes: per slot the bytes alive before it, of all other tensors.
        last_reads: (slot, tensor) where a fixed tensor is read last, so that running in place of it is legal.
    """

    variable: set[int]
    before_bytes: list[int]
    last_reads: set[tuple[int, int]]


def _events(graph: Graph, slots: Sequence[Slot]) -> dict[int, list[tuple[int, bool, bool]]]:
    """Per tensor that is not external the slots that may read or write it: (slot, reads, writes)."""
    events: dict[int, list[tuple[int, bool, bool]]] = defaultdict(list)
    for index, slot in enumerate(slots):
        op = graph.operators[slot.operator]
        for t in dict.fromkeys(t for k in slot.choices for t in op.implementations[k].inputs):
            if not graph.tensors[t].external:
                events[t].append((index, True, False))
        for t in op.outputs:
            events[t].append((index, False, True))
    return events


def _split(graph: Graph, slots: Sequence[Slot], events: dict[int, list[tuple[int, bool, bool]]]) -> _Fixed:
    """Tell the tensors that depend on a decision from the others, and follow those through the slots."""
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
    return _Fixed(variable, before[: len(slots)], last_reads)


def _settle(graph: Graph, costs: Costs, slots: Sequence[Slot], fixed: _Fixed) -> list[Slot]:
    """Choose at once where nothing but fixed tensors decides whether an operator can run in place."""
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


def build(graph: Graph, costs: Costs, budget_bytes: int, slots: Sequence[Slot], elastic: bool = False) -> Program:
    """Write the integer program of ``slots``: which optional ones run, and what each uses.

    With ``elastic`` it may go over the budget, by E at each slot, at a price at which it never pays where it need not.

    Source: arXiv 2010.14501, section 4.
    """
    slots = without_useless(graph, slots)
    fixed = _split(graph, slots, _events(graph, slots))
    slots = _settle(graph, costs, slots, fixed)
    events = _events(graph, slots)
    operators, tensors = graph.operators, graph.tensors
    unit_bytes = max(budget_bytes, 1) / _SCALE
    unit_seconds = max(sum(row[0] for row in costs.seconds), 1e-30) / _SCALE

    # the columns
    count = {"R": 0, "M": 0, "S": 0, "P": 0, "U": 0, "E": 0}
    lower: dict[str, list[float]] = {"S": [], "P": []}

    def column(name: str) -> int:
        count[name] += 1
        return count[name] - 1

    runs = [-1 if slot.compulsory else column("R") for slot in slots]
    picks = [tuple(column("M") for _ in slot.choices) if len(slot.choices) > 1 else () for slot in slots]
    stage = list(itertools.accumulate(operators[s.operator].phase == BACKWARD for s in slots))
    spans: dict[int, list[tuple[int, int, str, int]]] = {}
    before: dict[tuple[int, int], tuple[str, int]] = {}  # (slot, tensor) -> the interval that ends there
    after: dict[tuple[int, int], tuple[str, int]] = {}  # (slot, tensor) -> the interval that begins there
    for t in fixed.variable:
        if tensors[t].external:
            continue
        spans[t] = []
        following = [index for index, _, _ in events[t]][1:] + ([len(slots)] if tensors[t].kept else [])
        for (index, _, _), until in zip(events[t], following, strict=False):
            name = "S" if until == len(slots) or stage[index] < stage[until] else "P"
            j = column(name)
            lower[name].append(0.0)
            spans[t].append((index, until, name, j))
            after[index, t] = before[until, t] = (name, j)

    def run(i: int, a: float) -> tuple[list[tuple[str, int, float]], float]:
        """``a`` times whether slot i runs, as (terms, constant)."""
        return ([], a) if runs[i] < 0 else ([("R", runs[i], a)], 0.0)

    def pick(i: int, k: int, a: float) -> tuple[list[tuple[str, int, float]], float]:
        """``a`` times whether slot i runs with its k-th choice."""
        return ([("M", picks[i][k], a)], 0.0) if picks[i] else run(i, a)

    one_choice, reads, keeps, in_place, kept, memory, balances, cuts = (mip.Rows() for _ in range(8))
    infeasible = False
    for i, slot in enumerate(slots):
        op = operators[slot.operator]
        implementations = [op.implementations[k] for k in slot.choices]

        # A run uses exactly one implementation: sum over l of M[i, l] = R[i].
        if picks[i]:
            terms, constant = run(i, -1.0)
            one_choice.add([("M", j, 1.0) for j in picks[i]] + terms, -constant)

        # A run reads only what is present: the M that read t sum up to at most t's S or P before the slot.
        for t in dict.fromkeys(t for impl in implementations for t in impl.inputs):
            if t not in spans:
                continue
            readers = [k for k, impl in enumerate(implementations) if t in impl.inputs]
            present = before.get((i, t))
            if len(readers) == len(implementations) and slot.compulsory:
                if present is None:
                    infeasible = True
                else:
                    lower[present[0]][present[1]] = 1.0
                continue
            terms = [term for k in readers for term in pick(i, k, 1.0)[0]]
            if len(readers) == len(implementations):
                terms = run(i, 1.0)[0]
            reads.add(terms + ([(*present, -1.0)] if present else []), 0.0)

        # A tensor is present after a slot only if it was before, or the slot writes it.
        for t in [*op.outputs, *dict.fromkeys(t for impl in implementations for t in impl.inputs)]:
            if t not in spans or (i, t) not in after:
                continue
            writes = t in op.outputs
            earlier = [(*before[i, t], -1.0)] if (i, t) in before else []
            terms, constant = run(i, -1.0) if writes else ([], 0.0)
            if not constant:
                keeps.add([(*after[i, t], 1.0), *earlier, *terms], 0.0)
            # A kept tensor that is present, or is written, stays present.
            if tensors[t].kept:
                for name, j, _ in earlier:
                    kept.add([(*after[i, t], -1.0), (name, j, 1.0)], 0.0)
                if writes:
                    terms, constant = run(i, 1.0)
                    kept.add([(*after[i, t], -1.0), *terms], -constant)

        # No tensor is written again while it is stored: that would be for nothing (it cuts off fractions only).
        single = op.outputs[0] if len(op.outputs) == 1 and not tensors[op.outputs[0]].kept else -1
        if not slot.compulsory and (i, single) in before:
            cuts.add([("R", runs[i], 1.0), (*before[i, single], 1.0)], 1.0)

        # Running in place of t ends t: M[i, l] <= 1 - (t's S or P after the slot).
        for k, impl in enumerate(implementations):
            if impl.in_place_of is not None and (i, impl.in_place_of) in after:
                terms, constant = pick(i, k, 1.0)
                in_place.add([*terms, (*after[i, impl.in_place_of], 1.0)], 1.0 - constant)

    # The memory constraints, of the forward pass, of recomputation and of the backward pass alike: what is alive
    # before a slot, what it writes, and its workspace fit the budget. A slot that does not run needs no exception,
    # since what is alive there was alive in the last step that ran.
    # Between two slots that touch variable tensors the same ones are alive, and only the largest row binds.
    # U is what of the variable tensors is alive: U[e] >= U[e - 1] + what begins - what ends, which is sparse.
    balance: list[list[tuple[str, int, float]]] = []
    epoch = -1
    worst: dict[tuple[int, int], tuple[int, list[tuple[str, int, float]]]] = {}
    for i, slot in enumerate(slots):
        op = operators[slot.operator]
        touched = {t for k in slot.choices for t in op.implementations[k].inputs} | set(op.outputs)
        touched &= spans.keys()
        constant = fixed.before_bytes[i]
        extra: list[tuple[str, int, float]] = []
        for k, choice in enumerate(slot.choices):
            impl = op.implementations[choice]
            written = sum(tensors[t].nbytes for t in op.outputs[impl.in_place_of is not None :])
            terms, c = pick(i, k, written + costs.workspace_bytes[op.id][choice])
            extra += terms
            constant += int(c)
        key = (epoch, i if extra else -1)
        if key not in worst or worst[key][0] < constant:
            stored = [("U", len(balance) - 1, unit_bytes)] if balance else []
            worst[key] = (constant, [*stored, *extra])
        if touched:
            epoch = i
        change: list[tuple[str, int, float]] = []
        for t in sorted(touched):
            for interval, sign in ((before.get((i, t)), -1), (after.get((i, t)), 1)):
                if interval is not None:
                    change.append((*interval, sign * tensors[t].nbytes / unit_bytes))
        if change:
            earlier = [("U", len(balance) - 1, 1.0)] if balance else []
            balances.add([*earlier, ("U", column("U"), -1.0), *change], 0.0)
            balance.append(change)
    for constant, terms in worst.values():
        over = [("E", column("E"), -1.0)] if elastic and terms else []
        if terms or not elastic:
            scaled = [(name, j, a / unit_bytes) for name, j, a in terms]
            memory.add([*scaled, *over], (budget_bytes - constant) / unit_bytes)

    # The objective: the seconds of all that runs.
    seconds: dict[str, list[float]] = {"R": [0.0] * count["R"], "M": [0.0] * count["M"]}
    fixed_seconds = 0.0
    for i, slot in enumerate(slots):
        row = costs.seconds[slot.operator]
        for k, choice in enumerate(slot.choices):
            terms, constant = pick(i, k, row[choice])
            fixed_seconds += constant
            for name, j, a in terms:
                seconds[name][j] = a / unit_seconds
    variables: dict[str, cp.Variable] = {}
    for name in ("R", "M"):
        if count[name]:
            variables[name] = cp.Variable(count[name], name=name, boolean=True)
    for name in ("S", "P"):
        if count[name]:
            bounds = [np.array(lower[name]), np.ones(count[name])]
            variables[name] = cp.Variable(count[name], name=name, boolean=True, bounds=bounds)
    blocks = (reads, keeps, kept, in_place, cuts, balances, memory)
    if count["U"]:
        variables["U"] = cp.Variable(count["U"], name="U", nonneg=True)
    if count["E"]:
        variables["E"] = cp.Variable(count["E"], name="E", nonneg=True)
    constraints = [c for rows in blocks for c in rows.constraints(variables)]
    constraints += one_choice.constraints(variables, equal=True)
    infeasible |= any(rows.impossible for rows in blocks)
    objective = sum((np.array(seconds[n]) @ variables[n] for n in ("R", "M") if n in variables), cp.Constant(0.0))
    if count["E"]:
        objective += np.full(count["E"], _ELASTIC_PRICE) @ variables["E"]
    return Program(
        cp.Problem(cp.Minimize(objective), constraints),
        count,
        memory,
        balance,
        tuple(slots),
        tuple(runs),
        tuple(picks),
        spans,
        fixed_seconds,
        unit_seconds,
        infeasible,
    )


def read_schedule(program: Program, value: dict[str, mip.Vector]) -> Schedule:
    """The schedule that a solution of the program says."""
    parts: dict[str, list[Step]] = {FORWARD: [], BACKWARD: []}
    for slot, run, picks in zip(program.slots, program.runs, program.picks, strict=True):
        if run < 0 or value["R"][run] > 0.5:
            k = max(range(len(picks)), key=lambda k: value["M"][picks[k]]) if picks else 0
            parts[slot.part].append(Step(slot.operator, slot.choices[k]))
    return Schedule(tuple(parts[FORWARD]), tuple(parts[BACKWARD]))


def start_from(graph: Graph, program: Program, schedule: Schedule) -> dict[str, mip.Vector] | None:
    """The values of the program's variables that say ``schedule``, or None where no choice of slots does."""
    used: list[int] = [-1] * len(program.slots)  # the choice with which a slot runs
    i = 0
    for step in schedule.forward + schedule.backward:
        while i < len(program.slots) and program.slots[i].operator != step.operator:
            if program.slots[i].compulsory:
                return None
            i += 1
        if i == len(program.slots):
            return None
        choices = program.slots[i].choices
        used[i] = choices.index(step.implementation) if step.implementation in choices else 0
        i += 1
    value = {name: np.zeros(size) for name, size in program.sizes.items()}
    for k, run, picks in zip(used, program.runs, program.picks, strict=True):
        if k >= 0 and run >= 0:
            value["R"][run] = 1.0
        if k >= 0 and picks:
            value["M"][picks[k]] = 1.0
    for t, intervals in program.spans.items():
        wanted = False
        for _, until, name, j in reversed(intervals):
            if until < len(program.slots) and used[until] >= 0:
                op = graph.operators[program.slots[until].operator]
                if t in op.implementations[program.slots[until].choices[used[until]]].inputs:
                    wanted = True
                elif t in op.outputs:
                    wanted = False
            value[name][j] = wanted
        if graph.tensors[t].kept:
            present = False
            for index, _, name, j in intervals:
                writes = t in graph.operators[program.slots[index].operator].outputs
                present = present or (writes and used[index] >= 0)
                value[name][j] = present
    changes = [sum(a * value[name][j] for name, j, a in terms) for terms in program.balance]
    value["U"] = np.maximum(np.cumsum(changes), 0.0)
    if program.sizes["E"]:
        value["E"] = program.memory.excess(value)
    return value


def _in_seconds(progress: mip.Progress | None, fixed: float, unit: float) -> mip.Progress | None:
    """``progress`` for a program whose objective counts in ``unit``, on top of ``fixed`` seconds."""
    if progress is None:
        return None
    return lambda objective, bound: progress(fixed + objective * unit, fixed + bound * unit)


def solve(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    start: Schedule | None = None,
    progress: mip.Progress | None = None,
) -> Solution:
    """A cheapest schedule of the class that the module's docstring states.

    Args:
        graph: of tens of operators; hundreds are beyond any solver.
        costs: of the graph.
        budget_bytes: what the schedule may have allocated at most.
        options: all are heeded.
        start: a schedule to start from; the plain one where it fits.
        progress: called with (seconds, bound in seconds) at each new incumbent; the bound is of the class.

    Returns:
        ``"optimal"``: within ``options.gap`` of the best of the class. Its ``bound_seconds`` is the class's as well.
        ``"infeasible"``: the class has no schedule within the budget.
    """
    began = time.monotonic()
    best = start if start is not None else plain_schedule(graph)
    limit_bytes = budget_bytes
    for _ in range(4):
        program = build(graph, costs, limit_bytes, all_slots(graph, options))
        if program.infeasible:
            return Solution(None, 0.0, "infeasible", "ilp", time.monotonic() - began)
        fixed, unit = program.fixed_seconds, program.unit_seconds
        result = mip.minimize(
            program.problem,
            options.mip_solver,
            mip.Limits(options.seconds - (time.monotonic() - began), options.gap * 0.5, seed=options.seed),
            start_from(graph, program, tidy.without_dead_runs(graph, best)),
            _in_seconds(progress, fixed, unit),
        )
        bound_seconds = max(0.0, fixed + result.bound * unit)
        if result.value is None:
            return Solution(None, 0.0, result.status, "ilp", time.monotonic() - began)
        schedule = tidy.without_dead_runs(graph, read_schedule(program, result.value))
        over = simulate(graph, costs, schedule).peak_bytes - budget_bytes
        if over <= 0:
            return Solution(schedule, bound_seconds, result.status, "ilp", time.monotonic() - began)
        limit_bytes -= over  # the solver's tolerance let a few bytes through
    return Solution(None, 0.0, "unknown", "ilp", time.monotonic() - began)
