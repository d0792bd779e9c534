"""The relaxed program over blocks: memory looked at only at chosen points, runs between two points in no order.

Each *point* is the run of one compulsory operator; what happens between two of them (a *segment*) is only a set of
runs. Any schedule of ``simulate``'s rules, however often it runs an operator and in whatever order, maps to a
solution that costs no more:

* ``S[t, p]``: tensor t is alive before point p;
* ``R[i, s]``: operator i runs again, at least once, in segment s;
* ``M[j, l]``: operator j, or a run again of it, uses the l-th set of tensors that its implementations can read.

What is read in a segment is alive at the segment's beginning, or is written in it; and at every point what is alive,
together with what certainly is (outputs, kept tensors, workspace), fits the budget. Its linear relaxation is weak, and
weaker with more points; its integer optimum is not, and is found in seconds, since it has no order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import cvxpy as cp
import numpy as np

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, counterpart
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step
from monetrun.solve import mip, tidy
from monetrun.solve.order import Order
from monetrun.solve.places import Places
from monetrun.solve.slot import allowed_choices, necessary

_NEGLIGIBLE = 2e-5  # tensors smaller than this share of the budget are taken to be always alive, at no bytes
_SCALE = 1000.0
_HELD = 0.01  # of the budget: smaller tensors are looked at as if runs had no order


@dataclass(frozen=True)
class Relaxation:
    """A relaxed program and what its columns mean.

    Attributes:
        problem: minimizes what is not fixed, in units of ``unit_seconds``.
        points: the operators at whose run memory is looked at.
        runs: column in R of (operator, segment).
        alive: column in S of (tensor, segment): alive before the point at which the segment begins.
        through: column in Z of (tensor, segment): alive throughout the segment.
        order: the variables that tell what ran before a run again.
        unit_bytes: bytes per unit of memory.
        picks: columns in M of a compulsory operator, one per read set.
        picks_again: the same of (operator, segment), for the runs that have a column in R.
        read_sets: per operator the implementation that stands for each of its read sets.
        free: the tensors that are taken to be always alive.
        fixed_seconds: what is run in any case.
        unit_seconds: seconds per unit of the objective.
        infeasible: what is certainly alive at a point is over the budget.
    """

    problem: cp.Problem
    points: tuple[int, ...]
    runs: dict[tuple[int, int], int]
    alive: dict[tuple[int, int], int]
    through: dict[tuple[int, int], int]
    order: Order
    unit_bytes: float
    picks: dict[int, tuple[int, ...]]
    picks_again: dict[tuple[int, int], tuple[int, ...]]
    read_sets: dict[int, tuple[int, ...]]
    free: frozenset[int]
    fixed_seconds: float
    unit_seconds: float
    infeasible: bool


def bound_of(relaxation: Relaxation, result: mip.Result) -> float:
    """The bound in seconds that a solver's result says."""
    # a part in a million less: the solver's optimum is one within its tolerances
    return relaxation.fixed_seconds + result.bound * relaxation.unit_seconds * (1 - 1e-6)


def floor_seconds(graph: Graph, costs: Costs, options: Options) -> float:
    """What every schedule costs: each necessary operator once, with its cheapest implementation."""
    return sum(min(costs.seconds[i][k] for k in allowed_choices(graph, i, options)) for i in necessary(graph, options))


def _read_sets(graph: Graph, costs: Costs, operator: int, options: Options) -> list[tuple[frozenset[int], int]]:
    """The sets of tensors that implementations read, none a subset of a dearer one, each with its cheapest."""
    op, seconds = graph.operators[operator], costs.seconds[operator]
    choices = sorted(allowed_choices(graph, operator, options), key=lambda k: (seconds[k], k))
    found: list[tuple[frozenset[int], int]] = []
    for k in choices:
        reads = frozenset(op.implementations[k].inputs)
        if not any(earlier <= reads for earlier, _ in found):
            found.append((reads, k))
    return found


def relax(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    places: Places,
    options: Options,
    margins: Mapping[int, int] | None = None,
    least_bytes: bool = False,
) -> Relaxation:
    """Write the relaxed program that looks at memory at ``places``.

    At a run again: what it reads and writes, and what is alive throughout the segment in which it is, must fit; where
    it is ordered, also what runs before it in the segment for what runs after it.
    ``margins`` are bytes to leave free at a point, for what recomputation needs around it; with margins (even empty)
    all runs are taken to be in the graph's order, and the program is no relaxation any more, but finds schedules.
    With ``least_bytes`` the budget is no limit: the program minimizes the bytes B that a budget would have to have.
    """
    operators, tensors, writer = graph.operators, graph.tensors, graph.writer
    points, ordered = places.points, places.ordered if margins is None else frozenset()
    count = len(points)
    segment = [bisect.bisect_left(points, op.id) for op in operators]  # a point ends its segment
    first_backward = bisect.bisect_left(points, graph.forward_count)
    free = [
        t.external or (not operators[writer[t.id]].optional and (t.kept or t.nbytes < _NEGLIGIBLE * budget_bytes))
        for t in tensors
    ]
    sets = {op.id: _read_sets(graph, costs, op.id, options) for op in operators}
    any_reads = {i: {t for reads, _ in s for t in reads if not free[t]} for i, s in sets.items()}
    all_reads = {i: {t for t in frozenset.intersection(*(r for r, _ in s)) if not free[t]} for i, s in sets.items()}
    members: list[list[int]] = [[] for _ in range(count + 1)]
    for op in operators:
        if not op.optional:
            members[segment[op.id]].append(op.id)

    # Which runs can be useful, and which tensors can be wanted at the beginning of each segment.
    wanted: set[int] = set()
    useful: list[list[int]] = [[] for _ in range(count + 1)]
    wanted_at: list[set[int]] = [set() for _ in range(count + 1)]
    for s in range(count, -1, -1):
        for i in members[s]:
            wanted |= any_reads[i]
        for op in reversed(operators):
            again = op.phase == FORWARD and op.replayable and s >= first_backward and options.recompute
            here = op.optional and segment[op.id] == s
            if (again or here) and segment[op.id] <= s and any(t in wanted and not free[t] for t in op.outputs):
                useful[s].append(op.id)
                wanted |= any_reads[op.id]
        for i in members[s]:
            wanted.difference_update(operators[i].outputs)
        wanted_at[s] = set(wanted)

    unit_seconds = max(sum(row[0] for row in costs.seconds), 1e-30) / _SCALE
    unit_bytes = max(budget_bytes, 1) / _SCALE
    runs = {key: n for n, key in enumerate((i, s) for s in range(count + 1) for i in useful[s])}
    run_seconds = [costs.seconds[i][sets[i][0][1]] / unit_seconds if len(sets[i]) == 1 else 0.0 for i, _ in runs]
    alive = {
        key: n
        for n, key in enumerate(
            (t, s) for s in range(1, count + 1) for t in sorted(wanted_at[s] | any_reads[points[s - 1]])
        )
    }
    picks: dict[int, tuple[int, ...]] = {}
    pick_seconds: list[float] = []
    fixed_seconds = 0.0
    for i in itertools.chain.from_iterable(members):
        if len(sets[i]) == 1:
            fixed_seconds += costs.seconds[i][sets[i][0][1]]
        else:
            picks[i] = tuple(range(len(pick_seconds), len(pick_seconds) + len(sets[i])))
            pick_seconds += [costs.seconds[i][k] / unit_seconds for _, k in sets[i]]
    picks_again: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, s in runs:
        if len(sets[i]) > 1:
            picks_again[i, s] = tuple(range(len(pick_seconds), len(pick_seconds) + len(sets[i])))
            pick_seconds += [costs.seconds[i][k] / unit_seconds for _, k in sets[i]]

    rows = mip.Rows()
    infeasible = False
    limit_bytes = 0 if least_bytes else budget_bytes
    limit = [("B", 0, -1.0)] if least_bytes else []

    def available(t: int, s: int, reader: int = -1) -> list[tuple[str, int, float]] | None:
        """What makes t available in segment s, to ``reader``; None where it is in any case."""
        w = writer[t]
        if segment[w] == s and not operators[w].optional:
            return None
        terms = [("S", alive[t, s], -1.0)] if (t, s) in alive else []
        in_forward = reader >= 0 and operators[reader].phase == FORWARD  # where nothing runs again
        if (w, s) in runs and (segment[w] == s or not in_forward):
            terms.append(("R", runs[w, s], -1.0))
        return terms

    for s in range(count + 1):
        # What an operator of the segment certainly reads is available in it.
        reader_of = {(operators[i].phase, t): i for i in members[s] for t in all_reads[i]}
        for (_, t), reader in reader_of.items():
            terms = available(t, s, reader)
            if terms is not None:
                rows.add(terms, -1.0)
        # An implementation is used only where what it reads is available.
        for i in members[s]:
            if i in picks:
                for t in any_reads[i] - all_reads[i]:
                    terms = available(t, s, i)
                    if terms is not None:
                        using = [("M", j, 1.0) for j, (reads, _) in zip(picks[i], sets[i], strict=True) if t in reads]
                        rows.add([*using, *terms], 0.0)
        # A run again reads what is available.
        for i in useful[s]:
            for t in all_reads[i]:
                terms = available(t, s)
                if terms is not None:
                    rows.add([("R", runs[i, s], 1.0), *terms], 0.0)
            for t in any_reads[i] - all_reads[i]:
                terms = available(t, s)
                if terms is not None:
                    sets_again = zip(picks_again[i, s], sets[i], strict=True)
                    rows.add([*(("M", j, 1.0) for j, (reads, _) in sets_again if t in reads), *terms], 0.0)
        if s == count:
            break
        # What is alive at the next point was available before it.
        point = points[s]
        for t in wanted_at[s + 1] | any_reads[point]:
            terms = available(t, s)
            if terms is not None:
                rows.add([("S", alive[t, s + 1], 1.0), *terms], 0.0)
        # What the point's operator reads is alive before it.
        for t in all_reads[point]:
            rows.add([("S", alive[t, s + 1], -1.0)], -1.0)
        if point in picks:
            for t in any_reads[point] - all_reads[point]:
                using = [("M", j, 1.0) for j, (reads, _) in zip(picks[point], sets[point], strict=True) if t in reads]
                rows.add([*using, ("S", alive[t, s + 1], -1.0)], 0.0)
        # What is alive before the point, what it writes, and its workspace fit the budget.
        certain = _kept_bytes(graph, point) + _least_written_bytes(graph, costs, point, options)
        outputs = operators[point].outputs
        stored = [
            ("S", alive[t, s + 1], tensors[t].nbytes / unit_bytes)
            for t in wanted_at[s + 1] | any_reads[point]
            if t not in outputs
        ]
        margin = (margins or {}).get(point, 0)
        if certain + margin > limit_bytes and not least_bytes:
            infeasible = True
        rows.add([*stored, *limit], (limit_bytes - certain - margin) / unit_bytes)

    # Where a run of the segment that ends at a point needs room: what it reads and writes, and what is alive
    # throughout. Z[t, s] >= S[t, s + 1] - R[writer of t, s] says that t is alive throughout segment s.
    through: dict[tuple[int, int], int] = {}

    def written_again(t: int, s: int) -> int | None:
        """Whose run again in segment s may write t."""
        w = writer[t]
        return w if (w, s) in runs and segment[w] < s and not operators[w].optional else None

    def from_before(ts: Iterable[int], s: int) -> list[int]:
        """Those that no operator of segment s writes but in a run again."""
        return sorted(t for t in ts if segment[writer[t]] < s and not operators[writer[t]].optional)

    order = Order(
        rows,
        runs,
        alive,
        written_again,
        lambda i, s: from_before(all_reads[i], s),
        lambda t: tensors[t].nbytes > _HELD * budget_bytes,
    )
    for i, s in itertools.product(sorted(places.runs), range(count)):
        if (i, s) not in runs:
            continue
        point = points[s]
        own = {*all_reads[i], *operators[i].outputs}
        ends = wanted_at[s + 1] | any_reads[point]
        held = order.held(i, s, from_before(ends, s), own) if i in ordered and not operators[i].optional else {}
        terms = [(*column, tensors[t].nbytes / unit_bytes) for t, column in held.items()]
        for t in sorted(ends - held.keys()):
            w = writer[t]
            if t in own or (segment[w] == s and not operators[w].optional):
                continue
            if (w, s) not in runs or (margins is not None and w < i):
                terms.append(("S", alive[t, s + 1], tensors[t].nbytes / unit_bytes))
                continue
            if (t, s) not in through:
                through[t, s] = len(through)
                rows.add([("S", alive[t, s + 1], 1.0), ("R", runs[w, s], -1.0), ("Z", through[t, s], -1.0)], 0.0)
            terms.append(("Z", through[t, s], tensors[t].nbytes / unit_bytes))
        room = sum(tensors[t].nbytes for t in all_reads[i]) + _least_written_bytes(graph, costs, i, options)
        certain = _kept_bytes(graph, points[s - 1] + 1 if s else 0)
        rows.add([*terms, *limit, ("R", runs[i, s], room / unit_bytes)], (limit_bytes - certain) / unit_bytes)

    variables = order.variables()
    if through:
        variables["Z"] = cp.Variable(len(through), name="Z", bounds=[0, 1])
    for name, size in (("R", len(runs)), ("S", len(alive)), ("M", len(pick_seconds))):
        if size:
            variables[name] = cp.Variable(size, name=name, boolean=True)
    if least_bytes:
        variables["B"] = cp.Variable(1, name="B", nonneg=True)
    constraints = rows.constraints(variables)
    # Who runs uses one implementation: the sum over l of M[j, l] is 1, or R.
    one = mip.Rows()
    for columns in picks.values():
        one.add([("M", j, 1.0) for j in columns], 1.0)
    for key, columns in picks_again.items():
        one.add([*(("M", j, 1.0) for j in columns), ("R", runs[key], -1.0)], 0.0)
    constraints += one.constraints(variables, equal=True)
    objective: cp.Expression = cp.Constant(0.0)
    if least_bytes:
        objective = cp.sum(variables["B"])
    elif runs:
        objective += np.array(run_seconds) @ variables["R"]
    if (twice := order.twice) and not least_bytes:
        once_more = np.array([min(costs.seconds[i][k] for _, k in sets[i]) for i, _ in twice])
        objective += once_more / unit_seconds @ variables["D"]
    if pick_seconds and not least_bytes:
        objective += np.array(pick_seconds) @ variables["M"]
    return Relaxation(
        cp.Problem(cp.Minimize(objective), constraints),
        points,
        runs,
        alive,
        through,
        order,
        unit_bytes,
        picks,
        picks_again,
        {i: tuple(k for _, k in sets[i]) for i in sets},
        frozenset(t.id for t in tensors if free[t.id]),
        fixed_seconds,
        unit_seconds,
        infeasible or rows.impossible,
    )


def _kept_bytes(graph: Graph, before: int) -> int:
    """Bytes of the kept tensors that the compulsory operators below ``before`` write."""
    operators = graph.operators[:before]
    outputs = (graph.tensors[t] for op in operators if not op.optional for t in op.outputs)
    return sum(t.nbytes for t in outputs if t.kept)


def _least_written_bytes(graph: Graph, costs: Costs, operator: int, options: Options) -> int:
    """What a run of ``operator`` allocates at least: its outputs and workspace, in place where that is possible."""
    op = graph.operators[operator]
    return min(
        sum(graph.tensors[t].nbytes for t in op.outputs[op.implementations[k].in_place_of is not None :])
        + costs.workspace_bytes[operator][k]
        for k in allowed_choices(graph, operator, options)
    )


def relaxed_schedule(graph: Graph, relaxation: Relaxation, value: dict[str, mip.Vector]) -> Schedule | None:
    """A solution of a relaxed program as a schedule, every run as late as it can be.

    Before a point, what takes most room beside what it leaves runs first. The schedule follows all rules of the replay
    except the budget. None where it can not be written down (a random operator would have to run again).
    """
    operators, points = graph.operators, relaxation.points
    forward: list[Step] = []
    backward: list[Step] = []
    present: set[int] = set(relaxation.free)
    once_more: set[int] = set()  # operators of the segment that are to run twice, and did not yet

    def on(name: str, column: int | None) -> bool:
        return column is not None and value[name][column] > 0.5

    def choice(i: int, columns: tuple[int, ...]) -> int:
        options = relaxation.read_sets[i]
        chosen = [k for k, column in zip(options, columns, strict=False) if on("M", column)]
        k = chosen[0] if chosen else options[0]
        return counterpart(operators[i], k)  # whether it may run in place is not modelled

    def provide(t: int) -> bool:
        if t in present:
            return True
        op = operators[graph.writer[t]]
        if not op.replayable:
            return False
        k = choice(op.id, relaxation.picks_again.get((op.id, s), ()))
        while not present.issuperset(op.implementations[k].inputs):  # providing one may let go of another, once
            if not all(provide(u) for u in op.implementations[k].inputs):
                return False
        backward.append(Step(op.id, k))
        present.update(op.outputs)
        again = {graph.writer[u] for u in op.implementations[k].inputs} & once_more
        once_more.difference_update(again)
        present.difference_update(*(operators[w].outputs for w in again))
        return True

    def in_passing(t: int, alive: set[int]) -> tuple[bool, int]:
        """Whether t comes back after others, and the bytes that it takes to provide it beside those that stay."""
        order: dict[int, None] = {}

        def visit(u: int) -> None:
            w = graph.writer[u]
            if u not in present and w not in order:
                for read in operators[w].inputs:
                    visit(read)
                order[w] = None

        visit(t)
        last = {u: w for w in order for u in operators[w].inputs}
        held = most = 0
        for w in order:
            held += sum(graph.tensors[u].nbytes for u in operators[w].outputs)
            most = max(most, held)
            read = (u for u in operators[w].inputs if graph.writer[u] in order and last[u] == w and u not in alive)
            held -= sum(graph.tensors[u].nbytes for u in read)
        return graph.writer[t] in once_more, held - most

    for s in range(len(points) + 1):
        begin = points[s - 1] + 1 if s else 0
        end = points[s] + 1 if s < len(points) else len(operators)
        alive = {t for (t, at), column in relaxation.alive.items() if at == s + 1 and on("S", column)}
        once_more = {w for (w, at), column in relaxation.order.twice.items() if at == s and on("D", column)}
        for op in operators[begin:end]:
            if op.optional:
                if on("R", relaxation.runs.get((op.id, s))):
                    k = choice(op.id, relaxation.picks_again.get((op.id, s), ()))
                    reads = op.implementations[k].inputs
                    if not (present.issuperset(reads) if op.phase == FORWARD else all(provide(t) for t in reads)):
                        return None
                    (forward if op.phase == FORWARD else backward).append(Step(op.id, k))
                    present.update(op.outputs)
                continue
            k = choice(op.id, relaxation.picks.get(op.id, ()))
            if op.phase == BACKWARD:
                needed = set(op.implementations[k].inputs)
                if op.id + 1 == end:
                    needed |= alive - set(op.outputs)
                passing = {t: (*in_passing(t, needed), t) for t in needed}
                if not all(provide(t) for t in sorted(needed, key=passing.__getitem__)):
                    return None
            elif not present.issuperset(op.implementations[k].inputs):
                return None
            (forward if op.phase == FORWARD else backward).append(Step(op.id, k))
            present.update(op.outputs)
        if s < len(points):
            present = alive | relaxation.free
    return tidy.without_dead_runs(graph, Schedule(tuple(forward), tuple(backward)))


def start_from(graph: Graph, relaxation: Relaxation, schedule: Schedule) -> dict[str, mip.Vector]:
    """The values of the program's variables that say ``schedule``: feasible ones if its memory at the points is."""
    points = relaxation.points
    value = {"R": np.zeros(len(relaxation.runs)), "S": np.zeros(len(relaxation.alive))}
    all_picks = (*relaxation.picks.values(), *relaxation.picks_again.values())
    value["M"] = np.zeros(sum(len(columns) for columns in all_picks))
    steps = schedule.forward + schedule.backward
    forward_points = {point: s for s, point in enumerate(points)}
    ran: dict[int, list[int]] = {}
    place = 0
    segments = []
    for i, step in enumerate(steps):
        segments.append(place)
        op = graph.operators[step.operator]
        if op.optional or (i >= len(schedule.forward) and op.phase == FORWARD):
            ran.setdefault(place, []).append(op.id)
            if (column := relaxation.runs.get((op.id, place))) is not None:
                value["R"][column] = 1.0
        elif op.id in forward_points:
            place = forward_points[op.id] + 1
    wanted: set[int] = set()
    for i in range(len(steps) - 1, -1, -1):
        op = graph.operators[steps[i].operator]
        reads = op.implementations[steps[i].implementation].inputs
        at_point = segments[i] < len(points) and points[segments[i]] == op.id
        after = {t for t in op.outputs if t in wanted}
        wanted.difference_update(op.outputs)
        wanted.update(reads)
        if at_point:
            for t in wanted | after:
                if (column := relaxation.alive.get((t, segments[i] + 1))) is not None:
                    value["S"][column] = 1.0
        again = op.optional or (op.phase == FORWARD and i >= len(schedule.forward))
        columns = relaxation.picks_again.get((op.id, segments[i]), ()) if again else relaxation.picks.get(op.id, ())
        if columns and not value["M"][list(columns)].any():
            # the read set that is used, or a cheaper one within it
            for column, k in zip(columns, relaxation.read_sets[op.id], strict=True):
                if set(op.implementations[k].inputs) <= set(reads):
                    value["M"][column] = 1.0
                    break
    value["Z"] = np.zeros(len(relaxation.through))
    for (t, s), column in relaxation.through.items():
        ends = value["S"][relaxation.alive[t, s + 1]]
        value["Z"][column] = max(0.0, ends - value["R"][relaxation.runs[graph.writer[t], s]])
    relaxation.order.start(value, ran)
    return value
