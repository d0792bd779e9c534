"""What is known of a recorded step before any budget: its plain form, and the lowest peak that can be reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from monetrun.core.graph import Graph
from monetrun.core.left_out import dominated, without
from monetrun.core.options import Options
from monetrun.core.plain_step import plain_step, plain_timeline
from monetrun.core.plan import Schedule, each_once, plain_schedule
from monetrun.core.round_graph import RoundGraph, join_round
from monetrun.core.step import OUTSIDE, StepRecord, StepTimeline, replay
from monetrun.planning.device_budget import plain_reserved_bytes
from monetrun.planning.separate_graphs import SeparateRound
from monetrun.solve import greedy, timing
from monetrun.solve.tidy import in_place_where_legal


@dataclass(frozen=True)
class Baseline:
    """What is known of a step before any budget: the plain step, and the most frugal one.

    The plain step's bytes are those of ``plain_schedule``. Its seconds are fewer where running in place is faster,
    since the script may do that itself: a plan's overhead is over the faster of the two.

    Attributes:
        plain: the plain step.
        frugal: the step with the lowest peak known to be possible.
        plain_schedules: the plain step, in place wherever an operand is read for the last time; never slower.
        fast_schedules: the same, without the recomputation that the script asks for.
        frugal_schedules: of ``frugal``.
        rounds: of the record's rounds, each as one graph where its graphs can be joined.
        searched: the record without implementations that no schedule needs.
    """

    plain: StepTimeline
    frugal: StepTimeline
    plain_schedules: tuple[Schedule, ...]
    fast_schedules: tuple[Schedule, ...]
    frugal_schedules: tuple[Schedule, ...]
    rounds: tuple[RoundGraph | SeparateRound, ...]
    searched: StepRecord


def plain_in_place(
    record: StepRecord, options: Options | None = None, of: Callable[[Graph], Schedule] = plain_schedule
) -> tuple[Schedule, ...]:
    """The schedules ``of`` each graph, in place wherever an operand is read for the last time and ``options`` allow it.

    They are never slower.
    """
    pairs = zip(record.graphs, record.costs, strict=True)
    return tuple(in_place_where_legal(g, c, of(g), options or Options()) for g, c in pairs)


def _without_dominated(record: StepRecord) -> StepRecord:
    """The record with implementations that no schedule needs marked as not usable: less to search."""
    pairs = zip(record.graphs, record.costs, strict=True)
    return replace(record, graphs=tuple(without(g, dominated(g, c)) for g, c in pairs))


def baseline(
    record: StepRecord,
    frugal: Sequence[Schedule] | None = None,
    budget_of: Callable[[int], int] | None = None,
) -> Baseline:
    """Replay the plain step, and the step with the lowest peak known to be possible.

    Args:
        record: of the step.
        frugal: the most frugal schedules known; None to search for them.
        budget_of: the budget for a plain step of so many bytes; schedules far below it end that search.
    """
    record = _without_dominated(record)
    plain = replay(*plain_step(record))
    script, fast = plain_in_place(record), plain_in_place(record, of=each_once)
    # of rounds that are alike (an accumulation's) one is joined
    alike = {record.events[slice(*bounds)]: bounds for bounds in record.rounds}
    joined = {events: join_round(record, bounds) for events, bounds in alike.items()}
    rounds = tuple(joined[record.events[slice(*b)]] or SeparateRound(record, b, fast) for b in record.rounds)
    pairs = zip(record.graphs, record.costs, strict=True)
    far_below_bytes, enough_bytes = _far_below(record, plain, budget_of), 0
    if len(record.graphs) == 1:  # what lies beside the graph does not depend on its schedule
        graph, costs = record.graphs[0], record.costs[0]
        beside_bytes = plain.peak_bytes - plain_timeline(graph, costs).peak_bytes
        enough_bytes = max(0, far_below_bytes - beside_bytes)
    each = Options(seconds=timing.current().frugal_seconds / max(1, len(record.graphs)))
    searched = (greedy.most_frugal(g, c, options=each, enough_bytes=enough_bytes) for g, c in pairs)
    known = tuple(frugal or searched)
    fastest = replace(plain, seconds=replay(record, script).seconds)
    base = Baseline(fastest, replay(record, known), script, fast, known, rounds, record)
    if frugal is None:
        # the lowest peak of each graph need not give the step's lowest: what one graph saves adds to the others' peaks
        base = _lowered_at_its_peaks(record, base, _frugal_in, far_below_bytes)
        for found in (fast, script):  # the searches may end above them
            base = _with_lower(record, base, dict(enumerate(found)))
    return base


def _far_below(record: StepRecord, plain: StepTimeline, budget_of: Callable[[int], int] | None) -> int:
    """A peak that is so far below the budget that a more frugal step need not be looked for; 0 without a budget."""
    if budget_of is None:
        return 0
    if record.memory is None:
        return int(0.75 * budget_of(plain.peak_bytes))
    return int(0.5 * budget_of(plain_reserved_bytes(record)))  # some of it goes to fragmentation


def more_frugal(record: StepRecord, base: Baseline, options: Options) -> Baseline:
    """The baseline after a longer search for its most frugal step, which comes before a budget is refused.

    Takes about ``options.seconds`` at most.
    """
    from monetrun.solve.least import least_budget  # cvxpy takes long to import, and most budgets are feasible

    left = replace(options, on_progress=None)

    def lowest_in(joined: RoundGraph | SeparateRound, base: Baseline) -> dict[int, Schedule]:
        nonlocal left
        share = replace(left, seconds=left.seconds / min(2, len(base.rounds)))
        left = replace(left, seconds=left.seconds - share.seconds)
        if isinstance(joined, SeparateRound):
            return joined.lowest_peak(base.frugal_schedules, share)
        return joined.split(least_budget(joined.graph, joined.costs, share).schedule)

    return _lowered_at_its_peaks(record, base, lowest_in)


def _frugal_in(joined: RoundGraph | SeparateRound, base: Baseline) -> Mapping[int, Schedule]:
    if isinstance(joined, SeparateRound):
        return joined.least_saving()
    return joined.split(greedy.most_frugal(joined.graph, joined.costs))


def _lowered_at_its_peaks(
    record: StepRecord,
    base: Baseline,
    search: Callable[[RoundGraph | SeparateRound, Baseline], Mapping[int, Schedule]],
    enough_bytes: int = 0,
) -> Baseline:
    """The baseline after ``search`` of the round in which its most frugal step has its peak, as long as that is new.

    A search of another round cannot lower the peak. A step has many rounds where gradients are accumulated, or where
    the optimizer calls the model itself. Where rounds share graphs, what lowers one peak may raise another one: all
    graphs are searched together then.
    """
    searched: set[int] = set()
    while base.frugal.peak_bytes > enough_bytes:
        peak = base.frugal.peak_event
        at_peak = next((k for k, (begin, end) in enumerate(record.rounds) if begin <= peak < end), None)
        if at_peak is None or at_peak in searched:
            break
        searched.add(at_peak)
        base = _with_lower(record, base, search(base.rounds[at_peak], base))
    if base.frugal.peak_bytes > enough_bytes and rounds_share_graphs(record):
        base = _with_lower(record, base, search(whole_step(record, base.fast_schedules), base))
    return base


def rounds_share_graphs(record: StepRecord) -> bool:
    """Whether a graph is called in several rounds, beside others in one of them (a discriminator, mostly)."""
    rounds = [{e.graph for e in record.events[slice(*bounds)] if e.kind != OUTSIDE} for bounds in record.rounds]
    different = set(map(frozenset, rounds))
    return sum(map(len, different)) > len(set().union(*different))


def whole_step(record: StepRecord, plain: Sequence[Schedule]) -> SeparateRound:
    """All of the step as one round whose graphs are solved separately."""
    return SeparateRound(record, (0, len(record.events)), plain)


def lowered(record: StepRecord, base: Baseline, known: Sequence[Sequence[Schedule]]) -> Baseline:
    """The baseline with the most frugal of ``known`` (schedules of all graphs), if that lowers its peak."""
    for schedules in known:
        base = _with_lower(record, base, dict(enumerate(schedules)))
    return base


def _with_lower(record: StepRecord, base: Baseline, found: Mapping[int, Schedule]) -> Baseline:
    """The baseline with ``found`` (schedules by graph index) in its most frugal step, where they lower its peak."""
    frugal = tuple(found.get(k, s) for k, s in enumerate(base.frugal_schedules))
    timeline = replay(record, frugal)
    lower = timeline.peak_bytes < base.frugal.peak_bytes
    return replace(base, frugal=timeline, frugal_schedules=frugal) if lower else base
