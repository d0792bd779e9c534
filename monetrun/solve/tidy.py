"""Improvements of a schedule that need no search: remove runs that nothing reads, run in place where it is legal."""

from __future__ import annotations

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, counterpart
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step


def without_dead_runs(graph: Graph, schedule: Schedule) -> Schedule:
    """Remove the runs whose outputs nothing reads."""
    wanted: set[int] = set()
    kept_written = {t for s in schedule.forward for t in graph.operators[s.operator].outputs if graph.tensors[t].kept}
    parts: list[tuple[Step, ...]] = []
    for part, steps in ((BACKWARD, schedule.backward), (FORWARD, schedule.forward)):
        left = []
        for step in reversed(steps):
            op = graph.operators[step.operator]
            if op.phase != part or op.optional:
                fresh = {t for t in op.outputs if t not in kept_written or part == FORWARD}
                if not fresh & wanted:
                    continue
            wanted.difference_update(t for t in op.outputs if t not in kept_written or part == FORWARD)
            wanted.update(op.implementations[step.implementation].inputs)
            left.append(step)
        parts.append(tuple(left[::-1]))
    return Schedule(parts[1], parts[0])


def at_least_as_good(graph: Graph, costs: Costs, operator: int, k: int, j: int) -> bool:
    """Whether implementation k, in place, reads no more than j, is as exact, and costs no more in anything."""
    one, other = (graph.operators[operator].implementations[i] for i in (k, j))
    seconds, workspaces = costs.seconds[operator], costs.workspace_bytes[operator]
    if other.in_place_of is not None and j < k:  # the first of two equal ones stays
        return False
    cheaper = seconds[k] <= seconds[j] and workspaces[k] <= workspaces[j]
    return cheaper and one.exact >= other.exact and set(one.inputs) <= set(other.inputs)


def in_place_where_legal(graph: Graph, costs: Costs, schedule: Schedule, options: Options) -> Schedule:
    """Use in-place implementations wherever the replay allows it: they take fewer bytes and cost no more."""
    wanted: set[int] = set()
    steps = list(schedule.forward + schedule.backward)
    for i in range(len(steps) - 1, -1, -1):
        op = graph.operators[steps[i].operator]
        k = steps[i].implementation
        for j, impl in enumerate(op.implementations):
            t = impl.in_place_of
            if t is None or op.implementations[k].in_place_of is not None:
                continue
            if not impl.allowed_by(options.implementations):
                continue
            target = graph.tensors[t]
            legal = not (target.external or target.kept or t in wanted)
            legal = legal and target.nbytes == graph.tensors[op.outputs[0]].nbytes
            same_reads = set(impl.inputs) == set(op.implementations[k].inputs)
            if legal and same_reads and at_least_as_good(graph, costs, op.id, j, k):
                steps[i] = Step(op.id, j)
        wanted.difference_update(op.outputs)
        wanted.update(op.implementations[steps[i].implementation].inputs)
    cut = len(schedule.forward)
    return Schedule(tuple(steps[:cut]), tuple(steps[cut:]))


def out_of_place(graph: Graph, schedule: Schedule) -> Schedule:
    """Replace in-place implementations by those that they are variants of, which are legal in any order."""

    def outer(step: Step) -> Step:
        op = graph.operators[step.operator]
        k = counterpart(op, step.implementation)
        return Step(step.operator, k if op.implementations[k].in_place_of is None else 0)

    return Schedule(tuple(map(outer, schedule.forward)), tuple(map(outer, schedule.backward)))


def with_first_runs(graph: Graph, schedule: Schedule) -> Schedule:
    """``schedule`` in which each operator of the backward part also runs in the forward part.

    The native search requires it. Such a run is dead: the search counts neither its seconds nor its bytes, and
    ``without_dead_runs`` removes it from the result.
    """
    first = {s.operator: s for s in schedule.forward}
    again = {s.operator for s in schedule.backward if s.operator < graph.forward_count}
    if again <= first.keys():
        return schedule
    wanted = set(again)
    for op in reversed(graph.operators[: graph.forward_count]):
        if op.id in wanted and op.id not in first:
            first[op.id] = Step(op.id)
            wanted.update(graph.writer[t] for t in op.inputs)
    return Schedule(tuple(first[i] for i in sorted(first)), schedule.backward)
