"""Checkpoint selection on a chain, on numbers alone: Hong et al.'s two algorithms, Chen et al.'s square root, none.

The algorithms of Hong, Tsai, Wang, Liu and Wu, "GPU Memory Usage Optimization for Backward Propagation in Deep Network
Training" (arXiv 2502.12499), minimize the *peak*; they take no budget.

A chain has nodes ``0..n``: node 0 is the network's input, node ``t`` the output of layer ``t``, of ``d[t]`` bytes. A
choice ``C`` of checkpoints includes both ends, ``0 = c[0] < c[1] < ... < c[m] = n``; backward recomputes the segment
between two of them from the earlier one. A segment costs

    s(i, j) = sum of d[t] for i < t < j  +  sum of e[t] for i < t <= j  +  max of d[t] for i <= t < j

that is: the nodes inside it, what its layers save for backward besides (``e``, zero in the paper), and one gradient
buffer, which the backward pass hands from layer to layer. The gradient at node ``n`` is given and not counted, as
tangents are in a ``Graph``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """A choice of checkpoints.

    Attributes:
        nodes: their numbers, ascending; the first is 0 and the last is n.
        peak_bytes: the value of the objective of the algorithm that chose them.
    """

    nodes: tuple[int, ...]
    peak_bytes: int


def hong_dp(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """The checkpoints that minimize, over every ``C``,

        sum of d[c] for c in C  +  max of s(c[k], c[k+1]) for k < m

    where all checkpoints stay until the end (arXiv 2502.12499, the checkpoint selection problem and its O(n^3)
    program).

    For a cap S on every segment, the cheapest checkpoints are ``T(j) = d[j] + min T(i)`` over ``i < j`` with
    ``s(i, j) <= S``: O(n) with two sliding windows. There are O(n^2) values of S. They are tried from above, and each
    result's largest segment excludes some, so that seldom more than a few n are tried.

    Args:
        node_bytes: ``d[0..n]``.
        inner_bytes: ``e[0..n]`` (``e[0]`` is not read), or nothing for zeros.

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    if len(d) == 1:
        return Checkpoints((0,), d[0])
    # every segment has one layer at least, so no choice has a largest segment below this
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
    falling T is enough: j leaves the queue at the left when a smaller node has no larger T, and at the right when
    ``U(i, j)`` reaches the T of its left neighbour. The queue's right end is then the minimum. Each node enters and
    leaves once: O(n).

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
    # lists that grow and shrink at their end, the queue's left; an index marks the queue's right end
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
    1604.06174, section 4.1). Sizes are ignored; ``peak_bytes`` is ``hong_linear``'s objective.

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    last = len(d) - 1
    segments = max(1, round(math.sqrt(last)))
    nodes = tuple(sorted({round(k * last / segments) for k in range(segments + 1)}))
    return Checkpoints(nodes, released_peak_bytes(d, nodes, e))


def none(node_bytes: Sequence[int], inner_bytes: Sequence[int] = ()) -> Checkpoints:
    """Every node, and no recomputation: the plain step, whose peak is

        sum of d[t] + e[t] for t <= n  +  max of d[t] for t < n

    Raises:
        ValueError: no node, a negative size, or lengths that differ.
    """
    d, e = _checked(node_bytes, inner_bytes)
    return Checkpoints(tuple(range(len(d))), sum(d) + sum(e[1:]) + max(d[:-1], default=0))


def stored_peak_bytes(node_bytes: Sequence[int], nodes: Sequence[int], inner_bytes: Sequence[int] = ()) -> int:
    """``hong_dp``'s objective for the checkpoints ``nodes``."""
    segments = _segments_bytes(node_bytes, nodes, inner_bytes)
    return sum(node_bytes[c] for c in nodes) + max(segments, default=0)


def released_peak_bytes(node_bytes: Sequence[int], nodes: Sequence[int], inner_bytes: Sequence[int] = ()) -> int:
    """``hong_linear``'s objective for the checkpoints ``nodes``."""
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


Selection = Callable[[Sequence[int], Sequence[int]], Checkpoints]
SELECTIONS: dict[str, Selection] = {"hong-dp": hong_dp, "hong-linear": hong_linear, "sqrt": sqrt, "none": none}
