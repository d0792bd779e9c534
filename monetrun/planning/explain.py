"""What a plan does: which modules are recomputed, what that saves, and what is allocated at the peak.

Every figure is a sum over the steps that ``simulate`` replays, so the parts add up: the bytes to the planned peak, the
seconds to the planned overhead.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monetrun.core.errors import PlanMismatch, ScheduleError
from monetrun.core.event import calls_of_graphs
from monetrun.core.freed import freed_after, freed_bytes
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.keeping import as_planned
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Plan, Schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import BUCKETS, LAST_GRADIENTS, OUTSIDE, SCRIPT, StepRecord, events_under, replay
from monetrun.planning import planner
from monetrun.planning.ledger import GATHERED

NO_MODULE = "(outside of modules)"

PARAMETERS, STATE = "parameters", "optimizer state"
ACTIVATIONS, GRADIENTS = "activations", "gradients of weights"
PASSING, WORKSPACE = "gradients of activations", "workspace"

_MOST_LARGE = 30


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """What the plan does to the operators of one module, compared with the plain step.

    Attributes:
        module: its path in the model.
        again: runs of its forward operators in the backward pass, after one in the forward pass.
        seconds: of these runs, plus what its other implementations cost more than the defaults.
        saved_bytes: saved for the backward by the plain step and not by the plan (negative: by the plan only), of all
            calls that wait for their backward at once, where most do.
    """

    module: str
    again: int
    seconds: float
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors written by one module's operators that are alive at the peak: how many, and their bytes."""

    module: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Large:
    """A tensor of a graph that is alive at the peak: the operator that wrote it, that one's module, and its bytes."""

    operator: str
    module: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Used:
    """How often operators of one target run in the planned step with an implementation that is not the default."""

    implementation: str
    target: str
    count: int


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` computes; bytes are of the whole step on one device, seconds of its graphs' calls.

    Bytes are allocated ones, those of the budget too, but on CUDA: it bounds reserved ones there.

    Attributes:
        plain_peak_bytes: of the step without monetrun.
        budget_bytes: of the plan.
        planned_peak_bytes: the sum of ``at_peak``.
        overhead: added seconds over ``plain_seconds``, as a fraction.
        bound: no schedule within the budget has less.
        gap: overhead less bound.
        plain_seconds: of the plain step.
        peak_name: the operator, or the stretch of the script, at the peak.
        at_peak: bytes allocated there, by kind.
        alive: activations, and gradients of them, alive there, by module, the largest first.
        largest: the largest single tensors of the graphs alive there.
        operators_again: forward operators that run again in the backward pass.
        modules: all that the plan changes, the most expensive first.
        implementations: all that are not the default, the most frequent first.
        plain_profile: the most bytes during each step of the plain schedules and each stretch of the script, in order.
        planned_profile: the same under the plan.
        plain_reserved_bytes: on CUDA, what the plain step reserves of the device; else None.
        planned_reserved_bytes: the same under the plan.
    """

    plain_peak_bytes: int
    budget_bytes: int
    planned_peak_bytes: int
    overhead: float
    bound: float
    gap: float
    plain_seconds: float
    peak_name: str
    at_peak: dict[str, int]
    alive: tuple[Held, ...]
    largest: tuple[Large, ...]
    operators_again: int
    modules: tuple[ModuleCost, ...]
    implementations: tuple[Used, ...]
    plain_profile: tuple[int, ...]
    planned_profile: tuple[int, ...]
    plain_reserved_bytes: int | None = None
    planned_reserved_bytes: int | None = None


def explain(plan: Plan, record: StepRecord) -> Explanation:
    """Replay ``plan`` on the step that it was made for.

    Raises:
        PlanMismatch: ``record`` is of another step.
    """
    if not describes(record, plan):
        raise PlanMismatch("the record is of another step than the plan", "monetrun plan SCRIPT writes a new plan")
    record = as_planned(record, plan.keeps_parameters)
    fast = planner.plain_in_place(record)
    planned = [g.schedule for g in plan.graphs]
    timeline = replay(record, planned)
    contents = _at_peak(record, planned, timeline.peak_event)
    return Explanation(
        plain_peak_bytes=plan.plain_peak_bytes,
        budget_bytes=plan.budget_bytes,
        planned_peak_bytes=timeline.peak_bytes,
        overhead=plan.overhead,
        bound=plan.bound,
        gap=plan.gap,
        plain_seconds=replay(record, fast).seconds,
        peak_name=timeline.peak_name,
        at_peak={kind: nbytes for kind, nbytes in contents.by_kind.items() if nbytes},
        alive=contents.alive(),
        largest=contents.largest(),
        operators_again=sum(len(schedule.runs_again()) for schedule in planned),
        modules=_modules(record, fast, planned),
        implementations=_implementations(record, planned),
        plain_profile=_profile(*plain_step(record)),
        planned_profile=_profile(record, planned),
        plain_reserved_bytes=None if plan.pool is None else plan.pool.plain_bytes,
        planned_reserved_bytes=None if plan.pool is None else plan.pool.planned_bytes,
    )


def describes(record: StepRecord, plan: Plan) -> bool:
    """Whether ``plan`` was made for ``record``: it has the same graphs, and the same peak when they are replayed.

    Raises:
        PlanMismatch: it has the same graphs, and a schedule that breaks the rules of the replay.
    """
    record = as_planned(record, plan.keeps_parameters)
    if [g.fingerprint for g in record.graphs] != [g.fingerprint for g in plan.graphs]:
        return False
    try:
        return replay(record, [g.schedule for g in plan.graphs]).peak_bytes == plan.planned_peak_bytes
    except ScheduleError as error:
        message = f"the plan's schedules cannot run its graphs: {error.message}"
        raise PlanMismatch(message, "monetrun plan SCRIPT writes a new one") from error


def find_record(plan: Plan, records: Iterable[StepRecord], name: str) -> StepRecord:
    """The record that ``plan`` was made from.

    Args:
        plan: to be explained.
        records: from the cache, the most recent first.
        name: of the plan's file, for the message.

    Raises:
        PlanMismatch: no record is the plan's.
    """
    for record in records:
        if describes(record, plan):
            return record
    raise PlanMismatch(
        f"the trial run that {name} was made from is not in this machine's cache",
        f"make both anew: monetrun plan --out {name} SCRIPT ..., without --no-cache",
    )


def module_of(name: str) -> str:
    """The module's path in an operator's name (``"layer1.0.conv1.convolution_3"``)."""
    return name.rpartition(".")[0] or NO_MODULE


def alive_before(graph: Graph, schedule: Schedule, at: int) -> tuple[int, ...]:
    """Ids of the tensors alive before step ``at`` of the whole schedule, by ``simulate``'s rules."""
    steps = (*schedule.forward, *schedule.backward)
    written = {t for step in steps[:at] for t in graph.operators[step.operator].outputs}
    alive = {t for t in written if graph.tensors[t].kept}
    for step in steps[at:]:
        op = graph.operators[step.operator]
        alive.update(written.intersection(op.implementations[step.implementation].inputs))
        written.difference_update(op.outputs)
    return tuple(sorted(alive))


def _modules(record: StepRecord, plain: Sequence[Schedule], planned: Sequence[Schedule]) -> tuple[ModuleCost, ...]:
    again: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    saved: Counter[str] = Counter()
    calls, waiting = calls_of_graphs(record.events), _most_waiting(record)
    for k, graph in enumerate(record.graphs):
        for operator, runs in planned[k].runs_again().items():
            again[module_of(graph.operators[operator].name)] += runs * calls[k]
        for sign, schedule in ((1, planned[k]), (-1, plain[k])):
            for part in (schedule.forward, schedule.backward):
                for step in part:
                    module = module_of(graph.operators[step.operator].name)
                    seconds[module] += sign * calls[k] * record.costs[k].seconds[step.operator][step.implementation]
            for t in alive_before(graph, schedule, len(schedule.forward)):
                saved[module_of(graph.operators[graph.writer[t]].name)] -= sign * waiting[k] * graph.tensors[t].nbytes
    rows = [ModuleCost(m, again[m], seconds[m], saved[m]) for m in seconds if again[m] or saved[m] or seconds[m]]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.saved_bytes, row.module)))


def _most_waiting(record: StepRecord) -> Counter[int]:
    """How many calls of each graph wait for their backward at once at most: 1 where gradients are accumulated."""
    now, most = Counter[int](), Counter[int]()
    for event in record.events:
        if event.kind != OUTSIDE:
            now[event.graph] += 1 if event.kind == FORWARD else -1
            most[event.graph] = max(most[event.graph], now[event.graph])
    return most


def _implementations(record: StepRecord, planned: Sequence[Schedule]) -> tuple[Used, ...]:
    used: Counter[tuple[str, str]] = Counter()
    calls = calls_of_graphs(record.events)
    for k, (graph, schedule) in enumerate(zip(record.graphs, planned, strict=True)):
        for step in (*schedule.forward, *schedule.backward):
            if step.implementation:
                op = graph.operators[step.operator]
                used[op.implementations[step.implementation].name, op.target] += calls[k]
    rows = [Used(name, target, count) for (name, target), count in used.items()]
    return tuple(sorted(rows, key=lambda row: (-row.count, row.implementation, row.target)))


class _Contents:
    """What is allocated, by kind and by module; kept up to date from one event of the step to the next."""

    def __init__(self, record: StepRecord) -> None:
        self.by_kind: Counter[str] = Counter({k: record.ledger.get(k, 0) for k in (PARAMETERS, STATE, BUCKETS)})
        self.by_kind[SCRIPT] = record.base_bytes - sum(self.by_kind.values())
        self.by_module: Counter[str] = Counter()
        self.count: Counter[str] = Counter()
        self.single: Counter[tuple[str, int]] = Counter()  # how many of an operator's name and these bytes

    def add(self, graph: Graph, tensors: Iterable[int], sign: int = 1) -> None:
        """Count tensors of ``graph`` as allocated, or as freed (``sign`` -1)."""
        for t in tensors:
            tensor, op = graph.tensors[t], graph.operators[graph.writer[t]]
            kind = ACTIVATIONS if op.phase == FORWARD else GRADIENTS if tensor.kept else PASSING
            self.by_kind[kind] += sign * tensor.nbytes
            self.single[op.name, tensor.nbytes] += sign
            if kind != GRADIENTS:
                self.by_module[module_of(op.name)] += sign * tensor.nbytes
                self.count[module_of(op.name)] += sign

    def release(self, graph: Graph, tensors: Iterable[int]) -> None:
        """Count tensors released by a backward of ``graph`` as freed; external ones were counted as the script's."""
        for t in tensors:
            if graph.tensors[t].external:
                self.by_kind[SCRIPT] -= graph.tensors[t].nbytes
            else:
                self.add(graph, (t,), -1)

    def alive(self) -> tuple[Held, ...]:
        """Activations and their gradients, by module, the largest first."""
        rows = [Held(m, self.count[m], nbytes) for m, nbytes in self.by_module.items() if nbytes]
        return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.module)))

    def largest(self) -> tuple[Large, ...]:
        """The largest tensors of the graphs."""
        rows = [Large(n.rpartition(".")[2], module_of(n), nbytes) for n, nbytes in self.single.elements() if nbytes]
        return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.module, row.operator))[:_MOST_LARGE])


def _at_peak(record: StepRecord, schedules: Sequence[Schedule], peak_event: int) -> _Contents:
    """What is allocated at the step's peak."""
    contents = _Contents(record)
    for i, event in enumerate(events_under(record, schedules)[: peak_event + 1]):
        if event.kind == OUTSIDE:
            kind = GRADIENTS if event.name == LAST_GRADIENTS else SCRIPT if event.action is None else GATHERED
            contents.by_kind[kind] += event.peak_bytes if i == peak_event else event.delta_bytes
            for k, t in event.dropped if i < peak_event else ():
                contents.release(record.graphs[k], (t,))
            continue
        graph, schedule = record.graphs[event.graph], schedules[event.graph]
        cut = len(schedule.forward)
        steps = (*schedule.forward, *schedule.backward)
        if event.kind == BACKWARD:
            contents.add(graph, alive_before(graph, schedule, cut), -1)
        if i < peak_event:
            contents.add(graph, alive_before(graph, schedule, cut if event.kind == FORWARD else len(steps)))
            contents.release(graph, event.released)
            continue
        at = _peak_step(graph, record.costs[event.graph], schedule, event.kind, event.released)
        contents.add(graph, alive_before(graph, schedule, at))
        if event.kind == BACKWARD:
            contents.release(graph, _freed_before(graph, schedule, at, event.released))
        op = graph.operators[steps[at].operator]
        implementation = op.implementations[steps[at].implementation]
        # writing a kept tensor again allocates a copy; an in-place output reuses storage that is counted already
        contents.add(graph, op.outputs if implementation.in_place_of is None else op.outputs[1:])
        contents.by_kind[WORKSPACE] += record.costs[event.graph].workspace_bytes[op.id][steps[at].implementation]
    return contents


def _peak_step(graph: Graph, costs: Costs, schedule: Schedule, phase: str, released: Sequence[int]) -> int:
    """The step of a call at which most is allocated, as ``step.call_footprint`` computes it."""
    during = simulate(graph, costs, schedule).during_bytes
    cut = len(schedule.forward)
    part = range(cut) if phase == FORWARD else range(cut, len(during))
    if phase == FORWARD:
        return max(part, key=lambda i: (during[i], -i))
    freed = freed_bytes(graph, schedule, released)
    return max(part, key=lambda i: (during[i] - freed[i - cut], -i))


def _freed_before(graph: Graph, schedule: Schedule, at: int, released: Sequence[int]) -> set[int]:
    """Which of ``released`` the backward has freed before step ``at``."""
    cut = len(schedule.forward)
    return {t for t, i in freed_after(graph, schedule, released).items() if cut + i < at}


def _profile(record: StepRecord, schedules: Sequence[Schedule]) -> tuple[int, ...]:
    """The most that is allocated during each step of the schedules and each stretch of the script."""

    @functools.cache
    def of_call(k: int, kind: str, released: tuple[int, ...]) -> list[int]:
        """Of a call's steps, less what is allocated at its start."""
        timeline, cut = simulate(record.graphs[k], record.costs[k], schedules[k]), len(schedules[k].forward)
        if kind == FORWARD:
            return list(timeline.during_bytes[:cut])
        saved = timeline.after_bytes[cut - 1] if cut else 0
        freed = freed_bytes(record.graphs[k], schedules[k], released)
        return [high - saved - before for high, before in zip(timeline.during_bytes[cut:], freed, strict=False)]

    profile: list[int] = []
    starts = replay(record, schedules).start_bytes
    for start, event in zip(starts, events_under(record, schedules), strict=True):
        during = [event.peak_bytes] if event.kind == OUTSIDE else of_call(event.graph, event.kind, event.released)
        profile += [start + high for high in during]
    return tuple(profile)
