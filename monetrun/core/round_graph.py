"""The graphs of one round of a training step, joined into a single graph for the solvers.

A round goes from where nothing is saved for a backward pass to where nothing is saved again. Its joined graph has all
forward calls, then all backward calls. What the script does between the calls becomes operators that cost nothing and
must run once; the tensors they write stand for the bytes that the script holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from monetrun.core.freed import given_with, gradients_among
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.plan import Schedule, Step
from monetrun.core.step import OUTSIDE, Event, StepRecord


@dataclass(frozen=True)
class RoundGraph:
    """The graphs of one round as a single graph.

    Attributes:
        graph: all forward calls, then all backward calls, with what lies between.
        costs: of ``graph``.
        members: for each operator of ``graph`` (index of the graph it comes from, its id there), or None.
    """

    graph: Graph
    costs: Costs
    members: tuple[tuple[int, int] | None, ...]

    def costs_of(self, shares: Mapping[int, float]) -> Costs:
        """``costs``, in which those of each graph count so many times, by its index."""
        if set(shares.values()) == {1.0}:
            return self.costs
        seconds = (
            row if member is None else tuple(shares[member[0]] * each for each in row)
            for row, member in zip(self.costs.seconds, self.members, strict=True)
        )
        return dataclasses.replace(self.costs, seconds=tuple(seconds))

    def split(self, schedule: Schedule) -> dict[int, Schedule]:
        """The schedules of the single graphs, by graph index."""
        forward: dict[int, list[Step]] = {}
        backward: dict[int, list[Step]] = {}
        for steps, into in ((schedule.forward, forward), (schedule.backward, backward)):
            for step in steps:
                member = self.members[step.operator]
                if member is not None:
                    into.setdefault(member[0], []).append(Step(member[1], step.implementation))
        return {k: Schedule(tuple(forward.get(k, ())), tuple(backward.get(k, ()))) for k in {*forward, *backward}}

    def join(self, schedules: Sequence[Schedule]) -> Schedule:
        """The schedule of the joined graph that runs ``schedules`` one after the other."""
        joined_id = {member: i for i, member in enumerate(self.members) if member is not None}
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
                    steps += [Step(joined_id[member[0], s.operator], s.implementation) for s in own]
            if phase == BACKWARD:
                steps = without_unreplayable_reruns(self.graph, steps)
            passes.append(tuple(steps))
        forward, backward = passes
        return Schedule(forward, backward)


def join_round(record: StepRecord, bounds: tuple[int, int]) -> RoundGraph | None:
    """Join the graphs of the round ``record.events[bounds[0]:bounds[1]]``.

    Returns None where that is impossible: a graph is called twice in the round, or a forward follows a backward.
    """
    events = record.events[slice(*bounds)]
    calls = [(e.kind, e.graph) for e in events if e.kind != OUTSIDE]
    if len(set(calls)) != len(calls) or [k for k, _ in calls] != sorted((k for k, _ in calls), reverse=True):
        return None
    return _RoundBuilder(record).build(events)


def outside_operator(
    operator: int, name: str, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Operator:
    """An operator for what happens outside of a captured graph: it must run once."""
    implementations = (Implementation("default", inputs),)
    return Operator(operator, name, OUTSIDE, phase, outputs, implementations, replayable=False)


def outputs_freed_in_backward(graph: Graph, released: Sequence[int]) -> set[int]:
    """The outputs among ``released`` that can be written as tensors freed after their last reader.

    Such an output is held by another graph until the backward begins: it must not be freed before and written again.
    So the operator that writes it must not run again, and none of its other outputs may have a reader.
    """
    read = {t for op in graph.operators for impl in op.implementations for t in impl.inputs}
    outputs = {t for t in released if not graph.tensors[t].external} - {*gradients_among(graph, released)}
    return {t for t in outputs if not read.intersection(graph.operators[graph.writer[t]].outputs) - {t}}


def waiting_gradients(graph: Graph, released: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The gradients among ``released`` that wait for their turn, by the operator after which they are taken.

    Made inputs of that operator, they are freed then.
    """
    last: dict[int, int] = {}  # operator that writes or reads it
    given: dict[int, int] = {}  # the same, or that has the rest of a call of eager's
    for op in graph.operators[graph.forward_count :]:
        used = (*op.outputs, *(t for i in op.implementations for t in i.inputs))
        last.update(dict.fromkeys(used, op.id))
        given.update(dict.fromkeys((*used, *given_with(graph, op)), op.id))
    found: dict[int, tuple[int, ...]] = {}
    turn = -1
    for t in gradients_among(graph, released):
        turn = max(turn, given[t])
        if last[t] < turn:
            found[turn] = (*found.get(turn, ()), t)
    return found


def without_unreplayable_reruns(graph: Graph, backward: Sequence[Step]) -> list[Step]:
    """``backward`` without further runs of forward operators that are not replayable: their outputs are still there."""
    return [s for s in backward if s.operator >= graph.forward_count or graph.operators[s.operator].replayable]


class _RoundBuilder:
    """Builds a ``RoundGraph`` from a round's events, in order."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self.tensors: list[Tensor] = []
        self.operators: list[Operator] = []
        self.seconds: list[tuple[float, ...]] = []
        self.workspace: list[tuple[int, ...]] = []
        self.members: list[tuple[int, int] | None] = []
        self.joined_tensor: dict[tuple[int, int], int] = {}  # (graph index, tensor id) -> tensor id in the joined graph
        self.script_tensors: list[int] = []  # what the script holds, the latest last
        self.dropped: set[tuple[int, int]] = set()  # outputs (graph index, tensor id) that the script holds no more

    def build(self, events: Sequence[Event]) -> RoundGraph:
        phase = FORWARD
        for event in events:
            if event.kind == OUTSIDE:
                self._add_script(event, phase)
            else:
                phase = event.kind
                self._add_call(event)
        called = {(e.kind, e.graph) for e in events}
        for k in sorted(k for kind, k in called if kind == FORWARD and (BACKWARD, k) not in called):
            self._add_backward_without_call(k)
        for t in self.script_tensors:  # never freed within the round
            self.tensors[t] = dataclasses.replace(self.tensors[t], kept=True)
        graph = Graph(self.record.graphs[0].name, tuple(self.tensors), tuple(self.operators))
        costs = Costs(self.record.costs[0].device, tuple(self.seconds), tuple(self.workspace))
        return RoundGraph(graph, costs, tuple(self.members))

    def _add_backward_without_call(self, k: int) -> None:
        """Append the backward of a graph whose outputs the loss does not depend on.

        Schedules have it all the same. What it would read is saved until the script drops the outputs. It does not run,
        and takes no memory. Outputs that it would not read are freed where the script drops them.
        """
        graph, costs = self.record.graphs[k], self.record.costs[k]
        self._let_free(outputs_freed_in_backward(graph, [t for dropped, t in self.dropped if dropped == k]), k)
        backward = graph.operators[graph.forward_count :]
        own = {t for op in backward for t in op.outputs}
        for t in own:
            joined = self.joined_tensor[k, t]
            self.tensors[joined] = dataclasses.replace(self.tensors[joined], nbytes=0)
        forward = frozenset(range(len(graph.tensors))) - own  # of another size than what would overwrite them
        for op in backward:
            self.operators.append(self._renumbered(k, op, forward, ()))
            self.seconds.append(costs.seconds[op.id])
            self.workspace.append((0,) * len(op.implementations))
            self.members.append((k, op.id))

    def _add_call(self, event: Event) -> None:
        """Append the operators of a forward or backward call."""
        graph, costs = self.record.graphs[event.graph], self.record.costs[event.graph]
        self._release_script_tensors(event)
        self._release_outputs(event)
        gradients = gradients_among(graph, event.released)
        waiting = waiting_gradients(graph, event.released)
        for t in gradients:
            joined = self.joined_tensor[event.graph, t]
            self.tensors[joined] = dataclasses.replace(self.tensors[joined], kept=False)
        if event.kind == FORWARD:
            for tensor in graph.tensors:
                self.joined_tensor[event.graph, tensor.id] = len(self.tensors)
                self.tensors.append(dataclasses.replace(tensor, id=len(self.tensors)))
        for op in graph.operators:
            if op.phase == event.kind:
                self.operators.append(self._renumbered(event.graph, op, gradients, waiting.get(op.id, ())))
                self.seconds.append(costs.seconds[op.id])
                self.workspace.append(costs.workspace_bytes[op.id])
                self.members.append((event.graph, op.id))

    def _renumbered(self, k: int, op: Operator, taken: Collection[int], waiting: tuple[int, ...]) -> Operator:
        """``op`` of graph ``k`` with the ids of the joined graph.

        It must not write over gradients that are ``taken``, and frees those that are ``waiting`` for it.
        """
        implementations = tuple(
            dataclasses.replace(
                i,
                inputs=tuple(self.joined_tensor[k, t] for t in dict.fromkeys((*i.inputs, *waiting))),
                in_place_of=None if i.in_place_of is None else self.joined_tensor[k, i.in_place_of],
                usable=i.usable and i.in_place_of not in taken,
            )
            for i in op.implementations
        )
        outputs = tuple(self.joined_tensor[k, t] for t in op.outputs)
        number = len(self.operators)  # regions are numbered within one graph
        return dataclasses.replace(op, id=number, outputs=outputs, implementations=implementations, checkpoint=None)

    def _release_script_tensors(self, event: Event) -> None:
        """Make each released external tensor one that the script has written, so that its last reader frees it.

        Not one that a forward operator reads too: that may run again after the last backward reader.
        """
        graph = self.record.graphs[event.graph]
        for t in event.released:
            if not graph.tensors[t].external:
                continue
            readers = {op.phase for op in graph.operators for i in op.implementations if t in i.inputs}
            nbytes = graph.tensors[t].nbytes
            found = next((h for h in reversed(self.script_tensors) if self.tensors[h].nbytes >= nbytes), None)
            if readers == {BACKWARD} and found is not None:
                self.script_tensors.remove(found)
                self._shrink(found, nbytes)
                self.joined_tensor[event.graph, t] = found

    def _release_outputs(self, event: Event) -> None:
        """Let the graph's released outputs be freed in this backward.

        They live until it begins whatever it reads, but for those that the script has dropped before.
        """
        own = sorted(outputs_freed_in_backward(self.record.graphs[event.graph], event.released))
        self._let_free(own, event.graph)
        held = tuple(self.joined_tensor[event.graph, t] for t in own if (event.graph, t) not in self.dropped)
        if held:
            self._add_outside_operator(OUTSIDE, BACKWARD, held, (), 0)

    def _let_free(self, own: Collection[int], k: int) -> None:
        """Let these outputs of graph ``k`` be freed after their last reader, and written once only."""
        outputs = {self.joined_tensor[k, t] for t in own}
        for i, op in enumerate(self.operators):
            if not outputs.isdisjoint(op.outputs):
                self.operators[i] = dataclasses.replace(op, replayable=False)
        for t in outputs:
            self.tensors[t] = dataclasses.replace(self.tensors[t], kept=False)

    def _add_script(self, event: Event, phase: str) -> None:
        """Append the script's work between two calls: it allocates or frees ``delta_bytes``, ``peak_bytes`` at most."""
        written: tuple[int, ...] = ()
        if event.delta_bytes > 0:
            written = (self._new_script_tensor(event.delta_bytes),)
        freed = self._free(-event.delta_bytes) if event.delta_bytes < 0 else []
        self.dropped.update(event.dropped)
        outputs = [(k, t) for k, t in event.dropped if not self.record.graphs[k].tensors[t].external]  # inputs stay
        freed += [self.joined_tensor[output] for output in outputs if output in self.joined_tensor]
        saved = sum(self.record.graphs[k].tensors[t].nbytes for k, t in outputs if self._may_be_saved(k, t))
        workspace = max(0, event.peak_bytes + saved - max(0, event.delta_bytes))
        self._add_outside_operator(event.name or OUTSIDE, phase, tuple(freed), written, workspace)
        self.script_tensors += written

    def _may_be_saved(self, k: int, t: int) -> bool:
        """Whether the backward of graph ``k`` reads its output ``t`` under some schedule."""
        operators = (op for op in self.record.graphs[k].operators if op.phase == BACKWARD)
        return any(t in implementation.inputs for op in operators for implementation in op.implementations)

    def _add_outside_operator(
        self, name: str, phase: str, inputs: tuple[int, ...], outputs: tuple[int, ...], workspace_bytes: int
    ) -> None:
        self.operators.append(outside_operator(len(self.operators), name, phase, inputs, outputs))
        self.seconds.append((0.0,))
        self.workspace.append((workspace_bytes,))
        self.members.append(None)

    def _new_script_tensor(self, nbytes: int) -> int:
        self.tensors.append(Tensor(len(self.tensors), nbytes, name=OUTSIDE))
        return len(self.tensors) - 1

    def _free(self, nbytes: int) -> list[int]:
        """The latest script tensors that make up ``nbytes``, no longer held; fewer where the script holds less."""
        freed = []
        while nbytes > 0 and self.script_tensors:
            t = self.script_tensors.pop()
            size = self.tensors[t].nbytes
            self._shrink(t, nbytes)
            nbytes -= min(size, nbytes)
            freed.append(t)
        return freed

    def _shrink(self, t: int, nbytes: int) -> None:
        """Shrink script tensor ``t`` to at most ``nbytes``; the rest becomes a script tensor of its own."""
        size = self.tensors[t].nbytes
        if size <= nbytes:
            return
        rest = self._new_script_tensor(size - nbytes)
        self.tensors[t] = Tensor(t, nbytes, name=OUTSIDE)
        writer = next(op for op in self.operators if t in op.outputs)
        self.operators[writer.id] = dataclasses.replace(writer, outputs=(*writer.outputs, rest))
        self.script_tensors.append(rest)
