"""Which sharded modules (FSDP2) keep their parameters between forward and backward, chosen together with the schedules.

A module that keeps them saves an all-gather, and holds their bytes from its forward to its backward; what runs again
pays for bytes with seconds of computation. Both are weighed on one clock (``core.clocks``), within one budget.

For each of a few sets of modules the schedules are solved, and the fastest step is taken. The sets grow one module at a
time in two orders: from the last module on, which hold theirs for the shortest time, and by the all-gather's seconds
saved for each byte. Among modules that are alike this loses nothing but sets with gaps. With every module that keeps
its parameters the step is slower to compute and faster to communicate, so that a search along each order finds the best
one in a few steps, and a bound (the step where nothing runs again) leaves out most of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from monetrun.core.clocks import sharded_clocks
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.event import GATHER, Event
from monetrun.core.keeping import as_scripted, keeping
from monetrun.core.options import Options
from monetrun.core.plan import Plan, Schedule
from monetrun.core.step import StepRecord, replay
from monetrun.planning import planner
from monetrun.planning.planner import Baseline
from monetrun.solve import timing

# Sets tried in each order: first so many at equal distances, then halfway to both neighbours of the best one.
_SPREAD = 5
_HALVINGS = 2
# Parts of the solver's seconds: for the script's choice or, where that does not fit, for none; for the trials, which
# begin with its schedules; the rest is for the sets that were best in them, and so many.
_FIRST_SHARE, _TRIALS_SHARE = 0.3, 0.3
_FINALISTS = 2
_REFUSAL_SECONDS = Options().seconds
# Where seconds of all-gathers are not known, this share of the step's may be paid for fewer of them.
_FOR_NOTHING = 0.002


@timing.one_plan()
def plan_step(
    record: StepRecord,
    budget_bytes: int,
    algorithm: str = "hierarchical",
    options: Options | None = None,
    known: Baseline | None = None,
    starts: Sequence[Sequence[Schedule]] = (),
) -> Plan:
    """Find the fastest step that never takes more than ``budget_bytes``: see ``planner.plan_step``.

    Where modules are sharded, the plan says which of them keep their parameters. Where the seconds of all-gathers are
    not known, as many keep them as cost next to nothing.

    No budget is refused after less than ``_REFUSAL_SECONDS``: what little time has not found may still be there.

    Raises:
        BudgetBelowSmallest, NoPlanInTime: as ``planner.plan_step``.
    """
    options = options or Options()

    def planned(options: Options) -> Plan:
        if record.sharding is None or not record.sharding.choices:
            return planner.plan_step(record, budget_bytes, algorithm, options, known, starts)
        return _Search(record, budget_bytes, algorithm, options, known, starts).best()

    try:
        return planned(options)
    except planner.BudgetBelowSmallest:
        if options.seconds >= _REFUSAL_SECONDS or timing.interrupted():
            raise
        return planned(replace(options, seconds=_REFUSAL_SECONDS))


def smallest_bytes(record: StepRecord, base: Baseline) -> int:
    """The smallest budget known to be feasible, as the script says or where no module keeps its parameters."""
    smallest_bytes, least = planner.smallest_bytes(record, base), keeping(record, ())
    if least is record:
        return smallest_bytes
    return min(smallest_bytes, planner.smallest_bytes(least, planner.baseline(least, base.frugal_schedules)))


@dataclass(frozen=True)
class _Tried:
    """A set of modules that keep their parameters, and the plan found for it.

    Attributes:
        kept: the modules.
        seconds: of the step, by its clocks.
        gathers: how many all-gathers it has.
        plan: of it.
    """

    kept: tuple[int, ...]
    seconds: float
    gathers: int
    plan: Plan

    @property
    def key(self) -> tuple[float, int]:
        """The less the better."""
        return self.seconds, self.gathers


class _Search:
    """One call of ``plan_step``."""

    def __init__(
        self,
        record: StepRecord,
        budget_bytes: int,
        algorithm: str,
        options: Options,
        known: Baseline | None,
        starts: Sequence[Sequence[Schedule]],
    ) -> None:
        assert record.sharding is not None
        self._record, self._budget_bytes, self._algorithm, self._options = record, budget_bytes, algorithm, options
        self._sharding = record.sharding
        self._base = known or planner.baseline(as_scripted(record))
        self._starts = list(starts)
        self._tried: dict[tuple[int, ...], _Tried | None] = {}
        self._misfits: set[tuple[int, ...]] = set()  # of those without a plan: for which none fits the budget

    def best(self) -> Plan:
        """The plan of the fastest step found."""
        orders = list(dict.fromkeys(self._orders()))
        trials = len(orders) * (_SPREAD + 2 * _HALVINGS) + 1
        seconds = self._options.seconds
        quick = replace(self._options, seconds=_TRIALS_SHARE * seconds / trials, on_progress=None)
        first = replace(self._options, seconds=_FIRST_SHARE * seconds, on_progress=None)
        if not self._try(self._sharding.scripted, first):
            self._try((), first)
        self._starts.extend([g.schedule for g in t.plan.graphs] for t in self._tried.values() if t is not None)
        for order in orders:
            self._search_along(order, quick)
        found = sorted((tried for tried in self._tried.values() if tried is not None), key=lambda tried: tried.key)
        if not found:  # nothing fits: the set that takes least says so
            return planner.plan_step(
                keeping(self._record, ()), self._budget_bytes, self._algorithm, self._options, self._baseline(())
            )
        self._starts.extend([g.schedule for g in tried.plan.graphs] for tried in found)
        share = replace(
            self._options, seconds=(1 - _FIRST_SHARE - _TRIALS_SHARE) * seconds / min(_FINALISTS, len(found))
        )
        finals = [tried for tried in found[:_FINALISTS] if not self._is_settled(tried) and not timing.interrupted()]
        improved = [self._solved(tried.kept, share) for tried in finals]
        known = [t for t in (*found, *improved) if t is not None]
        if not any(module.gather_seconds for module in self._sharding.modules):
            fastest = min(tried.seconds for tried in known)
            known = [t for t in known if t.seconds <= fastest * (1 + _FOR_NOTHING)]
            return min(known, key=lambda tried: (tried.gathers, tried.seconds)).plan
        return min(known, key=lambda tried: tried.key).plan

    def _is_settled(self, tried: _Tried) -> bool:
        """Whether no schedule is faster: nothing runs again."""
        return tried.plan.status == "optimal" or tried.seconds <= self._least_seconds(tried.kept)

    def _orders(self) -> Iterator[tuple[int, ...]]:
        """The choices in the orders in which they join the sets."""
        last = {e.action.module: i for i, e in enumerate(self._sharding.events) if _gathers_again(e)}  # type: ignore[union-attr]
        modules = self._sharding.modules
        choices = [i for i in self._sharding.choices if i in last]
        from_last = sorted(choices, key=lambda i: last[i])
        yield tuple(from_last)
        yield tuple(sorted(from_last, key=lambda i: -(modules[i].gather_seconds or 1.0) / max(1, modules[i].nbytes)))

    def _search_along(self, order: Sequence[int], options: Options) -> None:
        """Try sets of the first modules in ``order``: from as many as fit where nothing runs again."""
        counts = range(len(order) + 1)

        def over(schedules: Sequence[Schedule], count: int) -> bool:
            return replay(keeping(self._record, order[:count]), schedules).peak_bytes > self._budget_bytes

        low = max(0, bisect.bisect_left(counts, True, key=lambda n: over(self._base.fast_schedules, n)) - 1)
        for n in sorted({low + (len(order) - low) * i // (_SPREAD - 1) for i in range(_SPREAD)}):
            if not self._try(tuple(order[:n]), options):
                break  # those that keep more do not fit either
        for _ in range(_HALVINGS):
            tried = [n for n in counts if self._tried.get(tuple(sorted(order[:n])))]
            if not tried:
                return
            best = min(tried, key=lambda n: self._tried[tuple(sorted(order[:n]))].key)  # type: ignore[union-attr]
            known = [n for n in counts if tuple(sorted(order[:n])) in self._tried]
            below = max((n for n in known if n < best), default=best)
            above = min((n for n in known if n > best), default=best)
            for n in {(below + best) // 2, (best + above + 1) // 2} - {below, best, above}:
                self._try(tuple(order[:n]), options)

    def _try(self, kept: tuple[int, ...], options: Options) -> bool:
        """Solve the set's schedules, unless none makes it faster than what is known; gives whether it may fit."""
        kept = tuple(sorted(kept))
        if kept in self._tried:
            return kept not in self._misfits
        if timing.interrupted() and any(self._tried.values()):
            return False
        known = [tried.seconds for tried in self._tried.values() if tried is not None]
        if known and self._least_seconds(kept) > min(known):
            self._tried[kept] = None
            return True
        self._tried[kept] = self._solved(kept, options)
        if self._tried[kept] is None:
            self._misfits.add(kept)
        return self._tried[kept] is not None

    def _solved(self, kept: tuple[int, ...], options: Options) -> _Tried | None:
        record = keeping(self._record, kept)
        try:
            plan = planner.plan_step(
                record, self._budget_bytes, self._algorithm, options, self._baseline(kept), self._starts
            )
        except (InfeasibleBudget, NoPlanInTime):
            return None
        clocks = sharded_clocks(record, [g.schedule for g in plan.graphs])
        return _Tried(kept, clocks.step_seconds, sum(map(_gathers, record.events)), plan)

    def _least_seconds(self, kept: tuple[int, ...]) -> float:
        """Of the step in which nothing runs again."""
        return sharded_clocks(keeping(self._record, kept), self._base.fast_schedules).step_seconds

    def _baseline(self, kept: tuple[int, ...]) -> Baseline:
        return planner.baseline(keeping(self._record, kept), self._base.frugal_schedules)


def _gathers(event: Event) -> bool:
    return event.action is not None and event.action.kind == GATHER


def _gathers_again(event: Event) -> bool:
    return event.action is not None and event.action.kind == GATHER and event.action.unless_kept
