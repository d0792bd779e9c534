"""The cheapest schedule of a tiny graph by exhaustive search, which shares no code with the solvers or the replay.

A state is the next operator and the set of tensors that are alive; a move runs the next operator, reruns a replayable
forward operator, or frees a tensor.
"""

from __future__ import annotations

import heapq
import itertools

from monetrun.core.graph import FORWARD, Costs, Graph, Operator


def cheapest_seconds(
    graph: Graph,
    costs: Costs,
    budget_bytes: int,
    *,
    any_order: bool,
    implementations: tuple[str, ...] | None = None,
    recompute: bool = True,
    max_states: int = 200_000,
) -> float | None:
    """The least seconds of any schedule within the budget; infinity if there is none, None after ``max_states``.

    With ``any_order`` forward operators rerun in any order, any number of times; without it at most once between two
    backward operators, in the graph's order (the class of the integer program).
    """
    operators, tensors = graph.operators, graph.tensors
    external = {t.id for t in tensors if t.external}
    kept = {t.id for t in tensors if t.kept}
    cut = graph.forward_count
    tie = itertools.count()
    start = (0, -1, frozenset[int]())
    heap = [(0.0, next(tie), start)]
    done: set[tuple[int, int, frozenset[int]]] = set()

    def size(ids: object) -> int:
        return sum(tensors[t].nbytes for t in ids)  # type: ignore[attr-defined]

    def outcomes(op: Operator, alive: frozenset[int]) -> list[tuple[float, frozenset[int]]]:
        found = []
        for k, impl in enumerate(op.implementations):
            if k and not impl.allowed_by(implementations):
                continue
            if not set(impl.inputs) - external <= alive:
                continue
            # holding a tensor until it is overwritten gains nothing: the state without it is searched too
            if any(t in alive and t not in kept for t in op.outputs):
                continue
            written, left = size(op.outputs), alive
            if impl.in_place_of is not None:
                t = impl.in_place_of
                if t in external or t in kept or tensors[t].nbytes != tensors[op.outputs[0]].nbytes:
                    continue
                written -= tensors[t].nbytes
                left = alive - {t}
            if size(alive) + written + costs.workspace_bytes[op.id][k] <= budget_bytes:
                found.append((costs.seconds[op.id][k], left | set(op.outputs)))
        return found

    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        if len(done) > max_states:
            return None
        position, last, alive = state
        if position == len(operators):
            return cost
        op = operators[position]
        for t in alive - kept:
            heapq.heappush(heap, (cost, next(tie), (position, last, alive - {t})))
        if op.optional:
            heapq.heappush(heap, (cost, next(tie), (position + 1, last, alive)))
        for seconds, after in outcomes(op, alive):
            heapq.heappush(heap, (cost + seconds, next(tie), (position + 1, -1, after)))
        if position >= cut and recompute:
            for again in operators[:cut]:
                if again.phase == FORWARD and again.replayable and (any_order or again.id > last):
                    for seconds, after in outcomes(again, alive):
                        state = (position, -1 if any_order else again.id, after)
                        heapq.heappush(heap, (cost + seconds, next(tie), state))
    return float("inf")
