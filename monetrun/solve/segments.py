"""What may run and what may be wanted in each segment of a relaxed program (``monetrun.solve.relaxation``)."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from monetrun.core.graph import FORWARD, Costs, Graph
from monetrun.core.options import Options
from monetrun.solve.slot import allowed_choices

_NEGLIGIBLE = 2e-5  # tensors smaller than this share of the budget are taken to be always alive, at no bytes

ReadSet = tuple[frozenset[int], int]  # tensors, and the cheapest implementation that reads just them


@dataclass(frozen=True)
class Segments:
    """A graph cut at points: segment s ends with the run of ``points[s]``, the last one with the graph.

    Attributes:
        points: compulsory operators, ascending.
        of_operator: the segment of each operator's first run.
        free: the tensors that are taken to be always alive.
        read_sets: per operator the sets of tensors that its implementations read.
        any_reads: per operator the tensors of any read set, without free ones.
        all_reads: per operator the tensors of every read set, without free ones.
        members: per segment its compulsory operators.
        useful: per segment the operators whose rerun (or optional run) in it can be useful.
        wanted_at: per segment the tensors that may be wanted at its beginning.
    """

    graph: Graph
    points: tuple[int, ...]
    of_operator: list[int]
    free: frozenset[int]
    read_sets: dict[int, list[ReadSet]]
    any_reads: dict[int, set[int]]
    all_reads: dict[int, set[int]]
    members: list[list[int]]
    useful: list[list[int]]
    wanted_at: list[set[int]]

    @classmethod
    def of(cls, graph: Graph, costs: Costs, budget_bytes: int, points: tuple[int, ...], options: Options) -> Segments:
        """Cut ``graph`` at ``points``."""
        operators, writer = graph.operators, graph.writer
        count = len(points)
        of_operator = [bisect.bisect_left(points, op.id) for op in operators]  # a point ends its segment
        small = _NEGLIGIBLE * budget_bytes
        free = frozenset(
            t.id
            for t in graph.tensors
            if t.external or (not operators[writer[t.id]].optional and (t.kept or t.nbytes < small))
        )
        sets = {op.id: _read_sets(graph, costs, op.id, options) for op in operators}
        any_reads = {i: {t for reads, _ in s for t in reads if t not in free} for i, s in sets.items()}
        all_reads = {
            i: {t for t in frozenset.intersection(*(r for r, _ in s)) if t not in free} for i, s in sets.items()
        }
        members: list[list[int]] = [[] for _ in range(count + 1)]
        for op in operators:
            if not op.optional:
                members[of_operator[op.id]].append(op.id)

        first_backward = bisect.bisect_left(points, graph.forward_count)
        wanted: set[int] = set()
        useful: list[list[int]] = [[] for _ in range(count + 1)]
        wanted_at: list[set[int]] = [set() for _ in range(count + 1)]
        for s in range(count, -1, -1):
            for i in members[s]:
                wanted |= any_reads[i]
            for op in reversed(operators):
                again = op.phase == FORWARD and op.replayable and s >= first_backward and options.recompute
                here = op.optional and of_operator[op.id] == s
                if not ((again or here) and of_operator[op.id] <= s):
                    continue
                if any(t in wanted and t not in free for t in op.outputs):
                    useful[s].append(op.id)
                    wanted |= any_reads[op.id]
            for i in members[s]:
                wanted.difference_update(operators[i].outputs)
            wanted_at[s] = set(wanted)
        return cls(graph, points, of_operator, free, sets, any_reads, all_reads, members, useful, wanted_at)

    @property
    def count(self) -> int:
        """How many points there are; there is one segment more."""
        return len(self.points)

    def alive_at(self, s: int) -> set[int]:
        """The tensors that may be alive before the point at which segment s begins (s >= 1)."""
        return self.wanted_at[s] | self.any_reads[self.points[s - 1]]

    def certainly_written(self, t: int, s: int) -> bool:
        """Whether a compulsory operator of segment s writes t."""
        w = self.graph.writer[t]
        return self.of_operator[w] == s and not self.graph.operators[w].optional


def _read_sets(graph: Graph, costs: Costs, operator: int, options: Options) -> list[ReadSet]:
    """The sets of tensors that implementations read, none a superset of a cheaper one, each with its cheapest."""
    op, seconds = graph.operators[operator], costs.seconds[operator]
    choices = sorted(allowed_choices(graph, operator, options), key=lambda k: (seconds[k], k))
    found: list[ReadSet] = []
    for k in choices:
        reads = frozenset(op.implementations[k].inputs)
        if not any(earlier <= reads for earlier, _ in found):
            found.append((reads, k))
    return found
