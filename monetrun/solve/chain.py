"""Which nodes of a chain to checkpoint: Hong et al.'s two algorithms, Chen et al.'s square root, and none.

The algorithms are those of Hong, Tsai, Wang, Liu and Wu, "GPU Memory Usage Optimization for Backward Propagation in
Deep Network Training" (arXiv 2502.12499). They look for the *least peak* and do not know of a budget: they are here to
be compared with, and for networks that are chains.

A chain has nodes ``0..n``: node 0 is the network's input, node ``t`` what layer ``t`` gives, of ``d[t]`` bytes. A
choice ``C`` of checkpoints holds both ends, ``0 = c[0] < c[1] < ... < c[m] = n``; backward recomputes the segment
between two of them from the earlier one. A segment costs

    s(i, j) = sum of d[t] for i < t < j  +  sum of e[t] for i < t <= j  +  max of d[t] for i <= t < j

that is: the nodes inside it, what backward saves inside its layers (``e``, zero in the paper, whose layers have no
inside), and the one gradient buffer that its backward pass hands from layer to layer. The gradient at node ``n`` is
given and not counted, as tangents are in a ``Graph``.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from monetrun.core.graph import FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.solve.slot import necessary


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A choice of checkpoints.

    Attributes:
        nodes: their numbers, ascending; the first is 0 and the last is n.
        peak_bytes: the value of the objective of the algorithm that chose them.
    """

    nodes: tuple[int, ...]
    peak_bytes: int


# What of the bytes that cross from forward to backward may stay because it is small (BatchNorm's statistics, counters):
# else the copying of a counter at the end of the forward pass would leave no narrow point before it.
_SMALL_SHARE = 0.01

Algorithm = Callable[[Sequence[int], Sequence[int]], Checkpoints]


def hong_dp(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """The checkpoints that minimize, over every ``C``,

        sum of d[c] for c in C  +  max of s(c[k], c[k+1]) for k < m

    all checkpoints stay until the end (arXiv 2502.12499, the checkpoint selection problem and its O(n^3) program).

    For a cap S on every segment, the cheapest checkpoints are ``T(j) = d[j] + min T(i)`` over ``i < j`` with
    ``s(i, j) <= S``: O(n) with two sliding windows. There are O(n^2) values of S. They are tried from above, and each
    result's own largest segment says which of them need not be, so that seldom more than a few n are.

    Args:
        node_bytes: ``d[0..n]``.
        inner_bytes: ``e[0..n]`` (``e[0]`` is not read), or nothing for zeros.

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    if len(d) == 1:
        return Checkpoints((0,), d[0])
    # every segment holds one layer at least, so that no choice has a largest segment below this
    least_segment = max(inner + before for inner, before in zip(e[1:], d, strict=False))
    best = Checkpoints((0, len(d) - 1), stored_peak_bytes(d, (0, len(d) - 1), e))
    cap = best.peak_bytes - d[0] - d[-1] - 1
    while cap >= least_segment:
        nodes = _cheapest_under(d, e, cap)
        checkpoints_bytes = sum(d[c] for c in nodes)
        if checkpoints_bytes + least_segment >= best.peak_bytes:
            break  # below this cap the checkpoints cost as much or more
        peak_bytes = stored_peak_bytes(d, nodes, e)
        if peak_bytes < best.peak_bytes:
            best = Checkpoints(nodes, peak_bytes)
        cap = min(peak_bytes, best.peak_bytes) - checkpoints_bytes - 1
    return best


def _cheapest_under(d: list[int], e: list[int], cap: int) -> tuple[int, ...]:
    """The checkpoints of least bytes of which no segment costs more than ``cap`` (at least one layer's cost)."""
    through = list(accumulate(a + b for a, b in zip(d, e, strict=True)))  # d and e of the nodes up to here
    total = [0] * len(d)  # T
    previous = [0] * len(d)
    total[0] = d[0]
    cheapest = deque([0])  # candidates i, T rising from the left
    largest = deque([0])  # nodes of the segment, d falling from the left
    left = 0
    for j in range(1, len(d)):
        # s(i, j) falls as i rises and rises with j, so the first i that is allowed only moves to the right
        while through[j] - through[left] - d[j] + d[largest[0]] > cap:
            left += 1
            if largest[0] < left:
                largest.popleft()
        while cheapest[0] < left:
            cheapest.popleft()
        previous[j] = cheapest[0]
        total[j] = d[j] + total[cheapest[0]]
        while cheapest and total[cheapest[-1]] >= total[j]:
            cheapest.pop()
        cheapest.append(j)
        while largest and d[largest[-1]] <= d[j]:
            largest.pop()
        largest.append(j)
    nodes = [len(d) - 1]
    while nodes[-1] > 0:
        nodes.append(previous[nodes[-1]])
    return tuple(reversed(nodes))


def hong_linear(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """The checkpoints that minimize, over every ``C``,

        max over k < m of  (sum of d[c[l]] for l <= k + 1  +  s(c[k], c[k+1]))

    the objective that the paper revised after tracing real runs: while a segment is recomputed, the checkpoints after
    it have been released (arXiv 2502.12499, the O(n) algorithm).

    From the right, ``T(i) = d[i] + min over j > i of max(U(i, j), T(j))`` with ``U(i, j) = s(i, j) + d[j]`` is the peak
    of the nodes from i on, for a checkpoint at i. U rises with j, and as i falls. So a queue of nodes with rising U and
    falling T is enough: j is dropped for good at the left when a smaller node has no larger T, and at the right when
    ``U(i, j)`` reaches the T of its left neighbour. The queue's right end is then the minimum. Each node is added and
    dropped once: O(n).

    Args:
        node_bytes: ``d[0..n]``.
        inner_bytes: ``e[0..n]`` (``e[0]`` is not read), or nothing for zeros.

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    last = len(d) - 1
    through = list(accumulate(d)) if not inner_bytes else list(accumulate(a + b for a, b in zip(d, e, strict=True)))
    total = d[:]  # T; T(n) = d[n] stands
    following = list(range(1, last + 2))
    # lists that grow and shrink at their end, the queue's left, while an index moves over what fell off its right
    queue, right = [last], last
    queue_first = 0
    largest: list[int] = []  # nodes of the segment i..right-1, d falling from its right end to its left
    largest_first = 0
    right_through = through[last]
    for i in range(last - 1, -1, -1):
        size = d[i]
        while len(largest) > largest_first and d[largest[-1]] <= size:
            largest.pop()
        largest.append(i)
        base = through[i]
        segment = right_through - base + d[largest[largest_first]]  # U(i, right)
        while len(queue) - queue_first > 1 and segment >= total[queue[queue_first + 1]]:
            queue_first += 1
            right = queue[queue_first]
            right_through = through[right]
            while largest[largest_first] >= right:
                largest_first += 1
            segment = right_through - base + d[largest[largest_first]]
        following[i] = right
        peak = total[right]
        peak = size + (segment if segment > peak else peak)  # max() would take a third of the loop's time
        total[i] = peak
        while len(queue) > queue_first and total[queue[-1]] >= peak:
            queue.pop()
        queue.append(i)
        if len(queue) - queue_first == 1:  # all others are gone, and with them the right end
            right = i
            right_through = base
            largest_first = len(largest)
    nodes = [0]
    while nodes[-1] < last:
        nodes.append(following[nodes[-1]])
    return Checkpoints(tuple(nodes), total[0])


def sqrt(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """Every (n / k)-th node for ``k = round(sqrt(n))``, which minimizes over k, for nodes of one size,

        k + n / k

    checkpoints and nodes of one segment (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv
    1604.06174, section 4.1). Sizes are not looked at; ``peak_bytes`` is by ``hong_linear``'s objective.

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    last = len(d) - 1
    segments = max(1, round(math.sqrt(last)))
    nodes = tuple(sorted({round(k * last / segments) for k in range(segments + 1)}))
    return Checkpoints(nodes, released_peak_bytes(d, nodes, e))


def none(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """Every node, and nothing run again: the plain step, of which the peak is

        sum of d[t] + e[t] for t <= n  +  max of d[t] for t < n

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    return Checkpoints(tuple(range(len(d))), sum(d) + sum(e[1:]) + max(d[:-1], default=0))


def stored_peak_bytes(node_bytes: Sequence[int], nodes: Sequence[int], inner_bytes: Sequence[int] = ()) -> int:
    """``hong_dp``'s objective, of the checkpoints ``nodes``."""
    segments = _segments_bytes(node_bytes, nodes, inner_bytes)
    return sum(node_bytes[c] for c in nodes) + max(segments, default=0)


def released_peak_bytes(node_bytes: Sequence[int], nodes: Sequence[int], inner_bytes: Sequence[int] = ()) -> int:
    """``hong_linear``'s objective, of the checkpoints ``nodes``."""
    held_bytes = list(accumulate(node_bytes[c] for c in nodes))
    segments = _segments_bytes(node_bytes, nodes, inner_bytes)
    return max((held + s for held, s in zip(held_bytes[1:], segments, strict=True)), default=held_bytes[0])


def _segments_bytes(d: Sequence[int], nodes: Sequence[int], e: Sequence[int]) -> Iterator[int]:
    """``s`` of each pair of neighbours."""
    for i, j in pairwise(nodes):
        yield sum(d[i + 1 : j]) + sum(e[i + 1 : j + 1]) + max(d[i:j])


def _checked(node_bytes: Sequence[int], inner_bytes: Sequence[int]) -> tuple[list[int], list[int]]:
    d = list(node_bytes)
    e = list(inner_bytes) if len(inner_bytes) else [0] * len(d)
    if not d:
        raise ValueError("a chain has one node at least, got none")
    if len(e) != len(d):
        raise ValueError(f"inner_bytes has {len(e)} entries for {len(d)} nodes; give one per node, or none at all")
    if min(d) < 0 or min(e) < 0:
        raise ValueError(f"sizes are bytes and not negative, got {min(min(d), min(e))}")
    return d, e


@dataclass(frozen=True, slots=True)
class Chain:
    """A graph's forward pass, cut where no more than one tensor crosses.

    Attributes:
        cuts: for each node the number of forward operators before it: operator ids, ascending; 0 first.
        tensors: for each node the tensor that crosses there, or None (both ends; a tensor that stays anyway).
        node_bytes: its bytes.
        inner_bytes: for each node the bytes that backward reads of what its layer writes (node 0: 0), without what
            crosses and without what stays anyway.
    """

    cuts: tuple[int, ...]
    tensors: tuple[int | None, ...]
    node_bytes: tuple[int, ...]
    inner_bytes: tuple[int, ...]


def linearize(graph: Graph) -> Chain:
    """Cut the forward pass at its narrow points: where at most one tensor is still to be read by a forward operator.

    Parameters and the batch (external), the model's outputs (kept), what cannot be computed again (a dropout's mask)
    and the smallest tensors do not count: they stay in every schedule that the checkpoints lead to. A skip connection
    is alive across all that it skips, so there is no narrow point beneath one: a U-Net is a short chain.
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
        # the first place at which a tensor crosses alone (or none does, in a row): its readers are the next layer's
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
    """For each tensor, whether a schedule drops it in the forward pass and writes it again.

    Not what is alive anyway, not what cannot be written again, and not the smallest ones, up to ``_SMALL_SHARE``.
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
    """The schedule that keeps the checkpoints ``nodes`` of ``chain`` and runs each segment again.

    A segment runs again when the first backward operator asks for one of the tensors that were dropped in it: those of
    its operators, in their order, that lead to what backward reads. The last segment is not dropped, since backward
    asks for it at once. Every operator runs its default implementation.
    """
    plain = plain_schedule(graph)
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
        asked = {segment_of[t] for t in graph.operators[step.operator].inputs if t in segment_of}
        for k in sorted(asked - done):
            backward += replays[k]
        done |= asked
        backward.append(step)
    return Schedule(plain.forward, tuple(backward))


ALGORITHMS: dict[str, Algorithm] = {"hong-dp": hong_dp, "hong-linear": hong_linear, "sqrt": sqrt, "none": none}


def schedule(graph: Graph, algorithm: str) -> Schedule:
    """The schedule to which ``algorithm`` (a name in ``ALGORITHMS``) leads on this graph, whatever its peak.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no chain algorithm {algorithm!r}; there are {', '.join(ALGORITHMS)}")
    if algorithm == "none":
        return plain_schedule(graph)
    chain = linearize(graph)
    return schedule_of(graph, chain, ALGORITHMS[algorithm](chain.node_bytes, chain.inner_bytes).nodes)


def _solve(graph: Graph, costs: Costs, budget_bytes: int, options: Options, algorithm: str) -> Solution:
    start = time.perf_counter()
    found = schedule(graph, algorithm if options.recompute else "none")
    timeline = simulate(graph, costs, found)
    bound_seconds = math.fsum(min(costs.seconds[i]) for i in necessary(graph, options))
    if timeline.peak_bytes > budget_bytes:
        # says nothing of other schedules: these algorithms look at one each
        return Solution(None, bound_seconds, "unknown", algorithm, time.perf_counter() - start)
    status = "optimal" if timeline.seconds <= bound_seconds * (1 + 1e-12) else "feasible"
    return Solution(found, bound_seconds, status, algorithm, time.perf_counter() - start)


def solve_hong_dp(graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> Solution:
    """``hong_dp``'s schedule if its simulated peak is within the budget (bytes), else status ``"unknown"``."""
    return _solve(graph, costs, budget_bytes, options, "hong-dp")


def solve_hong_linear(graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> Solution:
    """``hong_linear``'s schedule if its simulated peak is within the budget (bytes), else status ``"unknown"``."""
    return _solve(graph, costs, budget_bytes, options, "hong-linear")


def solve_sqrt(graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> Solution:
    """``sqrt``'s schedule if its simulated peak is within the budget (bytes), else status ``"unknown"``."""
    return _solve(graph, costs, budget_bytes, options, "sqrt")


def solve_none(graph: Graph, costs: Costs, budget_bytes: int, options: Options) -> Solution:
    """The plain schedule if its simulated peak is within the budget (bytes), else status ``"unknown"``."""
    return _solve(graph, costs, budget_bytes, options, "none")
