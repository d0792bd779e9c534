"""The plan that runs: a schedule for every graph, also for those that it does not have, and planning again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from monetrun.capture import guards, kernel_search
from monetrun.capture.cost import OperatorCost
from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.capture.open_sizes import most_nodes
from monetrun.core.budget import format_bytes
from monetrun.core.errors import (
    InfeasibleBudget,
    MemoryShort,
    MonetrunError,
    NoPlanInTime,
    PlanMismatch,
    ScheduleError,
    own_faults,
)
from monetrun.core.graph import Graph
from monetrun.core.keeping import as_planned
from monetrun.core.plan import Plan, Schedule
from monetrun.core.simulate import judge
from monetrun.core.step import LIBRARIES, DeviceMemory, StepRecord, replay
from monetrun.core.step_changes import with_excess
from monetrun.planning import kept, planner
from monetrun.planning.intervals import Interval, counted_steps, intervals
from monetrun.planning.summary import planned_bytes, rounding_note
from monetrun.runtime import adaptation, agreement, moved_memory, resharding
from monetrun.runtime.collective_times import CollectiveTimes
from monetrun.runtime.earlier_plans import EarlierPlans
from monetrun.runtime.enforcement import Enforcement
from monetrun.runtime.other_shapes import NewGraph, OtherShapes
from monetrun.runtime.room import Room, Shortage
from monetrun.runtime.ruled_out import RuledOut
from monetrun.runtime.settings import Settings
from monetrun.runtime.step_meter import StepMeter

_log = logging.getLogger("monetrun")

# So many bytes more than planned may be reserved within the budget without another plan: small segments, which every
# stream has of its own. Where a page of a large segment more was taken, another one may be, beyond the budget.
_TOLERATED = 8 << 20

# Of the limit what runs as it is may have allocated by the captured graph: eager may keep more, and reserves more.
_PLAIN_SHARE = 0.5

_CORRECTED = "the first planned steps reserved more than was planned: planned again with what was seen"


class RunningPlan:
    """Gives graphs their schedules, and keeps allocations within the plan's budget.

    Args:
        settings: of the process.
        device: of the models.
        steps: measures the steps under the plan.
        known: measured costs, by the operators' signatures; those of new shapes are added.
        plan: to run.
        record: of the planned step, where known.
        note: called with a line for the user.

    Attributes:
        schedules: by the graphs' fingerprints: the plan's, and those for other shapes.
        other_shapes: gives the latter.
        excess_bytes: what planned steps reserved beyond the plan, once seen.
        collectives: times those of sharded modules, where the plan does not know what they take.

    Raises:
        PlanMismatch: the plan was made with another torch.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        steps: StepMeter,
        known: dict[str, OperatorCost],
        plan: Plan,
        record: StepRecord | None,
        note: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.device = device
        self.steps = steps
        self.known = known
        self.record = record
        self.note = note
        self._budget = "" if settings.plan_given else settings.budget
        self.room = Room(steps.meter)
        self.enforcement = Enforcement(device, steps.meter, note, of_plain=moved_memory.is_share(self._budget))
        self._frugal: tuple[Schedule, ...] | None = None  # the most frugal schedules of the record's graphs
        self.other_shapes = OtherShapes(settings, device, steps, known, note, self.enforcement.measuring)
        self.excess_bytes = 0 if record is None or record.memory is None else record.memory.excess_bytes
        self._estimated: set[str] = set()  # graphs whose steps are known in part
        self._plain_reserved = moved_memory.PlainReserved(device, record)
        self._ruled_out, self._of_this_model = RuledOut(), not settings.plan_given  # what was given, until it is seen
        self.collectives = CollectiveTimes(device, record)
        if record is not None:
            self._ruled_out.add_recorded(record)
        self.follow(plan)

    def follow(self, plan: Plan, earlier: EarlierPlans | None = None) -> None:
        """Run this plan from now on; models have to be compiled anew. ``earlier``: plans to go back to, if any."""
        kept.check_torch(plan.torch_version, torch.__version__, "the plan")
        self.plan, self._earlier = plan, earlier or EarlierPlans()
        self.record = None if self.record is None else as_planned(self.record, plan.keeps_parameters)
        self.schedules: dict[str, Schedule] = {g.fingerprint: g.schedule for g in plan.graphs}
        self.enforcement.plan_is(plan.budget_bytes, plan.pool, bool(plan.ledger.get(LIBRARIES)))
        self.room.plan_is(self.record, self.schedules, moved_memory.allocated_limit(plan))
        self.steps.plan_is(plan.planned_peak_bytes, planned_bytes(plan))
        self.steps.measure_a_settled_step(*counted_steps(self.record))

    def replan_without(self, failed: FailedGuards) -> None:
        """Use implementations whose guards failed no more: plan again without them, in this rank; others may not.

        Without a record only the graph's schedule is dropped: it gets another one when it is captured again.

        Raises:
            InfeasibleBudget, NoPlanInTime: without them nothing fits the budget.
        """
        self._ruled_out.add_failed(failed)
        self.schedules.pop(failed.graph.fingerprint, None)
        if self.record is None:
            return
        record = self._ruled_out.record_without(self.record)
        if record == self.record:
            return
        self.record, self._frugal = record, None
        how = self.plan.budget_bytes, self.settings.algorithm, self.settings.solver_options()
        self.follow(own_faults()(planner.plan_step)(record, *how))
        self.steps.forget_peaks()

    def correct(self, warn: Callable[[str], None]) -> bool:
        """Plan again, with a warning, where the first planned steps of any rank reserved far more than the plan says.

        Gives whether that was done: not where it is within the budget and ``_TOLERATED``, and nothing was short. All
        ranks come here in the same step, and plan with the largest excess; the launcher keeps it for the next launch.
        """
        memory = None if self.record is None else self.record.memory
        if self.record is None or memory is None or self.plan.pool is None:
            return False
        only_planned = self.schedules.keys() <= {g.fingerprint for g in self.plan.graphs}  # others may have taken it
        excess = _far_beyond(self.plan, self.steps, memory) if only_planned else 0
        if not (excess := agreement.largest(excess, self.record)):
            return False
        self.excess_bytes = memory.excess_bytes + excess
        record = with_excess(self._earlier.first_record(self.record), self.excess_bytes)
        how = self.plan.budget_bytes, self.settings.algorithm, self.settings.solver_options()
        try:
            plan = agreement.plan_in_rank_0(lambda _: planner.plan_step(record, *how), record=record)
        except MonetrunError as failure:
            warn(f"planned steps reserve more than was planned, and go on: no other plan is known; {failure.hint}")
            return False
        warn(_CORRECTED + rounding_note(plan, record))
        self.record = record
        self.follow(plan)
        self.steps.forget_peaks()
        return True

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The graph's index in the record (-1: none), and its schedule: the plan's, or one for the graph's shapes.

        Raises:
            InfeasibleBudget: nothing fits beside what is allocated now.
            PlanMismatch: the plan that the user gave is of another model, or its schedule cannot run.
        """
        fingerprint = joint.graph.fingerprint
        if fingerprint in self.schedules:
            if not _is_sound(joint.graph, self.schedules[fingerprint], self.settings):
                del self.schedules[fingerprint]
        elif not self._of_this_model:
            adaptation.check_same_model(joint.graph, self.plan)
        self._of_this_model = True
        self.enforcement.enforce()  # another model's plan may have less than this model's capture takes
        if fingerprint not in self.schedules:
            place = self.room.calls_like(joint.graph)
            arriving = self.other_shapes.arriving(joint)
            new = NewGraph(arriving, self._ruled_out, self.record, self.plan, self.room.outputs.last(), place)
            step, plain = self.other_shapes.step(new)
            self._plain_reserved.step_is(plain)
            estimated = not adaptation.is_known(joint, self.record)
            why = f"inputs of {adaptation.input_shapes(joint)}"
            _follow_plain_peak(self, fingerprint, moved_memory.plain_peak(plain), why, estimated=estimated)
            new = replace(new, plan=self.plan)  # its budget may have grown
            step, self.schedules[fingerprint] = self.other_shapes.schedule(new, step, estimated=estimated)
            _make_ready(self, step, self.schedules[fingerprint], estimated=estimated)
        _search_for_kernels(self, joint, self.schedules[fingerprint])
        return _number(fingerprint, self.record), self.schedules[fingerprint]

    # ---- memory that moves

    def step_ended(self, optimizer: int) -> bool:
        """An optimizer's step (its ``id``) has ended.

        Gives whether an earlier plan runs again: models have to be compiled anew.
        """
        self.room.optimizer_ended(optimizer)
        self.enforcement.lift()
        resharding.free_kept()
        guards.optimizer_ended()
        return _goes_back(self)

    def check_room(self, fingerprint: str) -> None:
        """A graph's forward begins, and with it the budget holds; a call of which nothing was captured is not bounded.

        Raises:
            MemoryShort: more is held than its step has room for.
        """
        self.enforcement.enforce(suspended=fingerprint in self._estimated or self.room.takes_another_way(fingerprint))
        if (schedule := self.schedules.pop(fingerprint, None)) is not None:
            self.schedules[fingerprint] = schedule  # the last one to be forgotten
        holds = self.enforcement.holds
        shortage = self.room.shortage(fingerprint) if holds else self.room.held_before(fingerprint)
        if self.record is not None and self.room.excess_bytes is not None:
            self._earlier.held(self.room.excess_bytes, self.record)
        if shortage is not None:
            plain = moved_memory.plain_peak_beside(shortage, 0 if holds else self.steps.peak_bytes)
            why = f"{format_bytes(shortage.excess_bytes)} more are held before a forward"
            _follow_plain_peak(self, fingerprint, plain, why, estimated=not holds)
            over = shortage.held_bytes + shortage.need.planned_bytes > self.room.limit_of(fingerprint)
            if holds and over and fingerprint not in self.other_shapes.given_up:
                self.room.call_repeats(fingerprint)
                raise MemoryShort("too much is held for this schedule", "monetrun plans again", shortage=shortage)
        self.enforcement.use_pool_of(fingerprint)

    def make_room(self, shortage: Shortage) -> None:
        """Plan again, in this rank alone, for a step before which more is held.

        Ranks may run different schedules of a graph: it gives the same gradients in the same order, all at its end.

        Raises:
            BudgetExceeded: no schedule fits beside what is held.
        """
        if self.other_shapes.more_is_held(shortage, self.plan.budget_bytes):
            self.schedules.pop(shortage.fingerprint)
            return
        assert self.record is not None
        try:
            found = moved_memory.plan_with_more_held(self.record, self.plan, shortage, self.settings, self._frugal)
        except (InfeasibleBudget, NoPlanInTime) as failure:
            if self.room.does_without(shortage):
                return
            raise moved_memory.refused_step(self.plan, shortage, failure, self.device) from None
        self._earlier.leave(self.plan, self.record, found.plan)
        self.record, self._frugal = found.record, found.frugal
        self.follow(found.plan, self._earlier)
        again = f"planned again within {format_bytes(self.plan.budget_bytes)}, overhead {self.plan.overhead:+.1%}"
        again += rounding_note(self.plan, self.record)
        self.note(f"{format_bytes(shortage.excess_bytes)} more are held before the forward than planned: {again}")


def intervals_of(running: RunningPlan) -> tuple[Interval, ...]:
    """Planned and measured bytes of one settled step; empty where the plan does not cover what was measured."""
    if running.record is None or not running.steps.stretches:
        return ()
    fingerprints = [graph.fingerprint for graph in running.record.graphs]
    if not running.schedules.keys() >= set(fingerprints):
        return ()
    return intervals(running.record, [running.schedules[f] for f in fingerprints], running.steps.stretches)


def fits_plainly(running: RunningPlan, fingerprint: str) -> bool:
    """A call begins that takes no more than one of this graph: whether it fits as it is, with what is held now."""
    known = fingerprint in running.schedules and fingerprint not in running._estimated
    return known and running.room.has_room_for_plain(fingerprint, _PLAIN_SHARE)


def _number(fingerprint: str, record: StepRecord | None) -> int:
    """Which of the record's graphs has this fingerprint; -1: none."""
    graphs = () if record is None else record.graphs
    return next((k for k, graph in enumerate(graphs) if graph.fingerprint == fingerprint), -1)


def _goes_back(running: RunningPlan) -> bool:
    """Whether a plan that was left runs again, since there is room for it."""
    if (found := running._earlier.step_ended(running.plan)) is None:
        return False
    plan, running.record = found
    running.follow(plan, running._earlier)
    running.steps.forget_peaks()
    again = f"that plan runs again, overhead {plan.overhead:+.1%}"
    running.note(f"what was held beyond the plan is held no more: {again}")
    return True


def _follow_plain_peak(
    running: RunningPlan, fingerprint: str, plain_bytes: int, why: str, *, estimated: bool = False
) -> None:
    """A budget that is a share of the plain peak grows with it. ``plain_bytes``: allocated, at these shapes."""
    grown = moved_memory.plan_at_plain_peak(
        running.plan, running._budget, plain_bytes, fingerprint, running._plain_reserved
    )
    if grown is None:
        return
    before, now = moved_memory.plain_bytes(running.plan), moved_memory.plain_bytes(grown)
    if now > before + before // 100:  # no line for each byte; the report has the last
        budget = f"{running._budget} of it are {format_bytes(grown.budget_bytes)}"
        running.note(f"{why}: the plain run takes {'about ' * estimated}{format_bytes(now)}, so that {budget}")
    running.plan = grown
    running.room.limit_bytes = moved_memory.allocated_limit(grown)
    running.enforcement.budget_is(grown.budget_bytes)


def _make_ready(running: RunningPlan, step: StepRecord, schedule: Schedule, *, estimated: bool) -> None:
    """Steps of a graph that the plan does not have run like ``step``; ``estimated``: that is known in part only."""
    fingerprint = step.graphs[0].fingerprint
    if estimated:
        running._estimated.add(fingerprint)
    pool = moved_memory.pool_of(step, schedule, running.plan)
    allocated_bytes = replay(step, [schedule]).peak_bytes
    beyond_bytes = moved_memory.allocated_beyond(allocated_bytes, running.plan, pool)
    running.room.other_shapes(step, schedule, beyond_bytes)
    running.steps.planned_too(allocated_bytes, allocated_bytes if pool is None else pool.planned_bytes)
    if pool is not None and not estimated:
        running.enforcement.graph_has(fingerprint, pool)
    _forget_oldest(running)


def _forget_oldest(running: RunningPlan) -> None:
    """Of graphs that the plan does not have keep the last ones: a number that changes in each step makes each step's.

    One that runs yet goes on; where it is captured again, it is planned again.
    """
    planned = {graph.fingerprint for graph in running.plan.graphs}
    sizes = {f: len(s.forward) + len(s.backward) for f, s in running.schedules.items() if f not in planned}
    left, most = sum(sizes.values()), _most_steps()
    for fingerprint, size in list(sizes.items())[:-1]:
        if left <= most:
            return
        left -= size
        del running.schedules[fingerprint]
        running._estimated.discard(fingerprint)
        running.room.forget(fingerprint)
        running.other_shapes.forget(fingerprint)
        running.enforcement.forget(fingerprint)


def _search_for_kernels(running: RunningPlan, joint: JointGraph, schedule: Schedule) -> None:
    if kernel_search.is_needed(running.device):
        running.steps.interrupt()
        kernel_search.search(joint, schedule, running.device)
        running.enforcement.hold_pool()
        running.steps.resume()


def _far_beyond(plan: Plan, steps: StepMeter, memory: DeviceMemory) -> int:
    """What steps reserved beyond what was planned, in whole pages; 0 where that is little and within the budget.

    Where requests were short, what was free in pieces was given back to the driver, so that it was not reserved: then
    at least as much again as was planned for such excess before.
    """
    page = memory.settings.large_segment_bytes
    assert plan.pool is not None
    planned, found = plan.pool.planned_bytes, steps.reserved_bytes
    beyond = found - planned if found > min(plan.budget_bytes, planned + _TOLERATED) else 0
    short = max(1, memory.excess_bytes) if steps.retries else 0
    return -(-max(beyond, short) // page) * page


def _is_sound(graph: Graph, schedule: Schedule, settings: Settings) -> bool:
    """Whether a schedule that was read from a file keeps the rules of the replay; one that does not is not run.

    Raises:
        PlanMismatch: the plan that the user gave has it.
    """
    try:
        judge(graph, schedule)
    except ScheduleError as error:
        what = f"the plan's schedule of {graph.name} cannot run: {error.message}"
        if settings.plan_given:
            raise PlanMismatch(what, "monetrun plan writes a new one") from error
        _log.warning("%s; another one is made now", what)
        return False
    return True


def _most_steps() -> int:
    """Steps of the schedules of graphs that the plan does not have, in all: a million of them are about 100 MB.

    More than those of the graphs that ``OpenSizes`` keeps.
    """
    return most_nodes() * 5 // 2
