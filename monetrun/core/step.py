"""A whole training step: what a trial run saw of it, and its replay under other schedules.

A step is more than its graphs: weights and optimizer state lie under them, the script computes a loss between a forward
and its backward, holds the batch and last step's outputs, and runs the optimizer. A ``StepRecord`` has the graphs, and
what happened between their calls, as bytes; ``replay`` puts the two together, so that the peak of the *step* under any
schedules comes from ``simulate`` and from measured bytes, and from nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.plan import Schedule, Step
from monetrun.core.simulate import simulate

OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of a training step.

    Attributes:
        kind: ``"forward"`` or ``"backward"`` (a call of a graph), or ``"outside"`` (the script between two calls).
        graph: index of the graph, -1 outside.
        delta_bytes: outside: allocated at its end, less at its start.
        peak_bytes: outside: the most allocated during it, less at its start.
        name: for messages (``"SGD.step"``).
        released: backward: the graph's external tensors (what it was given, tangents) and outputs that nothing but
            its saved values holds by then; they are freed within the call, after their last reader.
    """

    kind: str
    graph: int = -1
    delta_bytes: int = 0
    peak_bytes: int = 0
    name: str = ""
    released: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepRecord:
    """A training step in its steady state.

    Attributes:
        graphs: all graphs captured, in the order of their first calls.
        costs: of each.
        events: the step's stretches, in order.
        base_bytes: allocated when the first forward starts, from the second step on.
        ledger: what ``base_bytes`` and the gradients consist of, by name, in bytes.
        device: name of the device (type, and model where known).
        torch_version: of the trial run.
        exact: whether bytes were counted by the allocator.
    """

    graphs: tuple[Graph, ...]
    costs: tuple[Costs, ...]
    events: tuple[Event, ...]
    base_bytes: int
    ledger: dict[str, int]
    device: str
    torch_version: str
    exact: bool = True

    @cached_property
    def rounds(self) -> tuple[tuple[int, int], ...]:
        """Ranges of events, each from where nothing is saved for a backward to where nothing is saved again."""
        found: list[tuple[int, int]] = []
        start: int | None = None
        pending = 0
        for i, event in enumerate(self.events):
            if event.kind == FORWARD:
                start = (i if found else 0) if start is None else start
                pending += 1
            elif event.kind == BACKWARD:
                pending -= 1
                if pending == 0 and start is not None:
                    found.append((start, i + 1))
                    start = None
        if start is not None:
            found.append((start, len(self.events)))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """What a step allocates under given schedules.

    Attributes:
        peak_bytes: of the whole step.
        peak_event: index of the event in which it is reached.
        peak_name: the operator, or the stretch, that reaches it.
        start_bytes: allocated at the start of each event.
        seconds: of all graph calls.
    """

    peak_bytes: int
    peak_event: int
    peak_name: str
    start_bytes: tuple[int, ...]
    seconds: float


def replay(record: StepRecord, schedules: Sequence[Schedule]) -> StepTimeline:
    """Replay the step with ``schedules[k]`` for graph ``k``.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    calls: dict[tuple[int, tuple[int, ...]], Call] = {}

    def called(event: Event) -> Call:
        key = (event.graph, event.released)
        if key not in calls:
            k = event.graph
            calls[key] = call(record.graphs[k], record.costs[k], schedules[k], event.released)
        return calls[key]

    now, peak, at, name = record.base_bytes, record.base_bytes, 0, "before the first forward"
    seconds = 0.0
    starts = []
    for i, event in enumerate(record.events):
        starts.append(now)
        if event.kind == OUTSIDE:
            high, after = now + event.peak_bytes, now + event.delta_bytes
        elif event.kind == FORWARD:
            high, after = now + called(event).forward_peak_bytes, now + called(event).saved_bytes
            seconds += called(event).seconds
        else:
            high, after = now + called(event).backward_peak_bytes, now + called(event).backward_delta_bytes
        if high > peak:
            peak, at, name = high, i, event.name
            if event.kind != OUTSIDE:
                step = called(event).peak_steps[event.kind == BACKWARD]
                name = _step_name(record.graphs[event.graph], schedules[event.graph], step, event.kind)
        now = after
    return StepTimeline(peak, at, name, tuple(starts), seconds)


@dataclass(frozen=True, slots=True)
class Call:
    """What a graph's forward and backward do to the bytes allocated, under one schedule.

    Attributes:
        forward_peak_bytes: the most during the forward, less at its start.
        saved_bytes: allocated at the forward's end (saved values and outputs), less at its start.
        backward_peak_bytes: the most during the backward, less at its start.
        backward_delta_bytes: allocated at the backward's end, less at its start (negative: it frees).
        peak_steps: where the two peaks are, as indices of the whole schedule.
        seconds: of both.
    """

    forward_peak_bytes: int
    saved_bytes: int
    backward_peak_bytes: int
    backward_delta_bytes: int
    peak_steps: tuple[int, int]
    seconds: float


def call(graph: Graph, costs: Costs, schedule: Schedule, released: Sequence[int] = ()) -> Call:
    """Simulate ``schedule``; what is ``released`` in the backward is freed after its last reader there.

    Raises:
        ScheduleError: the schedule is not valid for the graph.
    """
    timeline = simulate(graph, costs, schedule)
    cut = len(schedule.forward)
    saved = timeline.after_bytes[cut - 1] if cut else 0
    forward, backward = timeline.during_bytes[:cut], list(timeline.during_bytes[cut:])
    freed = 0
    for t in released:
        readers = [
            i
            for i, step in enumerate(schedule.backward)
            if t in graph.operators[step.operator].implementations[step.implementation].inputs
        ]
        freed += graph.tensors[t].nbytes
        for i in range(readers[-1] + 1 if readers else 0, len(backward)):
            backward[i] -= graph.tensors[t].nbytes
    high = (max(forward, default=0), max(backward, default=0))
    steps = (
        forward.index(high[0]) if forward else -1,
        cut + backward.index(high[1]) if backward else -1,
    )
    end = timeline.after_bytes[-1] if timeline.after_bytes else 0
    return Call(high[0], saved, high[1] - saved, end - saved - freed, steps, timeline.seconds)


def _step_name(graph: Graph, schedule: Schedule, step: int, phase: str) -> str:
    steps = (*schedule.forward, *schedule.backward)
    op = graph.operators[steps[step].operator]
    return f"{graph.name} {op.name} ({op.target.removeprefix('aten.').partition('.')[0]}, in the {phase})"


@dataclass(frozen=True)
class RoundGraph:
    """The graphs of one round as a single graph, for the solvers.

    What the script does between the calls becomes operators that cost nothing and must run once.

    Attributes:
        graph: all forward calls, then all backward calls, with what lies between.
        costs: of ``graph``.
        members: for each operator of ``graph`` (index of the graph it comes from, its id there), or None.
    """

    graph: Graph
    costs: Costs
    members: tuple[tuple[int, int] | None, ...]

    def split(self, schedule: Schedule) -> dict[int, Schedule]:
        """The schedules of the single graphs."""
        forward: dict[int, list[Step]] = {}
        backward: dict[int, list[Step]] = {}
        for steps, into in ((schedule.forward, forward), (schedule.backward, backward)):
            for step in steps:
                member = self.members[step.operator]
                if member is not None:
                    into.setdefault(member[0], []).append(Step(member[1], step.implementation))
        return {k: Schedule(tuple(forward.get(k, ())), tuple(backward.get(k, ()))) for k in {*forward, *backward}}

    def join(self, schedules: Sequence[Schedule]) -> Schedule:
        """The schedule of the single graph that runs ``schedules`` one after the other."""
        place = {member: i for i, member in enumerate(self.members) if member is not None}
        passes = []
        for phase in (FORWARD, BACKWARD):
            steps: list[Step] = []
            done: set[int] = set()
            for op in self.graph.operators:
                member = self.members[op.id]
                if op.phase != phase:
                    continue
                if member is None:
                    steps.append(Step(op.id))
                elif member[0] not in done:
                    done.add(member[0])
                    own = getattr(schedules[member[0]], phase)
                    steps += [Step(place[member[0], s.operator], s.implementation) for s in own]
            if phase == BACKWARD:
                steps = without_idle_runs(self.graph, steps)
            passes.append(tuple(steps))
        return Schedule(*passes)


def outside_operator(
    operator: int, name: str, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Operator:
    """An operator that stands for what happens outside of a graph: it must run once."""
    ways = (Implementation("default", inputs),)
    return Operator(operator, name, OUTSIDE, phase, outputs, ways, replayable=False)


def gone_with_backward(graph: Graph, released: Collection[int]) -> set[int]:
    """Those of ``released`` that are outputs and may be written as tensors that are freed after their last reader.

    An output that another graph holds is there until the backward begins: it must not be freed before that and written
    again. So the operator that writes it may not run again, and must write nothing else that is read.
    """
    read = {t for op in graph.operators for way in op.implementations for t in way.inputs}
    outputs = {t for t in released if not graph.tensors[t].external}
    return {t for t in outputs if not read.intersection(graph.operators[graph.writer[t]].outputs) - {t}}


def without_idle_runs(graph: Graph, backward: Sequence[Step]) -> list[Step]:
    """``backward`` without second runs of what may not run again: outputs that are still there."""
    return [s for s in backward if s.operator >= graph.forward_count or graph.operators[s.operator].replayable]


def round_graph(record: StepRecord, bounds: tuple[int, int]) -> RoundGraph | None:
    """Join the graphs of the round ``record.events[bounds[0]:bounds[1]]``.

    Gives None when that cannot be done: a graph is called twice in the round, or a forward follows a backward.
    """
    events = record.events[slice(*bounds)]
    calls = [(e.kind, e.graph) for e in events if e.kind != OUTSIDE]
    if len(set(calls)) != len(calls) or [k for k, _ in calls] != sorted((k for k, _ in calls), reverse=True):
        return None
    return _Joiner(record).join(events)


class _Joiner:
    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.seconds: list[tuple[float, ...]] = []
        self.workspace: list[tuple[int, ...]] = []
        self.members: list[tuple[int, int] | None] = []
        self.tensor_of: dict[tuple[int, int], int] = {}
        self.held: list[int] = []  # tensors that the script holds, the latest last

    def join(self, events: Sequence[Event]) -> RoundGraph:
        phase = FORWARD
        for event in events:
            if event.kind == OUTSIDE:
                self._outside(event, phase)
            else:
                phase = event.kind
                self._call(event)
        for t in self.held:  # never freed within the round
            tensor = self.tensors[t]
            self.tensors[t] = Tensor(t, tensor.nbytes, tensor.external, True, tensor.name)
        graph = Graph(self.record.graphs[0].name, tuple(self.tensors), tuple(self.operators))
        costs = Costs(self.record.costs[0].device, tuple(self.seconds), tuple(self.workspace))
        return RoundGraph(graph, costs, tuple(self.members))

    def _call(self, event: Event) -> None:
        graph, costs = self.record.graphs[event.graph], self.record.costs[event.graph]
        self._release(event)
        self._let_go(event)
        if event.kind == FORWARD:
            for tensor in graph.tensors:
                self.tensor_of[event.graph, tensor.id] = len(self.tensors)
                self.tensors.append(Tensor(len(self.tensors), tensor.nbytes, tensor.external, tensor.kept, tensor.name))
        for op in graph.operators:
            if op.phase == event.kind:
                implementations = tuple(
                    dataclasses.replace(
                        i,
                        inputs=tuple(self.tensor_of[event.graph, t] for t in i.inputs),
                        in_place_of=None if i.in_place_of is None else self.tensor_of[event.graph, i.in_place_of],
                    )
                    for i in op.implementations
                )
                outputs = tuple(self.tensor_of[event.graph, t] for t in op.outputs)
                self.operators.append(
                    Operator(
                        len(self.operators),
                        op.name,
                        op.target,
                        op.phase,
                        outputs,
                        implementations,
                        op.replayable,
                        op.optional,
                        op.plain,
                        op.signature,
                    )
                )
                self.seconds.append(costs.seconds[op.id])
                self.workspace.append(costs.workspace_bytes[op.id])
                self.members.append((event.graph, op.id))

    def _release(self, event: Event) -> None:
        """What only the backward holds is, in the joined graph, what the script has given it: it dies after its last
        reader. Not so what a forward operator reads too, which may run again after that.
        """
        operators = self.record.graphs[event.graph].operators
        for t in event.released:
            if not self.record.graphs[event.graph].tensors[t].external:
                continue
            readers = {op.phase for op in operators for i in op.implementations if t in i.inputs}
            nbytes = self.record.graphs[event.graph].tensors[t].nbytes
            found = next((h for h in reversed(self.held) if self.tensors[h].nbytes >= nbytes), None)
            if readers == {BACKWARD} and found is not None:
                self.held.remove(found)
                self._split(found, nbytes)
                self.tensor_of[event.graph, t] = found

    def _let_go(self, event: Event) -> None:
        """The graph's outputs that are gone with this backward: alive until it begins, whatever it reads."""
        own = sorted(gone_with_backward(self.record.graphs[event.graph], event.released))
        outputs = tuple(self.tensor_of[event.graph, t] for t in own)
        for i, op in enumerate(self.operators):
            if not set(outputs).isdisjoint(op.outputs):
                self.operators[i] = dataclasses.replace(op, replayable=False)
        for t in outputs:
            self.tensors[t] = dataclasses.replace(self.tensors[t], kept=False)
        if outputs:
            self._pseudo(OUTSIDE, BACKWARD, outputs, (), 0)

    def _outside(self, event: Event, phase: str) -> None:
        """The script between two calls: allocates or frees ``delta_bytes``, and needs ``peak_bytes`` meanwhile."""
        written: tuple[int, ...] = ()
        if event.delta_bytes > 0:
            written = (self._new(event.delta_bytes),)
        freed = self._free(-event.delta_bytes) if event.delta_bytes < 0 else []
        workspace = max(0, event.peak_bytes - max(0, event.delta_bytes))
        self._pseudo(event.name or OUTSIDE, phase, tuple(freed), written, workspace)
        self.held += written

    def _pseudo(
        self, name: str, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...], workspace_bytes: int
    ) -> None:
        self.operators.append(outside_operator(len(self.operators), name, phase, inputs, outputs))
        self.seconds.append((0.0,))
        self.workspace.append((workspace_bytes,))
        self.members.append(None)

    def _new(self, nbytes: int) -> int:
        self.tensors.append(Tensor(len(self.tensors), nbytes, name=OUTSIDE))
        return len(self.tensors) - 1

    def _free(self, nbytes: int) -> list[int]:
        """Let go of ``nbytes`` of what the script holds, the latest first; what it does not hold is left alone."""
        freed = []
        while nbytes > 0 and self.held:
            t = self.held.pop()
            size = self.tensors[t].nbytes
            self._split(t, nbytes)
            nbytes -= min(size, nbytes)
            freed.append(t)
        return freed

    def _split(self, t: int, nbytes: int) -> None:
        """Let ``t`` be of ``nbytes`` at most; the rest of it stays held by the script."""
        size = self.tensors[t].nbytes
        if size <= nbytes:
            return
        rest = self._new(size - nbytes)
        self.tensors[t] = Tensor(t, nbytes, name=OUTSIDE)
        writer = next(op for op in self.operators if t in op.outputs)
        self.operators[writer.id] = dataclasses.replace(writer, outputs=(*writer.outputs, rest))
        self.held.append(rest)
