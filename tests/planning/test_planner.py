"""A plan keeps to what the options allow."""

import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monetrun.core.budget import format_bytes, parse, resolve
from monetrun.core.errors import NoPlanInTime, UsageError
from monetrun.core.graph import BACKWARD, FORWARD, Costs, Graph, Implementation, Operator, Tensor
from monetrun.core.left_out import dominated, without
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import GraphPlan, Schedule, Step, each_once, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, Event
from monetrun.planning import kept, planner
from monetrun.solve import greedy
from support.exhaustive import cheapest_seconds
from support.random_graphs import joint_graphs
from support.small_graphs import conv_norm_relu, make
from support.step_records import chain_record, graph_record


def budget_of(record, share):
    base = planner.baseline(record)
    return base.frugal.peak_bytes + int(share * (base.plain.peak_bytes - base.frugal.peak_bytes))


def test_without_recomputation_nothing_runs_again_or_there_is_no_plan():
    record, options = chain_record(400), Options(seconds=1.0, recompute=False)
    with pytest.raises(NoPlanInTime, match="without recomputation"):
        planner.plan_step(record, budget_of(record, 0.2), "greedy", options)
    with pytest.raises(planner.BudgetBelowSmallest, match=r"smallest feasible .*, without recomputation") as refused:
        planner.plan_step(record, budget_of(record, 0.2), options=options)
    plan = planner.plan_step(record, refused.value.smallest_bytes, options=options)
    assert plan.planned_peak_bytes <= refused.value.smallest_bytes
    assert not any(s.operator < record.graphs[0].forward_count for s in plan.graphs[0].schedule.backward)


def test_where_the_default_solver_finds_nothing_the_most_frugal_schedules_allowed_are_the_plan(monkeypatch):
    record, options = chain_record(400), Options(seconds=1.0, implementations=())
    budget_bytes = budget_of(record, 0.6)
    nothing = planner.Found(tuple(each_once(g) for g in record.graphs), 0.0, "unknown")
    monkeypatch.setattr(planner, "_solve_rounds", lambda *args: nothing)
    plan = planner.plan_step(record, budget_bytes, options=options)
    assert plan.planned_peak_bytes <= budget_bytes


def test_without_implementations_every_step_runs_as_eager_does():
    record = chain_record(400)
    plan = planner.plan_step(record, budget_of(record, 0.5), options=Options(seconds=1.0, implementations=()))
    assert plan.planned_peak_bytes <= plan.budget_bytes
    assert {s.implementation for g in plan.graphs for s in (*g.schedule.forward, *g.schedule.backward)} == {0}
    assert any(s.operator < record.graphs[0].forward_count for s in plan.graphs[0].schedule.backward)


def test_exact_among_the_kinds_leaves_those_bitwise_identical_to_the_default():
    implementations = [
        Implementation("output:x", (0,), exact=False),
        Implementation("output", (0,)),
        Implementation("conv:a", (0,)),
    ]

    def left(text):
        return [i.allowed_by(parse_kinds(text)) for i in implementations]

    assert left("all") == [True, True, True]
    assert left("exact") == [False, True, True]
    assert left("output") == [True, True, False]
    assert left("output,exact") == [False, True, False]
    assert left("none") == [False, False, False]
    assert not dataclasses.replace(implementations[1], usable=False).allowed_by(None)
    with pytest.raises(UsageError, match=r"odd is not one of .*exact"):
        parse_kinds("exact,odd")


@pytest.mark.parametrize(("seconds", "rounds"), [(4.0, False), (8.0, True)])
@pytest.mark.parametrize("algorithm", ["hierarchical", "greedy", "ilp"])
def test_an_implementation_that_is_not_exact_has_to_save_a_twentieth_of_the_step(algorithm, seconds, rounds):
    """Tensor 1 has to be freed before operator 2 runs; operator 4 can read tensor 2 instead, and is not exact."""
    graph, _ = make("1x 4 4 4 1 1k", "f: 0 > 1", "f: 1 > 2", "f: 2 > 3", "b: 3 2 > 4", "b: 4 1 > 5")
    last = graph.operators[4]
    other = Implementation("output:test", (4, 2), exact=False)
    last = dataclasses.replace(last, implementations=(*last.implementations, other))
    graph = dataclasses.replace(graph, operators=(*graph.operators[:4], last))
    spent = [(seconds,), (25.0,), (25.0,), (25.0,), (25.0, 25.0)]
    record = graph_record(graph, Costs("test", tuple(spent), ((0,), (0,), (0,), (0,), (0, 0))))
    plan = planner.plan_step(record, 9, algorithm, Options(seconds=2.0))
    steps = plan.graphs[0].schedule.backward
    assert (Step(4, 1) in steps) == rounds
    assert (Step(0) in steps) != rounds
    assert plan.overhead == pytest.approx(0.0 if rounds else seconds / (100 + seconds))
    assert plan.bound <= plan.overhead
    exact = planner.plan_step(record, 9, algorithm, Options(seconds=2.0, implementations=("exact",)))
    assert Step(0) in exact.graphs[0].schedule.backward


@pytest.mark.parametrize("status", ["feasible", "optimal"])
def test_where_the_first_half_finds_exact_implementations_the_second_goes_on_from_them(monkeypatch, status):
    rows = [(Implementation("conv:a", (0, 1), exact=False), 1.9, 8)]
    record = graph_record(*one_operator(rows))
    first, given = (Schedule((Step(0),), (Step(1),)),), []

    def found(record, budget_bytes, algorithm, options, base, starts):
        given.append((options.seconds, options.implementations, list(starts)))
        return planner.Found(first, 0.0, status)

    monkeypatch.setattr(planner, "_solve_rounds", found)
    planner.plan_step(record, 12, options=Options(seconds=2.0, implementations=("conv",)))
    goes_on = [(1.0, ("conv", "exact"), [first])] if status == "feasible" else []
    assert given == [(1.0, ("conv",), []), *goes_on]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(joint_graphs(max_forward=4, max_backward=3), st.integers(3, 10), st.sampled_from([None, ("other",), ("exact",)]))
def test_without_what_is_dominated_the_cheapest_schedule_costs_the_same(problem, tenths, kinds):
    graph, costs = problem
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * tenths // 10
    found = [
        cheapest_seconds(g, costs, budget_bytes, any_order=True, implementations=kinds, max_states=20_000)
        for g in (graph, without(graph, dominated(graph, costs)))
    ]
    assert None in found or found[0] == found[1]


def one_operator(rows):
    """A graph whose last operator has a default of (2 s, 4 bytes) and other implementations."""
    tensors = (Tensor(0, 4, external=True), Tensor(1, 4), Tensor(2, 4, kept=True))
    implementations = (Implementation("default", (0, 1)), *(i for i, *_ in rows))
    operators = (
        Operator(0, "first", "f", FORWARD, (1,), (Implementation("default", (0,)),)),
        Operator(1, "last", "b", BACKWARD, (2,), implementations),
    )
    seconds, workspaces = [2.0, *(s for _, s, _ in rows)], [4, *(w for _, _, w in rows)]
    return Graph("one", tensors, operators), Costs("none", ((1.0,), tuple(seconds)), ((0,), tuple(workspaces)))


def test_an_implementation_is_dominated_only_if_another_can_always_replace_it():
    rows = [
        (Implementation("layout", (0, 1)), 3.0, 4),  # 1: the default is as good
        (Implementation("layout", (0, 1)), 3.0, 3),  # 2: less workspace
        (Implementation("conv:a", (0, 1), exact=False), 1.0, 3),  # 3: of another kind than 2, and less exact
        (Implementation("conv:b", (0, 1)), 1.0, 8),  # 4
        (Implementation("conv:c", (0, 1)), 1.0, 8),  # 5: the same again
        (Implementation("conv:d", (0,)), 4.0, 8),  # 6: reads less
        (Implementation("conv:e", (0, 1), exact=False), 1.0, 9),  # 7: 3 is cheaper
        (Implementation("in-place", (0, 1), in_place_of=1), 2.0, 4),  # 8: needs less memory than the default
        (Implementation("conv:f", (0, 1), usable=False), 0.5, 0),  # 9: may not be used, and replaces nothing
    ]
    graph, costs = one_operator(rows)
    assert dominated(graph, costs) == {(1, 1), (1, 5), (1, 7)}


def test_the_planner_searches_without_what_is_dominated():
    graph, costs = one_operator([(Implementation("layout", (0, 1)), 3.0, 4)])
    base = planner.baseline(graph_record(graph, costs))
    (joined,) = base.rounds
    assert [i.usable for op in joined.graph.operators for i in op.implementations if i.name == "layout"] == [False]


def test_which_implementations_there_are_is_no_part_of_the_structure():
    few, many = (one_operator([(Implementation("conv:a", (0, 1)), 1.0, 1)] * n)[0] for n in (1, 3))
    other = one_operator([(Implementation("conv:a", (0,)), 1.0, 1)])[0]
    assert few.structural_fingerprint == many.structural_fingerprint == other.structural_fingerprint
    assert len({g.fingerprint for g in (few, many, other)}) == 3


def test_a_plan_is_carried_over_to_a_graph_that_offers_fewer_implementations():
    rows = [(Implementation("conv:a", (0, 1)), 1.0, 8), (Implementation("conv:b", (0, 1)), 0.5, 9)]
    (many, _), (fewer, costs) = one_operator(rows), one_operator(rows[1:])
    (plan_a, plan_b) = (GraphPlan.of(many, Schedule((Step(0),), (Step(1, k),))) for k in (1, 2))
    # the second of two is the only one left: its index means the default there, or the other one
    assert kept.carry_over(plan_b, fewer, costs, 100) == Schedule((Step(0),), (Step(1, 1),))
    assert kept.carry_over(plan_a, fewer, costs, 100) == Schedule((Step(0),), (Step(1, 0),))
    peak_bytes = simulate(fewer, costs, Schedule((Step(0),), (Step(1, 1),))).peak_bytes
    assert kept.carry_over(plan_b, fewer, costs, peak_bytes - 1) is None


def test_a_search_for_the_lowest_peak_ends_far_below_the_budget(monkeypatch):
    record = chain_record(1 << 20)
    full = planner.baseline(record)
    search, searches = greedy.most_frugal, []

    def counted(graph, costs, **options):
        searches.append(options)
        return search(graph, costs, **options)

    monkeypatch.setattr(greedy, "most_frugal", counted)
    loose = planner.baseline(record, budget_of=lambda plain_bytes: plain_bytes)
    assert len(searches) == 1  # nothing more is looked for
    assert loose.frugal.peak_bytes <= 0.75 * loose.plain.peak_bytes
    tight = planner.baseline(record, budget_of=lambda plain_bytes: full.frugal.peak_bytes)
    assert tight.frugal.peak_bytes <= full.frugal.peak_bytes
    plan = planner.plan_step(record, loose.plain.peak_bytes, "greedy", Options(seconds=0.5), loose)
    assert plan.planned_peak_bytes <= loose.plain.peak_bytes


@pytest.mark.parametrize("weights", [100, 100_000])
def test_a_refusal_names_the_share_that_fits_and_what_the_peak_is_made_of(weights):
    record = chain_record(64)
    grown = {**record.ledger, "parameters": weights}
    record = dataclasses.replace(record, base_bytes=weights + 7000, ledger=grown)
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        planner.plan_step(record, 5000, "greedy", Options(seconds=1.0))
    assert f"it is: parameters {format_bytes(weights)} + " in refused.value.message
    share = re.search(r"or (\d\.\d\dx) \(the plain step", refused.value.hint)[1]
    budget_bytes = resolve(parse(share), None, refused.value.plain_bytes)
    smallest, plain = refused.value.smallest_bytes, refused.value.plain_bytes
    assert smallest <= budget_bytes < 1.04 * smallest + 0.01 * plain  # for what later steps hold
    assert planner.plan_step(record, budget_bytes, "greedy", Options(seconds=1.0)).planned_peak_bytes <= budget_bytes


def test_a_refusal_far_below_names_what_the_options_allow():
    record, options = chain_record(400), Options(seconds=1.0, recompute=False)
    with pytest.raises(planner.BudgetBelowSmallest, match="without recomputation") as refused:
        planner.plan_step(record, planner.baseline(record).frugal.peak_bytes // 2, options=options)
    plan = planner.plan_step(record, refused.value.smallest_bytes, options=options)
    assert plan.planned_peak_bytes <= refused.value.smallest_bytes
    assert not any(s.operator < record.graphs[0].forward_count for s in plan.graphs[0].schedule.backward)


def test_a_thousandth_of_a_budget_is_left_free_but_not_of_one_that_the_plain_step_fits():
    record = chain_record(4000)
    base = planner.baseline(record)
    budget_bytes = budget_of(record, 0.5)
    plan = planner.plan_step(record, budget_bytes, "greedy", Options(seconds=1.0))
    assert plan.planned_peak_bytes <= budget_bytes - budget_bytes // 1024
    assert planner.plan_step(record, base.plain.peak_bytes, "greedy", Options(seconds=1.0)).overhead == 0.0
    smallest = planner.plan_step(record, base.frugal.peak_bytes, "greedy", Options(seconds=1.0))
    assert smallest.planned_peak_bytes <= base.frugal.peak_bytes  # not refused


def test_of_many_rounds_only_those_with_the_peak_are_searched_for_the_lowest_one(monkeypatch):
    """As where gradients are accumulated, or LBFGS calls the model twenty times in a step."""
    once = chain_record(100, widths=(40,) * 8)
    events = [e for k in range(20) for e in (*once.events, Event(OUTSIDE, -1, 10 * k, 10 * k))]
    record = dataclasses.replace(once, events=tuple(events))
    searched = []
    search = greedy.most_frugal
    monkeypatch.setattr(greedy, "most_frugal", lambda g, *rest, **more: searched.append(g) or search(g, *rest, **more))
    base = planner.baseline(record)
    assert len(base.rounds) == 20
    assert len(searched) <= 3
    assert base.frugal.peak_bytes < base.plain.peak_bytes


def test_an_accumulations_rounds_of_one_graph_share_no_time(monkeypatch):
    """They need one search: it gets all of it."""
    one = chain_record(1 << 20)
    record = dataclasses.replace(one, events=one.events * 8)
    given, replays, solver, replay = [], [], planner.solve.solver, planner.replay

    def noted(name):
        def run(graph, costs, budget_bytes, options, starts=()):
            given.append(options.seconds)
            return solver(name)(graph, costs, budget_bytes, options, starts)

        return run

    monkeypatch.setattr(planner.solve, "solver", noted)
    monkeypatch.setattr(planner, "replay", lambda *step: replays.append(len(step[0].events)) or replay(*step))
    base = planner.baseline(record)
    assert len(record.rounds) == len(base.rounds) == 8
    assert len({id(joined) for joined in base.rounds}) == 1
    budget_bytes = (base.frugal.peak_bytes + base.plain.peak_bytes) // 2
    planner.plan_step(record, budget_bytes, "greedy", Options(seconds=2.0, implementations=("exact",)), base)
    assert given[0] == 2.0
    assert len(replays) < 16  # not one for each round


def test_without_recomputation_no_plan_has_another_algorithms_name():
    record = chain_record(1 << 20)
    base = planner.baseline(record)
    budget_bytes = (base.frugal.peak_bytes + base.plain.peak_bytes) // 2
    with pytest.raises(NoPlanInTime, match="none has found no plan"):
        planner.plan_step(record, budget_bytes, "none", Options(seconds=0.5), base)


def test_where_other_implementations_are_faster_the_bound_of_a_budget_that_fits_has_them():
    graph, costs = conv_norm_relu(6)
    faster = dataclasses.replace(costs, seconds=tuple((row[0], *(0.8 * s for s in row[1:])) for row in costs.seconds))
    record = graph_record(graph, faster)
    base = planner.baseline(record)
    plan = planner.plan_step(record, base.plain.peak_bytes, "greedy", Options(seconds=1.0), base)
    assert plan.bound < -0.01
    assert plan.status == "feasible"
