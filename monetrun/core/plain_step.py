"""The plain step: its schedules are ``plain_schedule``'s, and it allocates what eager does besides."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, takewhile

from monetrun.core.graph import Costs, Graph, Requests
from monetrun.core.keeping import as_scripted
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.core.regions import with_held_tensors
from monetrun.core.simulate import Timeline, simulate
from monetrun.core.step import StepRecord


def plain_step(record: StepRecord) -> tuple[StepRecord, list[Schedule]]:
    """The record and the schedules whose replay is the plain step."""
    record = as_scripted(record)
    schedules = [plain_schedule(graph) for graph in record.graphs]
    graphs = tuple(map(with_held_tensors, record.graphs))
    costs = tuple(_with_joint_calls(g, c) for g, c in zip(record.graphs, record.costs, strict=True))
    return replace(record, graphs=graphs, costs=costs), schedules


def plain_timeline(graph: Graph, costs: Costs) -> Timeline:
    """What a graph allocates and costs in the plain step."""
    return simulate(with_held_tensors(graph), _with_joint_calls(graph, costs), plain_schedule(graph))


def _with_joint_calls(graph: Graph, costs: Costs) -> Costs:
    """``costs`` of operators that eager runs as one call with the next: the first has all that the call requests.

    The next one's results are freed with it, and requested again at once.
    """
    pairs = [(op, following) for op, following in pairwise(graph.operators) if op.one_call_with_next]
    if not pairs:
        return costs
    workspaces, requests = list(costs.workspace_bytes), list(costs.requests)
    for op, following in pairs:
        nbytes = sum(graph.tensors[t].nbytes for t in following.outputs)
        workspaces[op.id] = (workspaces[op.id][0] + nbytes, *workspaces[op.id][1:])
        if requests:
            first, second = _as_one_call(requests[op.id][0], requests[following.id][0], nbytes)
            requests[op.id] = (first, *requests[op.id][1:])
            requests[following.id] = (second, *requests[following.id][1:])
    return replace(costs, workspace_bytes=tuple(workspaces), requests=tuple(requests))


def _as_one_call(own: Requests, of_next: Requests, nbytes: int) -> tuple[Requests, Requests]:
    """The requests of two operators that are one call of eager's, which computes the next one's results first.

    What both make first, a contiguous copy of the gradient that they read, the call makes once.

    Args:
        own: of the first operator.
        of_next: of the next one.
        nbytes: of its results.
    """
    if not own.results:
        return own, of_next  # the workspace stands for it
    if not of_next.results:
        of_next = Requests((nbytes,), (1,))
    alike = takewhile(lambda pair: pair[0] == pair[1] > 0, zip(own.sizes, of_next.sizes, strict=False))
    shared = {n for n, _ in enumerate(alike, 1) if {-n} <= {*own.sizes} & {*of_next.sizes}}
    made_by_next = [n for n in of_next.sizes if n > 0]
    numbers = {n: n for n in shared}
    sizes = [n for n in of_next.sizes if -n not in shared]
    for number in range(1, sum(n > 0 for n in own.sizes) + 1):
        numbers.setdefault(number, len(made_by_next) + number - len(shared.intersection(range(number))))
    made = 0
    for n in own.sizes:
        made += n > 0
        if n < 0 or made not in shared:
            sizes.append(n if n > 0 else -numbers[-n])
    sizes += [-n for n in of_next.results]
    given = tuple(made_by_next[number - 1] for number in of_next.results)
    return (
        Requests(tuple(sizes), tuple(numbers[n] for n in own.results)),
        Requests(given, tuple(range(1, len(given) + 1))),
    )
