"""What the rounds of a step cost at least."""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.core.event import calls_of_graphs
from monetrun.core.options import Options
from monetrun.core.plan import Schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, StepRecord
from monetrun.solve.slot import floor_seconds


def least_more(record: StepRecord, k: int, fast: Sequence[Schedule], options: Options) -> float:
    """How much more than under ``fast`` all calls of graph ``k`` cost at least: other implementations may be faster."""
    floor = floor_seconds(record.graphs[k], record.costs[k], options)
    return calls_of_graphs(record.events)[k] * (floor - seconds_of(record, [k], fast))


def disjoint_sum(added: dict[tuple[int, ...], float], others: Sequence[float]) -> float:
    """The largest values whose keys share no graph, and ``others`` of the graphs that none of these has, added up.

    Rounds that share a graph pay for it only once.
    """
    total, counted = 0.0, set[int]()
    for graphs, seconds in sorted(added.items(), key=lambda item: (-item[1], item[0])):
        if counted.isdisjoint(graphs):
            total += seconds
            counted.update(graphs)
    return total + sum(seconds for k, seconds in enumerate(others) if k not in counted)


def calls_in_step(record: StepRecord, bounds: tuple[int, int]) -> dict[int, int]:
    """The graphs of a round, in order, and how often a whole step calls each of them."""
    graphs = sorted({e.graph for e in record.events[slice(*bounds)] if e.kind != OUTSIDE})
    calls = calls_of_graphs(record.events)
    return {k: max(1, calls[k]) for k in graphs}


def seconds_of(record: StepRecord, graphs: Sequence[int], schedules: Sequence[Schedule]) -> float:
    """The seconds of one call of each of ``graphs``."""
    return sum(simulate(record.graphs[k], record.costs[k], schedules[k]).seconds for k in graphs)
