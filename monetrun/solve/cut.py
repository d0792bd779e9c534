"""Schedules from minimum cuts: which tensors cross from the forward to the backward part, and which are recomputed.

Put a price on every byte at every position of the step, and let every operator rerun at most once, right before the
first reader of its outputs. The cheapest choice is then a minimum cut: a rerun costs its seconds and the bytes of its
outputs from then on, a held tensor costs its bytes in between, and both require what they read. (torch's partitioner
cuts with one price, that of the end of the forward part.)

The prices are found as the multipliers of a Lagrangian relaxation are: cut, write the schedule, replay it, raise the
prices where it is over the budget and lower them where it is under (multiplicative weights: Arora, Hazan, Kale,
Theory of Computing 8, 2012). The positions of reruns, which depend on the schedule, are those of the previous round.

A cut of 3,000 operators takes milliseconds and considers the whole graph, while greedy eviction considers one tensor
at a time. They differ most on dense blocks, whose tensors pay only when all of them are dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from monetrun.core.graph import FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, each_once
from monetrun.core.simulate import simulate
from monetrun.solve import tidy

_ROUNDS = 16
_SECONDS_PER_OPERATOR = 5e-6  # of one cut and its replay, on a 2.6 GHz Zen 4 core (2026-11)
_STEP = 1.0  # change of a price's logarithm per excess relative to the budget; later rounds use less
_CAPACITY = 2**29  # of all finite edges together, since scipy's flows are 32-bit; an infinite edge has twice that


def schedules(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    options: Options,
    base: Schedule | None = None,
    rounds: int = _ROUNDS,
) -> list[Schedule]:
    """Schedules around the budget, in the order in which the prices were refined; none without ``recompute``.

    Args:
        graph: of any size.
        costs: of the graph.
        budget_bytes: that the peaks approach, from above and below.
        options: ``recompute``, and which in-place implementations may be used.
        base: provides implementations and optional operators; the plain schedule by default.
        rounds: how many cuts.
    """
    if not options.recompute:
        return []
    base = tidy.with_first_runs(graph, tidy.out_of_place(graph, base or each_once(graph)))
    network = _Network(graph, costs, base)
    prices = np.full(len(graph.operators), 2.0 * network.seconds_per_byte() / len(graph.operators))
    found = []
    for k in range(rounds):
        schedule = tidy.without_dead_runs(graph, dropping(graph, network.base, network.cut(prices)))
        schedule = tidy.in_place_where_legal(graph, costs, schedule, options)
        found.append(schedule)
        excess = network.replay(schedule) / max(budget_bytes, 1) - 1.0
        prices *= np.exp(_STEP / (1.0 + 0.1 * k) * np.clip(excess, -1.0, 1.0))
    return found


def dropping(graph: Graph, base: Schedule, dropped: Iterable[int]) -> Schedule:
    """``base`` with the tensors ``dropped`` not held from the forward to the backward part, and no others recomputed.

    What is missing is recomputed right before its first reader, and held until its last.

    Args:
        graph: with the tensors.
        base: not in place; every operator of its backward part also runs in its forward part. Of its reruns only the
            implementations are used.
        dropped: written by replayable operators of the forward part.
    """
    again = _again(graph, base)
    alive = {t.id for t in graph.tensors} - set(dropped)
    backward: list[Step] = []
    for step in base.backward:
        if graph.operators[step.operator].phase == FORWARD:
            continue
        waiting = [step]
        while waiting:
            last = waiting[-1]
            op = graph.operators[last.operator]
            missing = next((t for t in op.implementations[last.implementation].inputs if t not in alive), None)
            if missing is None:
                backward.append(waiting.pop())
                alive.update(op.outputs)
            else:
                waiting.append(Step(graph.writer[missing], again[graph.writer[missing]]))
    return Schedule(base.forward, tuple(backward))


def _again(graph: Graph, base: Schedule) -> dict[int, int]:
    """The implementation of each forward operator's rerun: that of its rerun in ``base``, or of its first run."""
    return {s.operator: s.implementation for s in (*base.forward, *base.backward) if s.operator < graph.forward_count}


class _Network:
    """The closure problem of a graph as a flow network.

    A node for every operator that may rerun (on the source's side: it does), one for every tensor that may be wanted in
    the backward part (on the source's side: it is, held or recomputed), the source and the sink.
    """

    def __init__(self, graph: Graph, costs: Costs, base: Schedule) -> None:
        self.graph, self.costs, self.base = graph, costs, base
        again = _again(graph, base)
        forward = [(graph.operators[o], graph.operators[o].implementations[k]) for o, k in sorted(again.items())]
        backward = [s for s in base.backward if s.operator >= graph.forward_count]
        tensors = graph.tensors
        # a kept tensor is in memory in any case
        self.wanted = [t for op, _ in forward for t in op.outputs if not tensors[t].kept]
        self.number = {t: i for i, t in enumerate(self.wanted)}
        self.nbytes = np.array([tensors[t].nbytes for t in self.wanted], dtype=float)
        self.ran = sorted(again)
        place = {o: i for i, o in enumerate(self.ran)}
        self.of = np.array([place[graph.writer[t]] for t in self.wanted], dtype=int)
        self.seconds = np.array(
            [costs.seconds[op.id][again[op.id]] if op.replayable else math.inf for op, _ in forward]
        )
        self.reads = [[self.number[t] for t in dict.fromkeys(impl.inputs) if t in self.number] for _, impl in forward]
        # where each tensor is read last in the forward part, and first and last in the backward one
        self.left = np.array([graph.writer[t] for t in self.wanted], dtype=int)
        self.first = np.full(len(self.wanted), len(graph.operators))
        self.last = np.full(len(self.wanted), -1)
        compulsory = np.zeros(len(self.wanted), dtype=bool)
        for step in base.forward:
            op = graph.operators[step.operator]
            for t in op.implementations[step.implementation].inputs:
                if t in self.number:
                    i = self.number[t]
                    self.left[i] = max(self.left[i], op.id)
                    compulsory[i] |= not op.optional
        for step in backward:
            for t in graph.operators[step.operator].implementations[step.implementation].inputs:
                if t in self.number:
                    i = self.number[t]
                    self.first[i], self.last[i] = min(self.first[i], step.operator), max(self.last[i], step.operator)
        self.direct = self.first, self.last
        # what only the backward part reads runs in the forward part only if it is held, so holding costs that run too
        idle = np.array([graph.operators[graph.writer[t]].optional for t in self.wanted], dtype=bool) & ~compulsory
        self.held_seconds = np.where(idle & np.isfinite(self.seconds[self.of]), self.seconds[self.of], 0.0)
        operators, count = len(self.ran), len(self.wanted)
        nodes = operators + np.arange(count)
        self.source, self.sink = operators + count, operators + count + 1
        read = np.flatnonzero(self.last >= 0)
        pairs = [(o, operators + t) for o, reads in enumerate(self.reads) for t in reads]
        self.tails = np.concatenate(
            [np.arange(operators), nodes, nodes, [a for a, _ in pairs], np.full(len(read), self.source)]
        ).astype(int)
        self.heads = np.concatenate(
            [np.full(operators, self.sink), self.of, np.full(count, self.sink), [b for _, b in pairs], nodes[read]]
        ).astype(int)
        self.endless = len(pairs) + len(read)

    def seconds_per_byte(self) -> float:
        """Average cost of recomputation."""
        finite = self.seconds[np.isfinite(self.seconds)]
        return float(finite.sum()) / max(float(self.nbytes.sum()), 1.0)

    def cut(self, prices: np.ndarray) -> list[int]:
        """The tensors to drop.

        Args:
            prices: seconds per byte at each of the graph's operators.
        """
        upto = np.concatenate([[0.0], np.cumsum(prices)])  # of what stands before an operator
        first = np.full(len(self.ran), len(prices))
        np.minimum.at(first, self.of, self.first)
        last = np.maximum(self.last, self.left)
        start = np.clip(first[self.of], self.left, last)
        held = self.nbytes * (upto[start + 1] - upto[self.left + 1]) + self.held_seconds
        after = self.nbytes * (upto[last + 1] - upto[start + 1])
        capacities = np.concatenate([self.seconds, held, after, np.full(self.endless, math.inf)])
        side = _source_side(self.sink + 1, self.tails, self.heads, capacities, self.source, self.sink)
        return [t for t, o in zip(self.wanted, self.of, strict=True) if side[o]]

    def replay(self, schedule: Schedule) -> np.ndarray:
        """The most bytes up to every compulsory operator; the next cut uses the positions of the reruns."""
        graph = self.graph
        during_bytes = simulate(graph, self.costs, schedule).during_bytes
        most = np.zeros(len(graph.operators))
        self.first, self.last = (positions.copy() for positions in self.direct)
        top, runs = 0, []
        for i, step in enumerate(itertools.chain(schedule.forward, schedule.backward)):
            top = max(top, during_bytes[i])
            if i >= len(schedule.forward) and step.operator < graph.forward_count:
                runs.append(step)
                continue
            most[step.operator], top = top, 0
            for run in runs:
                for t in graph.operators[run.operator].implementations[run.implementation].inputs:
                    if t in self.number:
                        j, at = self.number[t], step.operator
                        self.first[j], self.last[j] = min(self.first[j], at), max(self.last[j], at)
            runs = []
        return most


def _source_side(
    count: int, tails: np.ndarray, heads: np.ndarray, capacities: np.ndarray, source: int, sink: int
) -> np.ndarray:
    """Which nodes are on the source's side of the minimum cut: the smallest such set."""
    finite = np.isfinite(capacities)
    scale = _CAPACITY / (float(capacities[finite].sum()) or 1.0)
    whole = np.where(finite, np.rint(np.where(finite, capacities, 0.0) * scale), 2 * _CAPACITY).astype(np.int32)
    edges = csr_matrix((whole, (tails, heads)), shape=(count, count))
    residual = edges - maximum_flow(edges, source, sink).flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    side = np.zeros(count, dtype=bool)
    side[breadth_first_order(residual, source, return_predecessors=False)] = True
    return side


def work_seconds(graph: Graph, rounds: int = _ROUNDS) -> float:
    """Estimated seconds of ``schedules`` on an idle core."""
    return rounds * len(graph.operators) * _SECONDS_PER_OPERATOR
