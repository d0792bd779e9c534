"""The seconds of a step on several ranks: a compute clock, and a communication clock that runs beside it.

DistributedDataParallel: a bucket of gradients is reduced as soon as its last gradient is there and the bucket before it
has been. FSDP2: in the forward, a module's all-gather begins with the call before its own, in the backward where the
module after it has been gathered; its gradients are reduced after its backward; one collective runs at a time. The step
ends when both clocks stand still. The script's own work between the graphs, and the optimizer's, are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.event import GATHER, REDUCE, WAIT
from monetrun.core.freed import freed_after
from monetrun.core.graph import FORWARD, Costs
from monetrun.core.link import Link
from monetrun.core.plan import Schedule, Step
from monetrun.core.step import OUTSIDE, StepRecord


@dataclass(frozen=True, slots=True)
class StepClocks:
    """One step's seconds.

    Attributes:
        compute_seconds: of the graphs.
        communication_seconds: of all collectives.
        step_seconds: until both have ended.
        buckets: how many collectives there are: all-reduces of buckets, or all-gathers and reduce-scatters of modules.
    """

    compute_seconds: float
    communication_seconds: float
    step_seconds: float
    buckets: int

    @property
    def hidden_seconds(self) -> float:
        """Communication while the backward computes."""
        return self.compute_seconds + self.communication_seconds - self.step_seconds


def step_clocks(record: StepRecord, schedules: Sequence[Schedule], link: Link, ranks: int) -> StepClocks:
    """Run the step's two clocks.

    Args:
        record: of the step; without ``reductions`` and ``sharding`` nothing is communicated. The seconds of sharded
            modules' collectives are in it.
        schedules: of its graphs; ``simulate`` has accepted them.
        link: between the ranks.
        ranks: that reduce.
    """
    if record.sharding is not None:
        return sharded_clocks(record, schedules)
    reduced = record.reductions
    given = () if reduced is None else reduced.gradients
    now = 0.0
    ready: dict[tuple[int, int], float] = {}  # of a gradient's last backward
    for event in record.events:
        if event.kind == OUTSIDE:
            continue
        k = event.graph
        graph, schedule = record.graphs[k], schedules[k]
        steps = schedule.forward if event.kind == FORWARD else schedule.backward
        ends = [now, *(now + s for s in itertools.accumulate(_seconds(record.costs[k], steps)))]
        if event.kind != FORWARD:
            last = freed_after(graph, schedule, [t for g, t in given if g == k])
            ready.update(((k, t), ends[i + 1]) for t, i in last.items())
        now = ends[-1]
    busy, free = 0.0, 0.0
    sizes = [record.graphs[k].tensors[t].nbytes for k, t in given]
    buckets = [] if reduced is None or ranks < 2 else reduced.buckets(sizes)
    for bucket in buckets:
        seconds = link.all_reduce_seconds(sum(sizes[i] for i in bucket), ranks)
        busy += seconds
        free = max(free, *(ready.get(given[i], now) for i in bucket)) + seconds
    return StepClocks(now, busy, max(now, free), len(buckets))


def sharded_clocks(record: StepRecord, schedules: Sequence[Schedule]) -> StepClocks:
    """The two clocks of a step of modules that FSDP2 shards, under the record's choice of those that keep parameters.

    Args:
        record: of the step.
        schedules: of its graphs; ``simulate`` has accepted them.
    """
    modules = () if record.sharding is None else record.sharding.modules
    now = free = begun = compute = busy = 0.0  # ``begun``: the last call, on the compute clock
    count = 0
    ready: dict[int, float] = {}
    following = ""
    phases = []  # of the call after each event
    for event in reversed(record.events):
        following = following if event.kind == OUTSIDE else event.kind
        phases.append(following)
    for event, phase in zip(record.events, reversed(phases), strict=True):
        if event.kind != OUTSIDE:
            schedule = schedules[event.graph]
            steps = schedule.forward if event.kind == FORWARD else schedule.backward
            begun, seconds = now, sum(_seconds(record.costs[event.graph], steps))
            now, compute = now + seconds, compute + seconds
        elif event.action is not None and event.action.kind == WAIT:
            now = max(now, ready.get(event.action.module, now))
        elif event.action is not None and event.action.kind in (GATHER, REDUCE):
            module, gathers = modules[event.action.module], event.action.kind == GATHER
            seconds = module.gather_seconds if gathers else module.reduce_seconds
            free = max(free, begun if gathers and phase == FORWARD else now) + seconds
            ready[event.action.module] = free
            busy, count = busy + seconds, count + bool(gathers or module.reduced_bytes)
    return StepClocks(compute, busy, max(now, free), count)


def _seconds(costs: Costs, steps: Sequence[Step]) -> list[float]:
    return [costs.seconds[s.operator][s.implementation] for s in steps]
