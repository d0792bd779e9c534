"""The rounds of a training step: ranges of events that share no saved activations."""

from __future__ import annotations

from collections.abc import Sequence

from monetrun.core.graph import BACKWARD, FORWARD


def rounds_of(calls: Sequence[tuple[str, int]]) -> tuple[tuple[int, int], ...]:
    """Ranges of events, each from where nothing is saved for a backward pass to where nothing is saved again.

    Args:
        calls: the kind of each event of a step, and its graph.
    """
    awaited = _forwards_with_a_backward(calls)
    found: list[tuple[int, int]] = []
    start: int | None = None
    pending = 0
    for i, (kind, _) in enumerate(calls):
        if kind == FORWARD:
            start = (i if found else 0) if start is None else start
            pending += i in awaited
        elif kind == BACKWARD:
            pending -= 1
            if pending <= 0 and start is not None:
                found.append((start, i + 1))
                start, pending = None, 0
    if start is not None:
        found.append((start, len(calls)))
    return tuple(found)


def _forwards_with_a_backward(calls: Sequence[tuple[str, int]]) -> set[int]:
    """The forwards of which a backward follows: a backward is that of the graph's latest forward without one."""
    waiting: dict[int, list[int]] = {}
    found: set[int] = set()
    for i, (kind, graph) in enumerate(calls):
        if kind == FORWARD:
            waiting.setdefault(graph, []).append(i)
        elif kind == BACKWARD and waiting.get(graph):
            found.add(waiting[graph].pop())
    return found
