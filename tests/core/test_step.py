"""A step of two graphs, one of which computes the other's input: what its calls allocate, and its plan."""

import dataclasses
import itertools

import pytest

from monetrun.core.call_footprint import call_footprint
from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.step import OUTSIDE, Event, events_under, replay
from monetrun.planning import planner
from monetrun.solve.cut import dropping
from support.step_records import chain_record, chained_graphs_record, output_of


def without(graph, dropped):
    """The plain schedule with these tensors recomputed."""
    return dropping(graph, plain_schedule(graph), dropped)


def test_an_output_that_the_backward_releases_is_freed_after_its_last_reader_there():
    record = chained_graphs_record()
    graph, costs = record.graphs[1], record.costs[1]
    schedule, output = plain_schedule(graph), output_of(graph)
    kept, freed = call_footprint(graph, costs, schedule), call_footprint(graph, costs, schedule, (output,))
    assert freed.saved_bytes == kept.saved_bytes
    assert freed.backward_delta_bytes == kept.backward_delta_bytes - graph.tensors[output].nbytes
    # the first ReLU's gradient reads it; the peak is after that
    assert freed.backward_peak_bytes == kept.backward_peak_bytes - graph.tensors[output].nbytes
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
    assert call_footprint(mask_less, costs, schedule, (output,)).backward_peak_bytes == freed.backward_peak_bytes


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_plan_of_both_graphs_costs_no_more_than_any_choice_of_saved_tensors(share):
    record = chained_graphs_record()
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


def test_what_is_an_output_of_one_call_and_an_input_of_another_is_freed_where_neither_backward_reads_it():
    record = chain_record(4)
    (graph,) = record.graphs
    schedule = plain_schedule(graph)
    read = {t for s in schedule.backward for t in graph.operators[s.operator].implementations[s.implementation].inputs}
    saved = min(read)
    other = next(t.id for t in graph.tensors if t.id not in read)

    def freed(dropped, read_as):
        event = Event(OUTSIDE, -1, 0, 0, dropped=(dropped,), read_as=read_as)
        events = (Event(FORWARD, 0), event, Event(BACKWARD, 0))
        return events_under(dataclasses.replace(record, events=events), [schedule])[1].dropped

    assert freed((0, other), ()) == ((0, other),)
    assert freed((0, saved), ()) == ()
    assert freed((0, other), (((0, other),),)) == ((0, other),)
    assert freed((0, other), (((0, saved),),)) == ()
