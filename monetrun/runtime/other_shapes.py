"""Graphs that the plan does not have, each with a step and a schedule of its own: other shapes, or another model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch

from monetrun.capture import arriving_strides, cost
from monetrun.capture.arriving_strides import Arriving
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, is_out_of_memory
from monetrun.core.graph import Graph
from monetrun.core.last_gradients import last_gradients_bytes
from monetrun.core.last_outputs import last_outputs_bytes
from monetrun.core.left_out import without_reading_again
from monetrun.core.options import Options
from monetrun.core.plain_step import plain_timeline
from monetrun.core.plan import GraphPlan, Plan, Schedule, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import Event, StepRecord, replay
from monetrun.planning.planner import BudgetBelowSmallest
from monetrun.planning.summary import ROUNDING
from monetrun.runtime import adaptation, holdings, moved_memory, new_step
from monetrun.runtime.output_uses import Form
from monetrun.runtime.room import Shortage
from monetrun.runtime.ruled_out import RuledOut, changeable
from monetrun.runtime.settings import Settings
from monetrun.runtime.short_of_memory import as_out_of_memory
from monetrun.runtime.step_meter import StepMeter
from monetrun.solve import greedy

# Schedules for other shapes that are tried at further ones, the last that were made; and by how much of the plain time
# more than the plan's one may take there.
_KEPT, _AS_FAST = 8, 0.02
# How many times longer a step waits for a plan in reserved bytes before it is planned in allocated ones; and shares of
# what the script is estimated to hold and to take that are tried where a step with all of it does not fit.
_LONGER, _SHARES_OF_OUTSIDE = 4, ((1 / 3, 1.0), (2 / 3, 2 / 3), (1 / 3, 1 / 3))


@dataclass(frozen=True, slots=True)
class NewGraph:
    """A graph that the plan does not have, and what it is to be planned from.

    Attributes:
        arriving: the graph, with the strides with which gradients arrive: see ``OtherShapes.arriving``.
        ruled_out: implementations that must not run.
        record: of the planned step, where known.
        plan: that runs.
        outputs: of the last step that are there, bytes by address.
        place: how often graphs of this structure have been called in the present step.
    """

    arriving: Arriving
    ruled_out: RuledOut
    record: StepRecord | None
    plan: Plan
    outputs: Mapping[int, int] = field(default_factory=dict)
    place: int | None = None

    @property
    def joint(self) -> JointGraph:
        """The graph."""
        return self.arriving.joint

    def allowed(self, graph: Graph) -> Graph:
        """``graph`` (of ``joint``) without what is ruled out.

        Nobody has seen what the script changes of the inputs and outputs of a graph that the record does not have:
        nothing that it may change is read again.
        """
        if self.record is not None and not adaptation.is_recorded(self.joint, self.record):
            graph = without_reading_again(graph, changeable(self.joint))
        return self.ruled_out.without(graph)


class OtherShapes:
    """Of one process.

    Args:
        settings: of the process.
        device: of the models.
        steps: measures the steps under the plan.
        known: measured costs, by the operators' signatures; those of new shapes are added.
        note: called with a line for the user.
        measuring: see ``Enforcement.measuring``.
    """

    def __init__(
        self,
        settings: Settings,
        device: torch.device,
        steps: StepMeter,
        known: dict[str, OperatorCost],
        note: Callable[[str], None],
        measuring: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self.settings = settings
        self.device = device
        self.steps = steps
        self.known = known
        self.note = note
        self.measuring = measuring
        self._made: deque[GraphPlan] = deque(maxlen=_KEPT)  # schedules for other shapes than the plan's
        self._in_vain: set[str] = set()  # structures of graphs for which a longer wait found nothing
        self._held_more: dict[str, int] = {}  # by fingerprint: bytes that may come to be held beside what is there
        self._most_held = 0  # of these
        self.given_up: set[str] = set()  # graphs for which there was no schedule: the allocation limit decides
        self._strides: dict[str, Form] = {}  # of gradients that came, by structure of graphs

    def gradients_come(self, graph: Graph, strides: Form) -> None:
        """A backward begins; the gradients of its outputs have these strides, None where there is none."""
        self._strides[graph.structural_fingerprint] = strides

    def arriving(self, joint: JointGraph) -> Arriving:
        """A graph that is about to run, with gradients that arrive as they did at other shapes."""
        given = arriving_strides.given_as(joint, self._strides.get(joint.graph.structural_fingerprint, ()))
        return arriving_strides.of(joint, given, joint.tangents if arriving_strides.GIVES_AWAY else ())

    def step(self, new: NewGraph) -> tuple[StepRecord, StepRecord]:
        """The step of a graph that is about to run, under the plan's schedules and in the plain run.

        Bytes are measured now, of those operators' implementations that the plain step and the plan's schedules use;
        seconds are estimated.
        """
        joint = new.joint
        used = adaptation.signatures_used(joint, new.allowed(joint.graph), (*new.plan.graphs, *self._made))
        step = self._step(new, self._measured(joint, 0, used))
        plain = [plain_schedule(g) for g in new.record.graphs] if new.record is not None else []
        return step, replace(step, events=self._events(new, plain))

    def _step(self, new: NewGraph, now: Mapping[str, OperatorCost] | None = None) -> StepRecord:
        """The step under the plan's schedules; what is not known, nor was measured ``now``, is estimated."""
        joint, meter, now = new.joint, self.steps.meter, now or {}
        known = {s: now.get(s) or self.known.get(s) or cost.estimate(*timed) for s, timed in joint.timed.items()}
        graph = new.allowed(cost.as_tried(joint, known))
        costs = new.arriving.with_copies(cost.costs_of(joint, known, str(self.device)))
        events = self._events(new, [g.schedule for g in new.plan.graphs])
        step = new_step.step_of(graph, costs, meter.current_bytes(), events, meter.exact)
        outputs = new.outputs if last_outputs_bytes(step) else ()
        memory = moved_memory.memory_now(self.device, new.record, last_gradients_bytes(step), outputs)
        return replace(step, memory=memory)

    def _events(self, new: NewGraph, schedules: Sequence[Schedule]) -> tuple[Event, ...]:
        held = sum(holdings.gradients(self.device).values())
        return new_step.events_of(new.joint, new.record, schedules, held, sum(new.outputs.values()), new.place)

    def _measured(self, joint: JointGraph, rounds: int, only: Collection[str] | None = None) -> dict[str, OperatorCost]:
        """What is measured of a graph now; nothing where more than the budget is held: the refusal names the bytes.

        A call that finds no memory is estimated. Of ``only`` some implementations it finds some, also beyond a share of
        what is not known yet: what the plain run takes follows from them.
        """
        self.steps.interrupt()
        try:
            with self.measuring(bounded=only is None):
                return cost.measure(joint, self.known, self.steps.meter, self.device, rounds=rounds, only=only)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {}
        finally:
            self.steps.resume()

    def schedule(self, new: NewGraph, step: StepRecord, *, estimated: bool) -> tuple[StepRecord, Schedule]:
        """A schedule for ``step`` within the plan's budget, with room for what may come to be held where possible.

        One of the plan's, where that fits and gives eager's bits: so nothing more is measured. Else operators are
        measured for a new one.

        ``estimated``: what is left to the graph is a rough estimate, since the model is not captured whole, or no step
        was recorded: where nothing fits, the most frugal schedule runs, and the allocation limit decides.

        Returns:
            The step, with what was measured, and the schedule.

        Raises:
            InfeasibleBudget, NoPlanInTime: nothing fits.
        """
        joint, plan, graph = new.joint, new.plan, step.graphs[0]
        self.given_up.discard(graph.fingerprint)
        if self.settings.plan_given and not self._held_more:  # the first such graph
            shapes = adaptation.input_shapes(joint)
            within = f"within the plan's budget of {format_bytes(plan.budget_bytes)}"
            self.note(
                f"the given plan has no inputs of {shapes}: they are planned here, {within}; reports are of the plan's"
            )
        more = self._held_more.setdefault(graph.fingerprint, self._most_held)
        limit = moved_memory.limit_of(step, plan) - more
        for carried in adaptation.carried(step, plan.graphs, limit):
            if not adaptation.inexact(graph, carried):
                return step, carried
        if (again := self._made_before(step, plan, limit)) is not None:
            return step, again
        self.known.update(self._measured(joint, cost.ROUNDS))
        step = self._step(new)
        options = moved_memory.options_within_a_step(self.settings)
        failures: list[InfeasibleBudget | NoPlanInTime] = []
        longer = min(_LONGER * options.seconds, self.settings.solver_seconds)
        if graph.structural_fingerprint in self._in_vain:
            longer = 0.0
        for way in _from_the_best(step, more, options, longer, estimated=estimated):
            limit = moved_memory.limit_of(way.step, plan) - way.spare_bytes
            try:
                schedule = adaptation.adapted_schedule(way.step, plan, limit, way.options)
                break
            except (InfeasibleBudget, NoPlanInTime) as error:
                failures.append(error)
        else:
            if estimated:
                self.given_up.add(graph.fingerprint)
                return replace(step, memory=None), greedy.most_frugal(step.graphs[0], step.costs[0], options)
            refused: InfeasibleBudget | NoPlanInTime = failures[-1]
            if isinstance(refused, InfeasibleBudget):
                refused = moved_memory.refused_shape(joint, way.step, plan, refused)
            raise as_out_of_memory(refused, self.device.type)
        if way.step.memory is None and step.memory is not None:
            self._in_vain.add(graph.structural_fingerprint)
            others = [s for s in _smallest(step.graphs[0], failures) if replay(way.step, [s]).peak_bytes <= limit]
            schedule = _nearer_to(plan.budget_bytes, step, schedule, others)
        step = way.step
        if names := adaptation.inexact(step.graphs[0], schedule):
            self.note(f"inputs of {adaptation.input_shapes(joint)}: {', '.join(names)} {ROUNDING}")
        self._made.append(GraphPlan.of(step.graphs[0], schedule))
        return step, schedule

    def _made_before(self, step: StepRecord, plan: Plan, limit: int) -> Schedule | None:
        """The fastest exact schedule made at other shapes that fits ``step`` and is about as fast there as the plan."""
        graph, costs = step.graphs[0], step.costs[0]
        found = [s for s in adaptation.carried(step, self._made, limit) if not adaptation.inexact(graph, s)]
        if not found:
            return None
        best = min(found, key=lambda schedule: simulate(graph, costs, schedule).seconds)
        enough = plain_timeline(graph, costs).seconds * (1 + max(plan.overhead, 0.0) + _AS_FAST)
        return best if simulate(graph, costs, best).seconds <= enough else None

    def more_is_held(self, shortage: Shortage, budget_bytes: int) -> bool:
        """Have the graph's next schedule leave room for twice as much; False where the graph is the plan's own."""
        if shortage.fingerprint not in self._held_more:
            return False
        least = budget_bytes >> moved_memory.LEAST_COVER_SHIFT
        before = self._held_more[shortage.fingerprint]
        self._held_more[shortage.fingerprint] = more = max(least, 2 * shortage.excess_bytes, 2 * before)
        self._most_held = max(self._most_held, more)
        return True

    def forget(self, fingerprint: str) -> None:
        """Nothing is kept of this graph."""
        self._held_more.pop(fingerprint, None)
        self.given_up.discard(fingerprint)


@dataclass(frozen=True, slots=True)
class _Way:
    """How a step is planned: with so many bytes left free for what may come to be held."""

    step: StepRecord
    spare_bytes: int
    options: Options


def _from_the_best(
    step: StepRecord, more_bytes: int, options: Options, longer: float, *, estimated: bool
) -> Iterator[_Way]:
    """Ways to plan ``step``; at last what is there now has to be enough.

    On CUDA a step that finds no plan soon waits for one ``longer`` (seconds; 0: it does not); after that the allocator
    decides whether there is too much between the blocks. What a loss allocates is often less than was ``estimated``.
    """
    spares = dict.fromkeys((more_bytes, 0))
    if step.memory is not None:
        half = replace(options, seconds=options.seconds / 2)
        yield from (_Way(step, spare, half) for spare in spares)
        if longer:
            yield _Way(step, 0, replace(options, seconds=longer))
        step = replace(step, memory=None)
    yield from (_Way(step, spare, options) for spare in spares)
    if estimated:
        yield from (_Way(new_step.with_less_outside(step, *shares), 0, options) for shares in _SHARES_OF_OUTSIDE)


def _smallest(graph: Graph, failures: Sequence[Exception]) -> list[Schedule]:
    """The schedules of the smallest budgets that failures named for a step of this graph."""
    found = [f.smallest_schedules.graphs[0] for f in failures if isinstance(f, BudgetBelowSmallest)]
    return [g.schedule_for(graph) for g in found]


def _nearer_to(budget_bytes: int, step: StepRecord, schedule: Schedule, others: Sequence[Schedule]) -> Schedule:
    """``schedule``, or, of others as exact, the one that reserves least, where that halves what is over the budget."""
    taken = {s: adaptation.taken_bytes(step, s) for s in (schedule, *others)}
    exact = not adaptation.inexact(step.graphs[0], schedule)
    allowed = [s for s in others if not exact or not adaptation.inexact(step.graphs[0], s)]
    least = min((schedule, *allowed), key=taken.__getitem__)
    return least if 2 * (taken[least] - budget_bytes) <= taken[schedule] - budget_bytes else schedule
