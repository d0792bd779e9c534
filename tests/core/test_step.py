"""Two graphs of which one gives the other its input: the step's replay, and the round as one graph."""

import dataclasses
import itertools

import pytest

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, Event, StepRecord, call, replay, round_graph
from monetrun.planning import planner
from monetrun.solve.cut import dropping
from support.step_records import chain_record

BATCH = 100


def output_of(graph):
    """The forward's output: the one tensor that a forward operator writes and that is kept."""
    (t,) = (t for op in graph.operators[: graph.forward_count] for t in op.outputs if graph.tensors[t].kept)
    return t


def tangent_of(graph):
    return next(t.id for t in graph.tensors if t.name == "tangent")


def in_a_row():
    """Graph 0's output is graph 1's input, and nobody else's: its own backward is the last that reads it."""
    one, two = (chain_record(BATCH, widths) for widths in ((40, 60), (30, 50, 20)))
    graphs = one.graphs + two.graphs
    events = (
        Event(FORWARD, 0),
        Event(OUTSIDE, -1, 8, 8),
        Event(FORWARD, 1),
        Event(OUTSIDE, -1, 20 * BATCH, 20 * BATCH, "loss"),
        Event(BACKWARD, 1, released=(tangent_of(graphs[1]), output_of(graphs[1]))),
        Event(OUTSIDE, -1, 60 * BATCH, 60 * BATCH, "what lies between"),
        Event(BACKWARD, 0, released=(tangent_of(graphs[0]), output_of(graphs[0]))),
        Event(OUTSIDE, -1, -8, 0),
    )
    return StepRecord(graphs, one.costs + two.costs, events, 1000, {}, "cpu", "2.15.0")


def frugal(graph):
    return without(graph, {t for op in graph.operators[: graph.forward_count] for t in op.outputs} - {output_of(graph)})


def without(graph, dropped):
    """The plain schedule with these tensors recomputed."""
    return dropping(graph, plain_schedule(graph), dropped)


def test_an_output_that_goes_with_the_backward_is_freed_after_its_last_reader_there():
    record = in_a_row()
    graph, costs = record.graphs[1], record.costs[1]
    schedule, output = plain_schedule(graph), output_of(graph)
    kept, gone = call(graph, costs, schedule), call(graph, costs, schedule, (output,))
    assert gone.saved_bytes == kept.saved_bytes
    assert gone.backward_delta_bytes == kept.backward_delta_bytes - graph.tensors[output].nbytes
    # the first ReLU's gradient reads it; the peak is after that
    assert gone.backward_peak_bytes == kept.backward_peak_bytes - graph.tensors[output].nbytes
    # where nothing reads it, it is free from the start
    mask_less = dataclasses.replace(
        graph,
        operators=tuple(
            dataclasses.replace(
                op,
                implementations=tuple(
                    dataclasses.replace(i, inputs=tuple(t for t in i.inputs if t != output)) for i in op.implementations
                ),
            )
            for op in graph.operators
        ),
    )
    assert call(mask_less, costs, schedule, (output,)).backward_peak_bytes == gone.backward_peak_bytes


@pytest.mark.parametrize("first", [plain_schedule, frugal])
@pytest.mark.parametrize("second", [plain_schedule, frugal])
def test_the_round_as_one_graph_allocates_what_the_step_does(first, second):
    record = in_a_row()
    schedules = [first(record.graphs[0]), second(record.graphs[1])]
    joined = round_graph(record, record.rounds[0])
    schedule = joined.join(schedules)
    timeline, peak = simulate(joined.graph, joined.costs, schedule), replay(record, schedules)
    assert timeline.peak_bytes == peak.peak_bytes - record.base_bytes
    assert timeline.seconds == peak.seconds
    assert joined.split(schedule) == dict(enumerate(schedules))


def test_an_output_that_goes_is_there_until_the_other_graph_has_read_it_for_the_last_time():
    record = in_a_row()
    joined = round_graph(record, record.rounds[0])
    last_of_two = max(i for i, member in enumerate(joined.members) if member and member[0] == 1)
    first_of_one = min(
        i for i, m in enumerate(joined.members) if m and m[0] == 0 and joined.graph.operators[i].phase == BACKWARD
    )
    relu = joined.members.index((0, record.graphs[0].writer[output_of(record.graphs[0])]))
    (output,) = joined.graph.operators[relu].outputs
    readers = [op.id for op in joined.graph.operators if output in op.inputs]
    assert any(last_of_two < i < first_of_one and joined.members[i] is None for i in readers)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_plan_of_both_is_no_dearer_than_what_any_choice_of_saved_tensors_gives(share):
    record = in_a_row()
    inner = [[t for op in g.operators[: g.forward_count] for t in op.outputs] for g in record.graphs]
    points = []
    for dropped in itertools.product(
        *(_subsets(set(i) - {output_of(g)}) for i, g in zip(inner, record.graphs, strict=True))
    ):
        timeline = replay(record, [without(g, d) for g, d in zip(record.graphs, dropped, strict=True)])
        points.append((timeline.peak_bytes, timeline.seconds))
    least, most = min(p for p, _ in points), max(p for p, _ in points)
    budget_bytes = int(least + share * (most - least))
    plan = planner.plan_step(record, budget_bytes, options=Options(seconds=2.0, implementations=()))
    assert plan.planned_peak_bytes <= budget_bytes
    seconds = (1 + plan.overhead) * planner.baseline(record).plain.seconds
    assert seconds <= 1.000001 * min(s for p, s in points if p <= budget_bytes)


def _subsets(tensors):
    return itertools.chain.from_iterable(itertools.combinations(sorted(tensors), n) for n in range(len(tensors) + 1))


def test_steps_of_a_schedule_are_renumbered():
    record = in_a_row()
    joined = round_graph(record, record.rounds[0])
    schedules = [plain_schedule(g) for g in record.graphs]
    assert joined.join(schedules) == plain_schedule(joined.graph)
    own = joined.split(Schedule((Step(0),), ()))
    assert own == {0: Schedule((Step(0),), ())}
