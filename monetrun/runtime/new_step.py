"""The training step of a graph that the record does not have: the same model at other shapes, or another model."""

from __future__ import annotations

import math
from collections import Counter
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
    place: int | None = None,
) -> tuple[Event, ...]:
    """The events of a step of this graph, with an estimate of what the script allocates before its backward.

    Scaled by the bytes of the graph's outputs from what ``record`` has of the same graph at other shapes, under
    ``schedules`` of its graphs: request by request where it has one call of the graph, and nothing else is called
    before its backward. Gradients are not scaled: of the ``gradients_bytes`` held now, as many are freed as in
    ``record``, where that has one call of the graph; none where fewer are held. Of the last step's outputs so many are
    there (``outputs_bytes``), and are dropped where it drops them. Of several recorded calls of the graph that with the
    number ``place`` counts (from 0; after the last, the last), or whichever has most.
    """
    graph = joint.graph
    outputs = {joint.storage[n] for n in joint.outputs if isinstance(n, torch.fx.Node) and n in joint.storage}
    now = sum(graph.tensors[t].nbytes for t in outputs if not graph.tensors[t].external)
    calls = [] if record is None else _calls_like(record, graph)
    if record is None or not calls:
        given = {joint.storage[n] for n in joint.tangents if n in joint.storage}  # what is kept for later has none
        loss = min(now, sum(graph.tensors[t].nbytes for t in given))
        return _in_between(_LOSS_HOLDS * loss, _LOSS_TAKES * loss)
    k, number = calls[0 if place is None else min(place, len(calls) - 1)]
    known = record.graphs[k]
    recorded = sum(t.nbytes for t in known.tensors if t.id in outputs and not t.external)
    growth = max(Fraction(1), Fraction(now, recorded)) if recorded else Fraction(1)
    if (stretch := _only_call(record, k)) is not None:
        released = (known.tensors[t] for t in stretch[-1].released)
        inputs = {t.nbytes: graph.tensors[t.id].nbytes for t in released if t.external}
        return _scaled(stretch, growth, inputs, gradients_bytes, outputs_bytes)
    held, peak, freed = _recorded_outside(record, schedules, k, None if place is None else number)
    freed = freed if freed <= gradients_bytes else 0
    return _in_between(math.ceil(held * growth), math.ceil(peak * growth), freed)


def _calls_like(record: StepRecord, graph: Graph) -> list[tuple[int, int]]:
    """The forwards of graphs of this structure, in order: each graph, and the number of its call."""
    like = {k for k, g in enumerate(record.graphs) if g.structural_fingerprint == graph.structural_fingerprint}
    counts: Counter[int] = Counter()
    found = []
    for event in record.events:
        if event.kind == FORWARD and event.graph in like:
            found.append((event.graph, counts[event.graph]))
            counts[event.graph] += 1
    return found


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


def _recorded_outside(
    record: StepRecord, schedules: Sequence[Schedule], k: int, place: int | None
) -> tuple[int, int, int]:
    """How much more is allocated under graph ``k``'s backward, and before it, than under its forward.

    In its call with the number ``place``, or at most. The last step's gradients that are freed meanwhile are counted
    apart, where the step has one call of the graph: the third number.
    """
    timeline = replay(record, schedules)
    saved = call_footprint(record.graphs[k], record.costs[k], schedules[k]).saved_bytes
    freed = calls = 0
    found: dict[int, tuple[int, int]] = {}  # of each call: held, and at most
    forwards: list[tuple[int, int]] = []  # calls without a backward yet: their numbers, and the events after them
    for i, event in enumerate(record.events):
        if event.graph != k:
            continue
        if event.kind == FORWARD:
            forwards.append((calls, i + 1))
            calls += 1
        elif forwards:
            (number, first), freed, peak = forwards.pop(), 0, 0
            before = timeline.start_bytes[first - 1] + saved
            for j in range(first, i):
                peak = max(peak, timeline.high_bytes[j] + freed - before)
                if record.events[j].name == LAST_GRADIENTS:
                    freed -= record.events[j].delta_bytes
            held = max(0, timeline.start_bytes[i] + freed - before)
            found[number] = held, max(held, peak)
    if place is not None and (known := min(place, max(found, default=0))) in found:
        found = {known: found[known]}
    held, peak = (max((one[j] for one in found.values()), default=0) for j in (0, 1))
    return held, peak, freed if calls == 1 else 0
