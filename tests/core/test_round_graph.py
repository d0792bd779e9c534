"""Two graphs, one of which computes the other's input, joined into one graph."""

import dataclasses

import pytest

from monetrun.core.call_footprint import call_footprint
from monetrun.core.freed import freed_after
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.round_graph import join_round
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, Event, replay
from monetrun.planning import planner
from monetrun.planning.round_bounds import calls_in_step
from monetrun.solve.cut import dropping
from support.step_records import WEIGHT_BYTES, chain_record, chained_graphs_record, output_of


def frugal(graph):
    """The schedule that recomputes all but the output."""
    inner = {t for op in graph.operators[: graph.forward_count] for t in op.outputs} - {output_of(graph)}
    return dropping(graph, plain_schedule(graph), inner)


@pytest.mark.parametrize("first", [plain_schedule, frugal])
@pytest.mark.parametrize("second", [plain_schedule, frugal])
def test_the_joined_graph_allocates_what_the_step_does(first, second):
    record = chained_graphs_record()
    schedules = [first(record.graphs[0]), second(record.graphs[1])]
    joined = join_round(record, record.rounds[0])
    schedule = joined.join(schedules)
    timeline, peak = simulate(joined.graph, joined.costs, schedule), replay(record, schedules)
    assert timeline.peak_bytes == peak.peak_bytes - record.base_bytes
    assert timeline.seconds == peak.seconds
    assert joined.split(schedule) == dict(enumerate(schedules))


def test_a_released_output_is_alive_until_the_other_graph_has_read_it_for_the_last_time():
    record = chained_graphs_record()
    joined = join_round(record, record.rounds[0])
    last_of_two = max(i for i, member in enumerate(joined.members) if member and member[0] == 1)
    first_of_one = min(
        i for i, m in enumerate(joined.members) if m and m[0] == 0 and joined.graph.operators[i].phase == BACKWARD
    )
    relu = joined.members.index((0, record.graphs[0].writer[output_of(record.graphs[0])]))
    (output,) = joined.graph.operators[relu].outputs
    readers = [op.id for op in joined.graph.operators if output in op.inputs]
    assert any(last_of_two < i < first_of_one and joined.members[i] is None for i in readers)


def test_steps_of_a_schedule_are_renumbered():
    record = chained_graphs_record()
    joined = join_round(record, record.rounds[0])
    schedules = [plain_schedule(g) for g in record.graphs]
    assert joined.join(schedules) == plain_schedule(joined.graph)
    own = joined.split(Schedule((Step(0),), ()))
    assert own == {0: Schedule((Step(0),), ())}


def with_one_call(graph, gradient):
    """``graph``, in which eager computes this gradient and what comes next in one call."""
    writer = graph.writer[gradient]
    operators = [dataclasses.replace(op, one_call_with_next=op.id == writer) for op in graph.operators]
    return dataclasses.replace(graph, operators=tuple(operators))


@pytest.mark.parametrize("one_call", [False, True], ids=["calls of their own", "one call"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (1, 0, 2, 5, 4, 3)], ids=["as computed", "some wait"])
def test_gradients_that_are_taken_in_turn_are_freed_in_the_joined_graph_as_in_the_step(order, one_call):
    record = chain_record(3)
    (graph,) = record.graphs
    gradients = [t.id for t in graph.tensors if t.kept and graph.operators[graph.writer[t.id]].phase == BACKWARD]
    if one_call:
        graph = with_one_call(graph, gradients[0])
        record = dataclasses.replace(record, graphs=(graph,))
    forward, backward = record.events[0], next(e for e in record.events if e.kind == BACKWARD)
    taken = dataclasses.replace(backward, released=tuple(gradients[i] for i in order))
    record = dataclasses.replace(record, events=tuple(taken if e is backward else e for e in record.events))
    assert forward.kind == FORWARD
    assert len(gradients) == 6
    joined = join_round(record, record.rounds[0])
    for own in (plain_schedule(graph), frugal(graph)):
        profile = simulate(joined.graph, joined.costs, joined.join([own]))
        assert record.base_bytes + profile.peak_bytes == replay(record, [own]).peak_bytes
        footprint = call_footprint(graph, record.costs[0], own, taken.released)
        held = call_footprint(graph, record.costs[0], own)
        assert held.backward_delta_bytes - footprint.backward_delta_bytes == 6 * WEIGHT_BYTES
        assert footprint.backward_peak_bytes < held.backward_peak_bytes
    # one that waits is held until after the step before it in the order
    last = freed_after(graph, plain_schedule(graph), taken.released)
    turns = [last[t] for t in taken.released]
    assert turns == sorted(turns)
    if one_call:
        backward = plain_schedule(graph).backward
        assert backward[last[gradients[0]]].operator >= graph.writer[gradients[0]] + 1


def with_an_output_that_no_loss_depends_on(record):
    """The record, with a third graph whose forward runs after the others' and whose backward never does."""
    other = chain_record(100, (10, 20))
    unused = Event(FORWARD, 2)
    last = max(i for i, e in enumerate(record.events) if e.kind == FORWARD) + 1
    events = (*record.events[:last], unused, *record.events[last:])
    return dataclasses.replace(
        record, graphs=record.graphs + other.graphs, costs=record.costs + other.costs, events=events
    )


@pytest.mark.parametrize("own", [plain_schedule, frugal])
def test_a_graph_without_a_backward_in_the_step_has_all_of_its_schedule_in_the_joined_graph(own):
    record = with_an_output_that_no_loss_depends_on(chained_graphs_record())
    (bounds,) = record.rounds
    joined = join_round(record, bounds)
    schedules = [own(graph) for graph in record.graphs]
    schedule = joined.join(schedules)
    assert joined.split(schedule) == dict(enumerate(schedules))
    # what its forward saves is held to the end, and its backward takes nothing
    timeline, step = simulate(joined.graph, joined.costs, schedule), replay(record, schedules)
    assert record.base_bytes + timeline.peak_bytes == step.peak_bytes
    assert timeline.seconds == step.seconds


@pytest.mark.parametrize("own", [plain_schedule, frugal])
def test_outputs_that_no_loss_depends_on_are_freed_in_the_joined_graph_where_the_script_drops_them(own):
    record = with_an_output_that_no_loss_depends_on(chained_graphs_record())
    output = output_of(record.graphs[2])
    unread = tuple(
        dataclasses.replace(
            op,
            implementations=tuple(
                dataclasses.replace(i, inputs=tuple(t for t in i.inputs if t != output)) for i in op.implementations
            ),
        )
        for op in record.graphs[2].operators
    )
    graphs = (*record.graphs[:2], dataclasses.replace(record.graphs[2], operators=unread))
    forward = next(i for i, e in enumerate(record.events) if (e.kind, e.graph) == (FORWARD, 2))
    drop = Event(OUTSIDE, dropped=((2, output),))
    events = (*record.events[: forward + 1], drop, *record.events[forward + 1 :])
    dropping = dataclasses.replace(record, graphs=graphs, events=events)
    schedules = [own(graph) for graph in graphs]
    (bounds,) = dropping.rounds
    joined = join_round(dropping, bounds)
    timeline, step = simulate(joined.graph, joined.costs, joined.join(schedules)), replay(dropping, schedules)
    assert dropping.base_bytes + timeline.peak_bytes == step.peak_bytes
    held = replay(dataclasses.replace(dropping, events=record.events), schedules).peak_bytes
    assert step.peak_bytes == held - graphs[2].tensors[output].nbytes


def test_a_step_with_a_graph_without_a_backward_is_planned():
    record = with_an_output_that_no_loss_depends_on(chained_graphs_record())
    base = planner.baseline(record)
    budget_bytes = (base.frugal.peak_bytes + base.plain.peak_bytes) // 2
    plan = planner.plan_step(record, budget_bytes, options=Options(seconds=2.0))
    schedules = [p.schedule_for(g) for p, g in zip(plan.graphs, record.graphs, strict=True)]
    assert replay(record, schedules).peak_bytes == plan.planned_peak_bytes <= budget_bytes
    assert plan.planned_peak_bytes < base.plain.peak_bytes


def test_each_of_several_forwards_and_backwards_is_a_round_where_one_graph_has_no_backward():
    record = with_an_output_that_no_loss_depends_on(chained_graphs_record())
    twice = dataclasses.replace(record, events=2 * record.events)
    (bounds,) = record.rounds
    assert twice.rounds == (bounds, (len(record.events), len(record.events) + bounds[1]))


def test_costs_of_graphs_that_are_called_differently_often_count_as_often_as_they_are_called():
    record = chained_graphs_record()
    joined = join_round(record, record.rounds[0])
    assert calls_in_step(record, record.rounds[0]) == {0: 1, 1: 1}
    assert joined.costs_of({0: 1.0, 1: 1.0}) is joined.costs
    schedules = [plain_schedule(g) for g in record.graphs]
    own = [simulate(g, c, s).seconds for g, c, s in zip(record.graphs, record.costs, schedules, strict=True)]
    seconds = simulate(joined.graph, joined.costs_of({0: 1.0, 1: 3.0}), joined.join(schedules)).seconds
    assert seconds == pytest.approx(own[0] + 3 * own[1])
