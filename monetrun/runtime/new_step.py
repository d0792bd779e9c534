"""The training step of a graph that the record does not have: the same model at other shapes, or another model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch

from monetrun.capture.joint import JointGraph
from monetrun.core.call_footprint import call_footprint
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph
from monetrun.core.last_gradients import are_freed, are_there, last_gradients_bytes
from monetrun.core.last_outputs import last_outputs_bytes
from monetrun.core.plan import Schedule
from monetrun.core.step import LAST_GRADIENTS, LAST_OUTPUTS, OUTSIDE, Event, StepRecord, replay

# What a loss allocates between forward and backward, as a multiple of the model's outputs, where no step was recorded:
# log-probabilities, their gradient, and the logits' gradient are held; a square's backward takes four for a moment.
_LOSS_HOLDS, _LOSS_TAKES = 3, 4
_LAST_STEPS = (LAST_GRADIENTS, LAST_OUTPUTS)


def step_of(graph: Graph, costs: Costs, held_bytes: int, events: tuple[Event, ...], exact: bool) -> StepRecord:
    """A training step of one graph.

    Args:
        graph: without implementations that must not run.
        costs: of it.
        held_bytes: allocated when its forward begins.
        events: see ``events_of``.
        exact: whether bytes are counted by the allocator.
    """
    step = StepRecord((graph,), (costs,), events, held_bytes, {}, costs.device, torch.__version__, exact)
    return replace(step, base_bytes=held_bytes - last_gradients_bytes(step) - last_outputs_bytes(step))


def events_of(
    joint: JointGraph,
    record: StepRecord | None,
    schedules: Sequence[Schedule],
    gradients_bytes: int = 0,
    outputs_bytes: int = 0,
) -> tuple[Event, ...]:
    """The events of a step of this graph, with an estimate of what the script allocates before its backward.

    Scaled by the bytes of the graph's outputs from what ``record`` has of the same graph at other shapes, under
    ``schedules`` of its graphs: request by request where it has one call of the graph, and nothing else is called
    before its backward. Gradients are not scaled: of the ``gradients_bytes`` held now, as many are freed as in
    ``record``, where that has one call of the graph; none where fewer are held. Of the last step's outputs so many are
    there (``outputs_bytes``), and are dropped where it drops them.
    """
    graph = joint.graph
    outputs = {joint.storage[n] for n in joint.outputs if isinstance(n, torch.fx.Node) and n in joint.storage}
    now = sum(graph.tensors[t].nbytes for t in outputs if not graph.tensors[t].external)
    for k, known in enumerate(record.graphs if record is not None else ()):
        if record is not None and known.structural_fingerprint == graph.structural_fingerprint:
            recorded = sum(t.nbytes for t in known.tensors if t.id in outputs and not t.external)
            growth = max(Fraction(1), Fraction(now, recorded)) if recorded else Fraction(1)
            if (stretch := _only_call(record, k)) is not None:
                released = (known.tensors[t] for t in stretch[-1].released)
                inputs = {t.nbytes: graph.tensors[t.id].nbytes for t in released if t.external}
                return _scaled(stretch, growth, inputs, gradients_bytes, outputs_bytes)
            held, peak, freed = _recorded_outside(record, schedules, k)
            freed = freed if freed <= gradients_bytes else 0
            return _in_between(math.ceil(held * growth), math.ceil(peak * growth), freed)
    return _in_between(_LOSS_HOLDS * now, _LOSS_TAKES * now)


def with_less_outside(step: StepRecord, held: float, taken: float) -> StepRecord:
    """``step`` where the script holds, and takes, these shares of what it was estimated to outside the graph.

    The backward frees nothing of it.
    """

    def less(event: Event) -> Event:
        if event.name in _LAST_STEPS:
            return event
        delta, peak = int(event.delta_bytes * held), int(event.peak_bytes * taken)
        return replace(event, delta_bytes=delta, peak_bytes=peak, released=())

    return replace(step, events=tuple(map(less, step.events)))


def _in_between(held_bytes: int, peak_bytes: int, gradients_bytes: int = 0) -> tuple[Event, ...]:
    """The events of a step between whose forward and backward the script allocates this, and holds a part of it.

    ``gradients_bytes``: of the last step's gradients, which it frees then.
    """
    return (
        *([are_there(gradients_bytes)] if gradients_bytes else []),
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, held_bytes, peak_bytes),
        *([are_freed(gradients_bytes)] if gradients_bytes else []),
        Event(BACKWARD, 0),
        Event(OUTSIDE, -1, -held_bytes, 0),
    )


def _only_call(record: StepRecord, k: int) -> Sequence[Event] | None:
    """The events from the only forward of graph ``k`` to its backward; None where that is not all that is called.

    Of the requests of events before them nothing is freed among them, nor are outputs of other graphs. Gradients that
    the step adds to others stay.
    """
    calls = [i for i, event in enumerate(record.events) if event.graph == k]
    if [record.events[i].kind for i in calls] != [FORWARD, BACKWARD]:
        return None
    first, last = calls
    stretch = record.events[first : last + 1]
    if any(e.kind != OUTSIDE or e.action is not None or e.freed for e in stretch[1:-1]):
        return None
    graph = record.graphs[k]
    gradients = {t for op in graph.operators if op.phase == BACKWARD for t in op.outputs}
    begun = sum(n > 0 for event in record.events[:first] for n in event.requests)
    events = []
    for event in stretch:
        if any(-begun <= n < 0 for n in event.requests) or any(graph != k for graph, _ in event.dropped):
            return None
        event = replace(
            event,
            graph=-1 if event.kind == OUTSIDE else 0,
            released=tuple(t for t in event.released if t not in gradients),
            requests=tuple(n if n > 0 else n + begun for n in event.requests),
            dropped=tuple((0, t) for _, t in event.dropped),
            read_as=(),
            batch_freed=(),
        )
        events.append(event)
    return events


def _scaled(
    stretch: Sequence[Event], growth: Fraction, inputs: Mapping[int, int], gradients_bytes: int, outputs_bytes: int
) -> tuple[Event, ...]:
    """The events of a step with this stretch, whose script allocates ``growth`` times as much in it.

    Args:
        stretch: from its forward to its backward.
        growth: at least 1.
        inputs: of what the backward is given and releases: bytes in the step, by those in the stretch.
        gradients_bytes: of the last step's gradients, there now.
        outputs_bytes: of the last step's outputs, there now.
    """

    def grown(nbytes: int) -> int:
        return math.ceil(nbytes * growth) if nbytes > 0 else -math.ceil(-nbytes * growth)

    def changed(event: Event) -> Event:
        return replace(
            event,
            delta_bytes=grown(event.delta_bytes),
            peak_bytes=grown(event.peak_bytes),
            elsewhere_bytes=grown(event.elsewhere_bytes),
            requests=tuple((inputs.get(n) or grown(n)) if n > 0 else n for n in event.requests),
        )

    gradients = -sum(e.delta_bytes for e in stretch if e.name == LAST_GRADIENTS)
    gradients = gradients if gradients <= gradients_bytes else 0
    outputs, held, events = 0, 0, []
    for event in stretch:
        if event.name == LAST_OUTPUTS:
            dropped = min(-event.delta_bytes, outputs_bytes - outputs)
            outputs += dropped
            events += [replace(event, delta_bytes=-dropped)] if dropped else []
        elif event.name == LAST_GRADIENTS:
            events += [event] if gradients else []
        else:
            events.append(changed(event))
            held += events[-1].delta_bytes
    before = [are_there(gradients)] if gradients else []
    before += [Event(OUTSIDE, -1, outputs, outputs, LAST_OUTPUTS)] if outputs else []
    return (*before, *events, Event(OUTSIDE, -1, -held, 0, freed=()))


def _recorded_outside(record: StepRecord, schedules: Sequence[Schedule], k: int) -> tuple[int, int, int]:
    """How much more is allocated under graph ``k``'s backward, and before it, than under its forward, at most.

    The last step's gradients that are freed meanwhile are counted apart, where the step has one call of the graph:
    the third number.
    """
    timeline = replay(record, schedules)
    saved = call_footprint(record.graphs[k], record.costs[k], schedules[k]).saved_bytes
    held = peak = freed = calls = 0
    forwards: list[int] = []  # calls without a backward yet: the events after them
    for i, event in enumerate(record.events):
        if event.graph != k:
            continue
        if event.kind == FORWARD:
            forwards.append(i + 1)
            calls += 1
        elif forwards:
            first, freed = forwards.pop(), 0
            before = timeline.start_bytes[first - 1] + saved
            for j in range(first, i):
                peak = max(peak, timeline.high_bytes[j] + freed - before)
                if record.events[j].name == LAST_GRADIENTS:
                    freed -= record.events[j].delta_bytes
            held = max(held, timeline.start_bytes[i] + freed - before)
    return held, max(held, peak), freed if calls == 1 else 0
