"""Eviction in plain Python, for machines without a compiler: tensors are dropped in one fixed order until it fits.

What crosses from the forward to the backward part is ranked by bytes freed per second of running its operator
again; the shortest prefix of that ranking whose schedule fits is looked for. A dropped tensor is recomputed right
before its first reader in the backward part, and held until its last.
"""

from __future__ import annotations

from monetrun.graph import Costs, Graph
from monetrun.plan import Schedule, Step, plain_schedule
from monetrun.simulate import simulate


def solve(graph: Graph, costs: Costs, budget_bytes: int) -> Schedule | None:
    """A schedule within the budget, or None where no prefix of the ranking has one."""
    plain = plain_schedule(graph)
    if simulate(graph, costs, plain).peak_bytes <= budget_bytes:
        return plain
    ranking = _ranking(graph, costs)
    low, high = 0, len(ranking)
    best = None
    for count in {len(ranking), len(ranking) // 2, len(ranking) // 4}:
        candidate = dropping(graph, set(ranking[:count]))
        if simulate(graph, costs, candidate).peak_bytes <= budget_bytes:
            best, high = candidate, min(high, count)
    while low < high:  # dropping more does not always lower the peak: the search is a heuristic
        middle = (low + high) // 2
        candidate = dropping(graph, set(ranking[:middle]))
        if simulate(graph, costs, candidate).peak_bytes <= budget_bytes:
            best, high = candidate, middle
        else:
            low = middle + 1
    return best


def dropping(graph: Graph, dropped: set[int]) -> Schedule:
    """The schedule that does not hold the tensors ``dropped`` from the forward to the backward part."""
    plain = plain_schedule(graph)
    alive = {t.id for t in graph.tensors} - dropped
    backward: list[Step] = []

    def run_again(operator: int) -> None:
        for t in graph.operators[operator].inputs:
            if t not in alive:
                run_again(graph.writer[t])
        backward.append(Step(operator))
        alive.update(graph.operators[operator].outputs)

    for step in plain.backward:
        for t in graph.operators[step.operator].inputs:
            if t not in alive:
                run_again(graph.writer[t])
        backward.append(step)
    return Schedule(plain.forward, tuple(backward))


def _ranking(graph: Graph, costs: Costs) -> list[int]:
    read_late = {t for op in graph.operators[graph.forward_count :] for t in op.inputs}
    candidates = []
    for op in graph.operators[: graph.forward_count]:
        if not op.replayable or not op.plain:
            continue
        for t in op.outputs:
            tensor = graph.tensors[t]
            if tensor.nbytes and not tensor.kept:
                # one that only other recomputations read costs nothing to drop
                seconds = costs.seconds[op.id][0] if t in read_late else 0.0
                candidates.append((-tensor.nbytes / (seconds + 1e-12), t))
    return [t for _, t in sorted(candidates)]
