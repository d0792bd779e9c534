"""A kept plan names its implementations: it means the same whatever their order in the graph is."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monetrun.core import codec
from monetrun.core.graph import Implementation
from monetrun.core.plan import PLAN_SCHEMA, GraphPlan, Plan, Schedule, Step, StepSchedules, parse_plan, plain_schedule
from support.random_graphs import joint_graphs, schedules
from support.small_graphs import make

# forward: 0 -> 1 -> 2; backward: operator 2 reads 1 and 2
GRAPH, COSTS = make("4x 4 4 4 4k", "f: 0 > 1", "f: 1 > 2", "b: 2 1 > 3", "b: 3 1 > 4")
OTHERS = (
    Implementation("conv:fft", (2, 1)),
    Implementation("output", (2,), exact=False),
    Implementation("output", (2,), in_place_of=2, exact=False),
    Implementation("in-place", (2, 1), in_place_of=2),
)


def graph_with(*others, operator=2):
    """``GRAPH`` whose ``operator`` has ``others`` beside its default."""
    op = GRAPH.operators[operator]
    changed = dataclasses.replace(op, implementations=(op.implementations[0], *others))
    operators = (*GRAPH.operators[:operator], changed, *GRAPH.operators[operator + 1 :])
    return dataclasses.replace(GRAPH, operators=operators)


def running(implementation):
    return Schedule((Step(0), Step(1)), (Step(0), Step(2, implementation), Step(3)))


def kept(graph, schedule):
    """The plan after it was written and read again."""
    return codec.loads(GraphPlan, codec.dumps(GraphPlan.of(graph, schedule)))


def run_by(graph, schedule):
    """What each step runs."""
    return [
        (s.operator, dataclasses.replace(graph.operators[s.operator].implementations[s.implementation], exact=True))
        for s in (*schedule.forward, *schedule.backward)
    ]


@pytest.mark.parametrize("index", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 2, 1, 0), (2, 3, 0, 1)])
def test_a_kept_plan_runs_the_same_implementations_in_whatever_order_a_graph_has_them(index, order):
    graph, other = graph_with(*OTHERS), graph_with(*(OTHERS[i] for i in order))
    plan = kept(graph, running(index))
    assert plan.schedule_for(graph) == running(index)
    assert run_by(other, plan.schedule_for(other)) == run_by(graph, running(index))
    # it is not looked up as if nothing had changed, and it is found as a plan of the same structure
    assert other.fingerprint != graph.fingerprint
    assert other.structural_fingerprint == graph.structural_fingerprint


@pytest.mark.parametrize("index", [1, 2, 3, 4])
def test_an_implementation_that_a_graph_does_not_have_is_replaced_by_the_default_never_by_another(index):
    graph = graph_with(*OTHERS)
    # of the two named "output" neither is left
    fewer = graph_with(*(other for other in OTHERS if other.name != OTHERS[index - 1].name))
    assert kept(graph, running(index)).schedule_for(fewer) == running(0)
    assert kept(graph, running(index)).schedule_for(GRAPH) == running(0)
    assert fewer.structural_fingerprint == GRAPH.structural_fingerprint == graph.structural_fingerprint


def test_an_implementation_that_cannot_run_in_place_runs_beside_its_operand():
    graph, fewer = graph_with(*OTHERS), graph_with(OTHERS[0], OTHERS[1])
    assert kept(graph, running(3)).schedule_for(fewer) == running(2)
    # not the other way round: running in place frees what another step may read
    assert kept(graph, running(2)).schedule_for(graph_with(OTHERS[2])) == running(0)


def test_the_same_name_with_other_inputs_is_another_implementation():
    other = graph_with(dataclasses.replace(OTHERS[1], inputs=(1,)))
    assert kept(graph_with(*OTHERS), running(2)).schedule_for(other) == running(0)


def test_an_implementation_that_the_weights_rule_out_is_replaced_by_the_default():
    unusable = graph_with(*(dataclasses.replace(other, usable=other.name != "output") for other in OTHERS))
    assert kept(graph_with(*OTHERS), running(2)).schedule_for(unusable) == running(0)
    assert unusable.fingerprint == graph_with(*OTHERS).fingerprint


@pytest.mark.parametrize("change", [{"name": "conv:gemm"}, {"inputs": (1,)}, {"in_place_of": 2}])
def test_the_fingerprint_covers_each_implementations_name_inputs_and_operand_in_place(change):
    one, other = graph_with(OTHERS[0]), graph_with(dataclasses.replace(OTHERS[0], **change))
    assert one.fingerprint != other.fingerprint
    assert one.structural_fingerprint == other.structural_fingerprint


@pytest.mark.parametrize("change", [{"exact": False}, {"usable": False}])
def test_what_changes_after_capture_is_no_part_of_the_fingerprint(change):
    assert graph_with(OTHERS[0]).fingerprint == graph_with(dataclasses.replace(OTHERS[0], **change)).fingerprint


def test_what_the_default_reads_is_part_of_the_structure():
    op = GRAPH.operators[2]
    reads_less = dataclasses.replace(op, implementations=(Implementation("default", (2,)),))
    other = dataclasses.replace(GRAPH, operators=(*GRAPH.operators[:2], reads_less, GRAPH.operators[3]))
    assert other.structural_fingerprint != GRAPH.structural_fingerprint


@given(st.data())
def test_a_kept_plan_gives_the_graph_that_was_planned_its_schedule(data):
    graph, _ = data.draw(joint_graphs())
    parts = [data.draw(schedules(graph)) for _ in range(2)]
    assert StepSchedules.of([graph, graph], parts).schedules_for([graph, graph]) == tuple(parts)


def test_a_plan_with_an_operator_that_is_not_there_keeps_it_for_simulate_to_reject():
    plan = GraphPlan.of(graph_with(*OTHERS), running(1))
    damaged = dataclasses.replace(
        plan,
        schedule=Schedule((Step(9, 1),), ()),
        implementations=(dataclasses.replace(plan.implementations[0], operator=9),),
    )
    assert damaged.schedule_for(GRAPH) == Schedule((Step(9, 1),), ())


def plan_of(graph, schedule):
    return Plan((GraphPlan.of(graph, schedule),), 5, 9, 4, 0.1, 0.0, "feasible", "ilp", "cpu", "2")


def test_a_plan_survives_json():
    plan = plan_of(graph_with(*OTHERS), running(3))
    assert parse_plan(codec.dumps(plan)) == plan


def test_a_plan_of_another_schema_is_refused_with_both_schemas():
    plan = plan_of(GRAPH, plain_schedule(GRAPH))
    text = codec.dumps(dataclasses.replace(plan, schema=1))
    with pytest.raises(ValueError, match=f"it has schema 1, this monetrun reads schema {PLAN_SCHEMA}"):
        parse_plan(text.replace('"implementations":[],', ""))  # as it was written then
    with pytest.raises(ValueError, match="expected an object"):
        parse_plan("[1]")
