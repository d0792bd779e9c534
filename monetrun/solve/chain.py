"""Checkpoint selection (``monetrun.solve.checkpoints``) on a graph that is cut at its narrow points.

The algorithms look for the least peak and know of no budget: they are here for comparison, and for networks that are
chains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from monetrun.core.graph import FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, Step, each_once
from monetrun.core.simulate import simulate
from monetrun.solve import timing
from monetrun.solve.checkpoints import SELECTIONS
from monetrun.solve.slot import floor_seconds

# The share of the bytes crossing from forward to backward that may stay because they are small (BatchNorm's statistics,
# counters): otherwise the copy of a counter at the end of the forward pass would leave no narrow point before it.
_SMALL_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Chain:
    """A graph's forward pass, cut where at most one tensor crosses.

    Attributes:
        cuts: for each node the number of forward operators before it: operator ids, ascending; 0 first.
        tensors: for each node the tensor that crosses there, or None (both ends; a tensor that always stays).
        node_bytes: its bytes.
        inner_bytes: for each node the bytes of its layer that backward reads (node 0: 0), without the tensor that
            crosses and without those that always stay.
    """

    cuts: tuple[int, ...]
    tensors: tuple[int | None, ...]
    node_bytes: tuple[int, ...]
    inner_bytes: tuple[int, ...]


def linearize(graph: Graph) -> Chain:
    """Cut the forward pass at its narrow points: where forward operators still read at most one tensor.

    Parameters and the batch (external), the model's outputs (kept), what cannot be recomputed (a dropout's mask) and
    the smallest tensors do not count: they stay in every schedule of the checkpoints. A skip connection is alive across
    everything it skips, so there is no narrow point beneath one: a U-Net is a short chain.
    """
    free = _recomputable(graph)
    reads_left = [0] * len(graph.tensors)
    forward = [op for op in graph.operators if op.phase == FORWARD and op.plain]
    for op in forward:
        for t in set(op.inputs):
            reads_left[t] += free[t]
    cuts: list[int] = [0]
    tensors: list[int | None] = [None]
    crossing: set[int] = set()
    before: tuple[int, ...] = ()
    for op in forward[:-1]:
        crossing.update(t for t in op.outputs if reads_left[t])
        for t in set(op.inputs):
            reads_left[t] -= free[t]
            if not reads_left[t]:
                crossing.discard(t)
        now = tuple(crossing) if len(crossing) <= 1 else (-1,)
        tensor = now[0] if now else None
        # the first of several places in a row where the same tensor crosses alone: its readers are in the next layer
        if now != (-1,) and now != before and (tensor is None or tensor != tensors[-1]):
            cuts.append(op.id + 1)
            tensors.append(tensor)
        before = now
    cuts.append(graph.forward_count)
    tensors.append(None)

    inner_bytes = [0] * len(cuts)
    nodes = {t for t in tensors if t is not None}
    for t in _read_by_backward(graph):
        if free[t] and t not in nodes:
            inner_bytes[bisect_right(cuts, graph.writer[t])] += graph.tensors[t].nbytes
    node_bytes = (0 if t is None else graph.tensors[t].nbytes for t in tensors)
    return Chain(tuple(cuts), tuple(tensors), tuple(node_bytes), tuple(inner_bytes))


def _recomputable(graph: Graph) -> list[bool]:
    """For each tensor, whether a schedule may drop it in the forward pass and recompute it.

    False for what is always alive, for what cannot be recomputed, and for the smallest ones, up to ``_SMALL_SHARE``.
    """
    free = [not (t.external or t.kept) for t in graph.tensors]
    for op in graph.operators:
        if not op.replayable or op.phase != FORWARD or not op.plain:
            for t in op.outputs:
                free[t] = False
    wanted = _read_by_backward(graph)
    small_bytes = int(_SMALL_SHARE * sum(graph.tensors[t].nbytes for t in wanted if free[t]))
    forward = (t for op in graph.operators[: graph.forward_count] for t in op.outputs if free[t])
    for t in sorted(forward, key=lambda t: (graph.tensors[t].nbytes, t)):
        small_bytes -= graph.tensors[t].nbytes
        if small_bytes < 0:
            break
        free[t] = False
    return free


def _read_by_backward(graph: Graph) -> set[int]:
    return {t for op in graph.operators[graph.forward_count :] if op.plain for t in op.inputs}


def schedule_of(graph: Graph, chain: Chain, nodes: Sequence[int]) -> Schedule:
    """The schedule that keeps the checkpoints ``nodes`` of ``chain`` and recomputes each segment.

    A segment is recomputed before the first backward operator that reads a tensor dropped in it: those of its
    operators, in their order, that backward's reads depend on. The last segment is not dropped, since backward reads it
    at once. Every operator runs its default implementation.
    """
    plain = each_once(graph)
    free = _recomputable(graph)
    wanted = _read_by_backward(graph)
    segment_of: dict[int, int] = {}  # dropped tensors that backward reads
    replays: list[tuple[Step, ...]] = []
    for k, (i, j) in enumerate(pairwise(nodes[:-1])):
        checkpoint = chain.tensors[j]
        here = [op for op in graph.operators[chain.cuts[i] : chain.cuts[j]] if op.replayable and op.plain]
        dropped = {t for op in here for t in op.outputs if free[t] and t != checkpoint}
        needed = dropped & wanted
        segment_of.update(dict.fromkeys(needed, k))
        steps: list[Step] = []
        for op in reversed(here):
            if not needed.isdisjoint(op.outputs):
                steps.append(Step(op.id))
                needed |= dropped.intersection(op.inputs)
        replays.append(tuple(reversed(steps)))
    backward: list[Step] = []
    done: set[int] = set()
    for step in plain.backward:
        needed_here = {segment_of[t] for t in graph.operators[step.operator].inputs if t in segment_of}
        for k in sorted(needed_here - done):
            backward += replays[k]
        done |= needed_here
        backward.append(step)
    return Schedule(plain.forward, tuple(backward))


def schedule(graph: Graph, algorithm: str) -> Schedule:
    """The schedule to which ``algorithm`` (a name in ``SELECTIONS``) leads on this graph, whatever its peak.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in SELECTIONS:
        raise ValueError(f"no chain algorithm {algorithm!r}; there are {', '.join(SELECTIONS)}")
    if algorithm == "none":
        return each_once(graph)
    chain = linearize(graph)
    return schedule_of(graph, chain, SELECTIONS[algorithm](chain.node_bytes, chain.inner_bytes).nodes)


def _solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options, algorithm: str) -> Solution:
    began = timing.now()
    found = schedule(graph, algorithm if options.recompute else "none")
    timeline = simulate(graph, costs, found)
    bound_seconds = floor_seconds(graph, costs, options)
    if timeline.peak_bytes > budget_bytes:
        # no statement about other schedules: these algorithms consider one each
        return Solution(None, bound_seconds, "unknown", algorithm, timing.now() - began)
    status = "optimal" if timeline.seconds <= bound_seconds * (1 + 1e-12) else "feasible"
    return Solution(found, bound_seconds, status, algorithm, timing.now() - began)


def solve_hong_dp(
    graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()
) -> Solution:
    """``hong_dp``'s schedule if it fits the budget (bytes), else status ``"unknown"``; ignores ``starts``."""
    return _solve(graph, costs, budget_bytes, options, "hong-dp")


def solve_hong_linear(
    graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()
) -> Solution:
    """``hong_linear``'s schedule if it fits the budget (bytes), else status ``"unknown"``; ignores ``starts``."""
    return _solve(graph, costs, budget_bytes, options, "hong-linear")


def solve_sqrt(
    graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()
) -> Solution:
    """``sqrt``'s schedule if it fits the budget (bytes), else status ``"unknown"``; ignores ``starts``."""
    return _solve(graph, costs, budget_bytes, options, "sqrt")


def solve_none(
    graph: Graph, costs: Costs, budget_bytes: int, options: Options, starts: Sequence[Schedule] = ()
) -> Solution:
    """The plain schedule if it fits the budget (bytes), else status ``"unknown"``; ignores ``starts``."""
    return _solve(graph, costs, budget_bytes, options, "none")
