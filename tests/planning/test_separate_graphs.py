"""Rounds whose graphs cannot be joined: a graph is called several times before its backward."""

import dataclasses
import itertools

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from monetrun.core.call_footprint import call_footprint
from monetrun.core.errors import InfeasibleBudget, ScheduleError
from monetrun.core.graph import BACKWARD, FORWARD, Implementation, Tensor
from monetrun.core.options import Options
from monetrun.core.plan import Solution, plain_schedule
from monetrun.core.round_graph import join_round
from monetrun.core.simulate import simulate
from monetrun.core.step import OUTSIDE, Event, replay
from monetrun.planning import kept_parameters, planner, separate_graphs
from monetrun.planning.limited_graph import GraphLimits, LimitedGraph
from monetrun.solve import timing
from monetrun.solve.cut import dropping
from support.random_graphs import joint_graphs, schedules
from support.step_records import chain_record

NIGHTLY = pytest.mark.nightly
OPTIONS = Options(seconds=0.5, implementations=())


def looped(calls=3, batch=400):
    """A step that calls the chain several times, then all their backwards, the last call's first."""
    record = chain_record(batch)
    loss = record.events[1]
    events = (record.events[0],) * calls + (loss,) + (record.events[2],) * calls + record.events[3:]
    return dataclasses.replace(record, events=events)


def with_dropped_inputs(calls=3, width=200, batch=400):
    """Each call of ``looped`` gets an input of its own that is dropped then; the first linear reads it, once."""
    record = looped(calls, batch)
    (graph,) = record.graphs
    dropped = Tensor(len(graph.tensors), width * batch, external=True, name="dropped")
    first, *others = graph.operators
    reads = Implementation("default", (*first.implementations[0].inputs, dropped.id))
    graph = dataclasses.replace(
        graph,
        tensors=(*graph.tensors, dropped),
        operators=(dataclasses.replace(first, implementations=(reads,), replayable=False), *others),
    )
    events = []
    for event in record.events:
        if event.kind == FORWARD:
            events += [Event(OUTSIDE, -1, dropped.nbytes, dropped.nbytes), event]
            events.append(Event(OUTSIDE, dropped=((0, dropped.id),)))
        elif event.kind == BACKWARD:
            events.append(dataclasses.replace(event, released=(*event.released, dropped.id)))
        else:
            events.append(event)
    return dataclasses.replace(record, graphs=(graph,), events=tuple(events))


def of_every_subset(record):
    """Peak and seconds of the step for every set of tensors that are recomputed instead of saved."""
    (graph,) = record.graphs
    again = [op for op in graph.operators[: graph.forward_count] if op.replayable]
    inner = [t for op in again for t in op.outputs if not graph.tensors[t].kept]
    for count in range(len(inner) + 1):
        for dropped in itertools.combinations(inner, count):
            timeline = replay(record, [dropping(graph, plain_schedule(graph), set(dropped))])
            yield timeline.peak_bytes, timeline.seconds


@given(st.data())
def test_a_schedule_fits_the_limited_graphs_budget_exactly_when_it_keeps_the_limits(data):
    graph, costs = data.draw(joint_graphs())
    schedule = data.draw(schedules(graph))
    external = [t.id for t in graph.tensors if t.external]
    released = data.draw(st.sets(st.sampled_from(external)) if external else st.just(set()))
    try:
        of = call_footprint(graph, costs, schedule, tuple(released))
    except ScheduleError:
        reject()
    backward_bytes = of.saved_bytes + max(0, of.backward_peak_bytes)
    near = st.integers(-2, 40)
    limits = GraphLimits(
        max(0, of.saved_bytes + data.draw(near)),
        max(0, of.forward_peak_bytes + data.draw(near)),
        max(0, backward_bytes + data.draw(near)),
    )
    limited = LimitedGraph.of(graph, costs, limits, released)
    inner = limited.from_original(schedule)
    fits = simulate(limited.graph, limited.costs, inner).peak_bytes <= limited.budget_bytes
    within = of.forward_peak_bytes <= limits.forward_bytes and backward_bytes <= limits.backward_bytes
    assert fits == (within and of.saved_bytes <= limits.saved_bytes)
    assert limited.to_original(inner) == schedule


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7])
@pytest.mark.parametrize("record", [looped(), with_dropped_inputs()], ids=["looped", "inputs dropped"])
def test_a_plan_costs_no_more_than_any_choice_of_saved_tensors(record, share):
    assert join_round(record, record.rounds[0]) is None
    points = list(of_every_subset(record))
    least, most = min(p for p, _ in points), max(p for p, _ in points)
    budget_bytes = int(least + share * (most - least))
    plan = planner.plan_step(record, budget_bytes, options=OPTIONS)
    assert plan.planned_peak_bytes == replay(record, [plan.graphs[0].schedule]).peak_bytes <= budget_bytes
    seconds = (1 + plan.overhead) * planner.baseline(record).plain.seconds
    assert seconds <= 1.000001 * min(s for p, s in points if p <= budget_bytes)


def test_the_lowest_peak_includes_what_the_other_calls_save():
    record = looped()
    base = planner.baseline(record)
    assert base.frugal.peak_bytes <= min(p for p, _ in of_every_subset(record))
    assert planner.more_frugal(record, base, OPTIONS).frugal.peak_bytes <= base.frugal.peak_bytes
    with pytest.raises(InfeasibleBudget, match="smallest feasible"):
        planner.plan_step(record, base.frugal.peak_bytes // 2, options=OPTIONS)


def test_a_longer_search_finds_the_same_lowest_peak_beside_large_weights():
    """Beside them what the graphs take is a small part of the peak."""
    found = []
    for weights in (0, 20_000_000):
        record = looped()
        record = dataclasses.replace(record, base_bytes=record.base_bytes + weights)
        plain = [plain_schedule(g) for g in record.graphs]
        base = planner.baseline(record, plain)
        lower = planner.more_frugal(record, base, OPTIONS).frugal.peak_bytes
        least = min(p for p, _ in of_every_subset(record))
        assert lower <= least + (base.frugal.peak_bytes - least) // 10
        found.append(lower - weights)
    assert found[0] == found[1]


def nothing(graph, costs, budget_bytes, options, starts=()):
    """A solver that finds nothing better than what it is given."""
    fitting = [s for s in starts if simulate(graph, costs, s).peak_bytes <= budget_bytes]
    best = min(fitting, key=lambda s: simulate(graph, costs, s).seconds, default=None)
    return Solution(best, 0.0, "feasible" if fitting else "unknown", "nothing", 0.0)


def test_what_is_found_is_no_dearer_than_what_is_known(monkeypatch):
    record = looped()
    (graph,) = record.graphs
    again = [op for op in graph.operators[: graph.forward_count] if op.replayable and op.id != graph.forward_count - 1]
    some = [dropping(graph, plain_schedule(graph), {op.outputs[0] for op in again[:n]}) for n in (2, 4, 6)]
    joint = planner.baseline(record, [some[-1]]).rounds[0]
    monkeypatch.setattr(separate_graphs.greedy, "solve", lambda *given: nothing(*given[:4]))
    for known in some:
        peak_bytes = replay(record, [known]).peak_bytes
        found = joint.solve([some[-1]], peak_bytes, nothing, OPTIONS, [[known]])
        assert replay(record, [found[0]]).peak_bytes <= peak_bytes
        assert replay(record, [found[0]]).seconds <= replay(record, [known]).seconds


def test_many_graphs_take_no_more_time_than_is_given(monkeypatch):
    one, calls, now = chain_record(400), 12, [0.0]
    forwards = [dataclasses.replace(one.events[0], graph=k) for k in range(calls)]
    backwards = [dataclasses.replace(one.events[2], graph=k) for k in range(calls)]
    events = (*forwards, *forwards, one.events[1], *backwards, *backwards, *one.events[3:])
    record = dataclasses.replace(one, graphs=one.graphs * calls, costs=one.costs * calls, events=events)
    joint, plain = planner.baseline(record, [plain_schedule(g) for g in record.graphs]).rounds[0], plain_schedule
    least = joint.least_saving()

    def spends(graph, costs, budget_bytes, options, starts=()):
        now[0] += options.seconds
        return nothing(graph, costs, budget_bytes, options, starts)

    monkeypatch.setattr(separate_graphs.greedy, "solve", spends)
    lowest = replay(record, [least[k] for k in range(calls)]).peak_bytes
    budget_bytes = (lowest + replay(record, [plain(g) for g in record.graphs]).peak_bytes) // 2
    with timing.override(clock=lambda: now[0]):
        assert joint.solve([least[k] for k in range(calls)], budget_bytes, spends, Options(seconds=1.0))
    assert 0.9 <= now[0] <= 1.1


def test_a_round_of_two_graphs_one_of_which_is_called_twice_is_planned():
    one, two = chain_record(400), chain_record(300, (20, 40, 30))
    events = (
        *(dataclasses.replace(e, graph=g) for e, g in zip(one.events[:1] * 3, (0, 1, 1), strict=True)),
        one.events[1],
        *(dataclasses.replace(one.events[2], graph=g, released=()) for g in (1, 1, 0)),
        *one.events[3:],
    )
    assert [e.graph for e in events if e.kind in (FORWARD, BACKWARD)] == [0, 1, 1, 1, 1, 0]
    record = dataclasses.replace(one, graphs=one.graphs + two.graphs, costs=one.costs + two.costs, events=events)
    base = planner.baseline(record)
    plain = replay(record, [plain_schedule(g) for g in record.graphs])
    assert base.frugal.peak_bytes < plain.peak_bytes
    overheads = []
    for share in (0.05, 0.5, 1.0):
        budget_bytes = int(base.frugal.peak_bytes + share * (plain.peak_bytes - base.frugal.peak_bytes))
        plan = planner.plan_step(record, budget_bytes, options=OPTIONS)
        assert plan.planned_peak_bytes <= budget_bytes
        overheads.append(plan.overhead)
    assert overheads[0] > overheads[1] > overheads[2] == 0.0


def with_inexact_implementations():
    """They save a workspace, so that the lowest peak known is not one of exact implementations."""
    record = looped()
    (graph,), (costs,) = record.graphs, record.costs
    smaller = [op for op in graph.operators if not op.name.endswith("relu")]
    operators, workspaces, seconds = list(graph.operators), list(costs.workspace_bytes), list(costs.seconds)
    for op in smaller:
        other = Implementation("output:test", op.implementations[0].inputs, exact=False)
        operators[op.id] = dataclasses.replace(op, implementations=(*op.implementations, other))
        workspaces[op.id] = (20000, 0)
        seconds[op.id] = (*seconds[op.id], seconds[op.id][0])
    graph = dataclasses.replace(graph, operators=tuple(operators))
    costs = dataclasses.replace(costs, workspace_bytes=tuple(workspaces), seconds=tuple(seconds))
    return dataclasses.replace(record, graphs=(graph,), costs=(costs,))


def test_a_refusal_under_exact_implementations_names_what_is_enough_for_them():
    record = with_inexact_implementations()
    lowest_bytes = planner.baseline(record).frugal.peak_bytes
    options = Options(seconds=0.5, implementations=("exact",))
    with pytest.raises(planner.BudgetBelowSmallest, match="with the allowed implementations only") as refused:
        planner.plan_step(record, lowest_bytes, options=options)
    assert refused.value.smallest_bytes > lowest_bytes
    plan = planner.plan_step(record, refused.value.smallest_bytes, options=options)
    assert plan.planned_peak_bytes <= refused.value.smallest_bytes


@pytest.mark.nightly
def test_no_budget_is_refused_for_lack_of_time():
    record = with_inexact_implementations()
    options = [Options(seconds=seconds, implementations=("exact",)) for seconds in (0.0001, 10.0)]
    smallest = []
    for own in options:
        with pytest.raises(planner.BudgetBelowSmallest) as refused:
            planner.plan_step(record, 0, options=own)
        smallest.append(refused.value.smallest_bytes)
    assert smallest[0] > smallest[1]
    plan = kept_parameters.plan_step(record, smallest[1], options=options[0], known=planner.baseline(record))
    assert plan.planned_peak_bytes <= smallest[1]


def adversaries(one_widths, two_widths, held=0):
    """A round of two graphs, and one of two calls of the second graph, during which ``held`` bytes more are there."""
    one, two = chain_record(400, one_widths), chain_record(400, two_widths)
    forward, loss, backward = one.events[:3]
    other_forward, other_backward = (dataclasses.replace(e, graph=1) for e in (two.events[0], two.events[2]))
    begins, ends = (dataclasses.replace(loss, delta_bytes=n, peak_bytes=max(n, 0)) for n in (held, -held))
    first = (forward, other_forward, loss, other_backward, backward)
    second = (begins, other_forward, other_forward, loss, other_backward, other_backward, ends)
    return dataclasses.replace(
        one, graphs=one.graphs + two.graphs, costs=one.costs + two.costs, events=first + second + one.events[3:]
    )


@pytest.mark.parametrize("share", [pytest.param(0.1, marks=NIGHTLY), 0.2, pytest.param(0.5, marks=NIGHTLY)])
@pytest.mark.parametrize(
    ("widths", "held"),
    [
        (((45, 40, 38), (43, 26, 13)), 0),  # the lowest peak of either round raises the other's
        (((53, 58, 18), (19, 12, 15)), 20000),  # what fits the first round does not fit the second
        (((33, 20, 31), (37, 13, 16)), 0),
    ],
)
def test_rounds_that_share_a_graph_are_planned_together(widths, held, share):
    record = adversaries(*widths, held)
    choices = []
    for graph in record.graphs:
        inner = [t for op in graph.operators[: graph.forward_count] for t in op.outputs if not graph.tensors[t].kept]
        sets = itertools.chain.from_iterable(itertools.combinations(inner, n) for n in range(len(inner) + 1))
        choices.append([dropping(graph, plain_schedule(graph), set(dropped)) for dropped in sets])
    points = [(t.peak_bytes, t.seconds) for pair in itertools.product(*choices) if (t := replay(record, pair))]
    least, most = min(p for p, _ in points), max(p for p, _ in points)
    base = planner.baseline(record)
    budget_bytes = int(least + share * (most - least))
    plan = planner.plan_step(record, budget_bytes, options=OPTIONS)
    seconds = (1 + plan.overhead) * base.plain.seconds
    assert seconds <= 1.000001 * min(s for p, s in points if p <= budget_bytes)
