"""Rounds that do not join into one graph: every graph is solved alone, within limits.

Such is a round in which a graph is called several times before its backward (a discriminator that sees real and false
samples, a block of which the script makes a loop), or in which a forward follows a backward. All calls of a graph run
under one schedule, and what one call saves lies under the peaks of the others. So each graph is given a limit on what
it saves, between the least that it can save and what it saves plainly; under those limits the bytes at every call's
start are known, and with them how much its forward and its backward may have allocated. The limits are moved together,
by one share, and each graph is solved within its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Operator, Tensor
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Solution, Step
from monetrun.core.simulate import simulate
from monetrun.core.step import (
    OUTSIDE,
    StepRecord,
    call,
    gone_with_backward,
    outside_operator,
    replay,
    without_idle_runs,
)
from monetrun.solve import greedy

_SHARES = 16  # that are tried of what is between the least and the most that can be saved
_HALVINGS = 5  # of the distance between shares around the cheapest; of budgets when the least is looked for
_QUICK_SECONDS = 0.1  # for one graph under one share


@dataclass(frozen=True, slots=True)
class Limits:
    """What a graph may have allocated: at its forward's end, during its forward, and during its backward."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class Limited:
    """A graph whose schedules within ``budget_bytes`` are those of another graph within its limits.

    It has two operators more, which must run once and cost nothing: the first of the forward pass, and the last one,
    around which no more can be saved than the limit. Between them, or from the last on, lies a tensor as large as the
    difference between what the two passes may have allocated. External tensors that a backward lets go of are its own
    here, written by the first operator; they, and outputs that it lets go of, are freed after their last reader.
    """

    graph: Graph
    costs: Costs
    budget_bytes: int

    @classmethod
    def of(cls, graph: Graph, costs: Costs, limits: Limits, released: Collection[int] = ()) -> Limited:
        """``graph`` within ``limits``, where every backward lets go of ``released`` (external tensors, outputs)."""
        cut, size = graph.forward_count, len(graph.tensors)
        more = max(0, limits.backward_bytes - limits.forward_bytes)
        less = max(0, limits.forward_bytes - limits.backward_bytes)
        given = tuple(sorted(t for t in released if graph.tensors[t].external))
        outputs = gone_with_backward(graph, released)
        gone = (*given, *sorted(outputs))
        own = [replace(t, external=False, kept=False) if t.id in gone else t for t in graph.tensors]
        tensors = (*own, Tensor(size, more), Tensor(size + 1, less, kept=True))

        def moved(op: Operator, by: int) -> Operator:
            ways = (replace(i, usable=i.usable and i.in_place_of not in gone) for i in op.implementations)
            again = op.replayable and outputs.isdisjoint(op.outputs)
            return replace(op, id=op.id + by, implementations=tuple(ways), replayable=again)

        operators = (
            outside_operator(0, "first", FORWARD, (), (size, *given)),
            *(moved(op, 1) for op in graph.operators[:cut]),
            outside_operator(cut + 1, "saved", FORWARD, (size, *gone), (size + 1,)),
            *(moved(op, 2) for op in graph.operators[cut:]),
        )
        given_bytes = sum(graph.tensors[t].nbytes for t in given)
        beside = max(0, min(limits.forward_bytes, limits.backward_bytes) - limits.saved_bytes)
        seconds, workspace = costs.seconds, costs.workspace_bytes
        return cls(
            Graph(graph.name, tensors, operators),
            Costs(
                costs.device,
                ((0.0,), *seconds[:cut], (0.0,), *seconds[cut:]),
                ((0,), *workspace[:cut], (beside,), *workspace[cut:]),
            ),
            max(limits.forward_bytes, limits.backward_bytes, 0) + given_bytes,
        )

    def inner(self, schedule: Schedule) -> Schedule:
        """The schedule of this graph that does what ``schedule`` does in the other."""
        last = self.graph.forward_count - 1

        def moved(steps: Sequence[Step]) -> tuple[Step, ...]:
            return tuple(Step(s.operator + (1 if s.operator < last - 1 else 2), s.implementation) for s in steps)

        backward = without_idle_runs(self.graph, moved(schedule.backward))
        return Schedule((Step(0), *moved(schedule.forward), Step(last)), tuple(backward))

    def outer(self, schedule: Schedule) -> Schedule:
        """The schedule of the other graph."""
        last = self.graph.forward_count - 1

        def moved(steps: Sequence[Step]) -> tuple[Step, ...]:
            own = [s for s in steps if s.operator not in (0, last)]
            return tuple(Step(s.operator - (1 if s.operator < last else 2), s.implementation) for s in own)

        return Schedule(moved(schedule.forward), moved(schedule.backward))


class ApartRound:
    """The round ``record.events[bounds[0]:bounds[1]]``.

    Args:
        record: of the step.
        bounds: of the round.
        plain: schedules of all graphs that save as much as is of any use.
    """

    def __init__(self, record: StepRecord, bounds: tuple[int, int], plain: Sequence[Schedule]) -> None:
        self._record = record
        self._events = record.events[slice(*bounds)]
        self._start_bytes = replay(record, plain).start_bytes[bounds[0]]
        self._calls = Counter(e.graph for e in self._events if e.kind == FORWARD)
        self._released = {
            k: frozenset.intersection(*(frozenset(e.released) for e in calls))
            for k in self._calls
            if (calls := [e for e in self._events if e.kind == BACKWARD and e.graph == k])
        }
        self._kept = {k: sum(t.nbytes for t in record.graphs[k].tensors if t.kept) for k in self._calls}
        self._most = {k: self._saved(k, plain[k]) for k in self._calls}

    @cached_property
    def thrifty(self) -> dict[int, Schedule]:
        """For each graph a schedule that saves as little as the search finds."""
        return {k: _least_saving(self._record.graphs[k], self._record.costs[k]) for k in self._calls}

    @cached_property
    def _least(self) -> dict[int, int]:
        return {k: self._saved(k, schedule) for k, schedule in self.thrifty.items()}

    def least(self, schedules: Sequence[Schedule], seconds: float) -> dict[int, Schedule]:
        """Schedules of this round's graphs such that the step's peak is as low as can be found.

        Args:
            schedules: of all graphs; those of the others stay.
            seconds: that the search may take, about.
        """
        best: dict[int, Schedule] = {}
        low, high = 0, self._peak_bytes(schedules, {})
        if (peak_bytes := self._peak_bytes(schedules, self.thrifty)) < high:
            best, high = self.thrifty, peak_bytes
        for _ in range(_HALVINGS):
            target_bytes = (low + high) // 2
            parts = self._greedily(self._limits(target_bytes, self._least), Options(seconds=seconds / _HALVINGS))
            if parts is not None and (peak_bytes := self._peak_bytes(schedules, parts)) < high:
                best, high = parts, peak_bytes
            else:
                low = target_bytes
        return best

    def solve(
        self, schedules: Sequence[Schedule], budget_bytes: int, solver: Callable[..., Solution], options: Options
    ) -> dict[int, Schedule]:
        """Cheap schedules of this round's graphs within the budget; empty where none were found.

        Args:
            schedules: of all graphs; those of the others stay.
            budget_bytes: of the whole step.
            solver: for one graph.
            options: two fifths of the seconds go to the choice of the limits.
        """
        tries = _SHARES + 2 * _HALVINGS
        quick = replace(options, seconds=min(_QUICK_SECONDS * len(self._calls), 0.4 * options.seconds / tries))
        found: dict[int, Schedule] = {}
        best = 0.0

        def cheapest(shares: Iterable[float]) -> None:
            nonlocal found, best
            for share in shares:
                parts = self._greedily(self._limits(budget_bytes, self._shared(share)), quick)
                if parts is None or self._peak_bytes(schedules, parts) > budget_bytes:
                    continue
                if not found or self._seconds(parts) < self._seconds(found):
                    found, best = parts, share

        between = self._largest_share(budget_bytes) / (_SHARES - 1)
        cheapest(i * between for i in range(_SHARES))
        for i in range(_HALVINGS):
            beside = 0.5 ** (i + 1) * between
            cheapest([best + beside, best - beside])
        if not found:
            return {}
        # what they leave of their shares is room for all peaks
        limits = self._limits(budget_bytes, {k: self._saved(k, schedule) for k, schedule in found.items()})
        own = replace(options, seconds=0.6 * options.seconds / len(self._calls))
        for k in self._calls:
            limited = self._limited(k, limits[k])
            schedule = solver(limited.graph, limited.costs, limited.budget_bytes, own).schedule
            if schedule is None:
                continue
            parts = {**found, k: limited.outer(schedule)}
            if self._seconds(parts) < self._seconds(found) and self._peak_bytes(schedules, parts) <= budget_bytes:
                found = parts
        return found

    def _saved(self, k: int, schedule: Schedule) -> int:
        return call(self._record.graphs[k], self._record.costs[k], schedule).saved_bytes

    def _seconds(self, parts: Mapping[int, Schedule]) -> float:
        graphs, costs = self._record.graphs, self._record.costs
        return sum(n * simulate(graphs[k], costs[k], parts[k]).seconds for k, n in self._calls.items())

    def _peak_bytes(self, schedules: Sequence[Schedule], parts: Mapping[int, Schedule]) -> int:
        """The step's peak under ``schedules``, with ``parts`` for some of them."""
        return replay(self._record, [parts.get(k, s) for k, s in enumerate(schedules)]).peak_bytes

    def _limited(self, k: int, limits: Limits) -> Limited:
        return Limited.of(self._record.graphs[k], self._record.costs[k], limits, self._released.get(k, ()))

    def _shared(self, share: float) -> dict[int, int]:
        """What each graph may save at that share of the way from the least to the most."""
        return {k: self._least[k] + int(share * (self._most[k] - self._least[k])) for k in self._calls}

    def _largest_share(self, budget_bytes: int) -> float:
        """The share at which what is saved is all that may be allocated, about."""
        low, high = 0.0, 1.0
        for _ in range(20):
            share = (low + high) / 2
            limits = self._limits(budget_bytes, self._shared(share)).values()
            if all(of.saved_bytes <= min(of.forward_bytes, of.backward_bytes) for of in limits):
                low = share
            else:
                high = share
        return low

    def _limits(self, budget_bytes: int, saved: Mapping[int, int]) -> dict[int, Limits]:
        """The limits under which the step keeps to the budget, where every graph saves up to its own."""
        highest = {(phase, k): 0 for phase in (FORWARD, BACKWARD) for k in self._calls}
        now = self._start_bytes
        for event in self._events:
            if event.kind == OUTSIDE:
                now += event.delta_bytes
                continue
            k, key = event.graph, (event.kind, event.graph)
            highest[key] = max(highest[key], now - (saved[k] if event.kind == BACKWARD else 0))
            if event.kind == FORWARD:
                now += saved[k]
            else:
                tensors = self._record.graphs[k].tensors
                now += self._kept[k] - saved[k] - sum(tensors[t].nbytes for t in event.released)
        return {
            k: Limits(saved[k], budget_bytes - highest[FORWARD, k], budget_bytes - highest[BACKWARD, k])
            for k in self._calls
        }

    def _greedily(self, limits: Mapping[int, Limits], options: Options) -> dict[int, Schedule] | None:
        """Schedules within the limits; None where some graph has none, as far as the greedy solver sees."""
        own = replace(options, seconds=options.seconds / len(self._calls), on_progress=None)
        parts = {}
        for k in self._calls:
            limited = self._limited(k, limits[k])
            schedule = greedy.solve(limited.graph, limited.costs, limited.budget_bytes, own).schedule
            if schedule is None:
                return None
            parts[k] = limited.outer(schedule)
        return parts


def _least_saving(graph: Graph, costs: Costs) -> Schedule:
    """A schedule that saves as little as the search finds."""
    whole = sum(t.nbytes for t in graph.tensors) + max((max(row) for row in costs.workspace_bytes), default=0)
    limited = Limited.of(graph, costs, Limits(0, whole, whole))
    return limited.outer(greedy.most_frugal(limited.graph, limited.costs))
