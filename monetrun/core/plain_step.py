"""The plain step: its schedules are ``plain_schedule``'s, and it allocates what eager does besides."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

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
    """``costs`` with the next operator's results in the workspaces of those that eager runs with it as one call."""
    beside = {
        op.id: sum(graph.tensors[t].nbytes for t in following.outputs)
        for op, following in pairwise(graph.operators)
        if op.one_call_with_next
    }
    if not beside:
        return costs
    workspaces, requests = list(costs.workspace_bytes), list(costs.requests)
    for i, nbytes in beside.items():
        workspaces[i] = (workspaces[i][0] + nbytes, *workspaces[i][1:])
        if requests:
            requests[i] = (_after(nbytes, requests[i][0]), *requests[i][1:])
    return replace(costs, workspace_bytes=tuple(workspaces), requests=tuple(requests))


def _after(nbytes: int, own: Requests) -> Requests:
    """``own`` while ``nbytes`` are allocated that were requested before."""
    if not own.results:
        return own  # the workspace stands for it
    sizes = (nbytes, *(n if n > 0 else n - 1 for n in own.sizes), -1)
    return Requests(sizes, tuple(n + 1 for n in own.results))
