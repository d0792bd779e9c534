"""The greedy solver: its bytes equal those of ``simulate``, its schedules fit, and are never worse than plain."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monetrun.core import simulate as simulate_module
from monetrun.core.graph import Costs
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.core.simulate import core, simulate
from monetrun.solve import cut, greedy, native_search
from monetrun.solve.native_search import Allowed, NativeSearch
from support.examples import examples
from support.random_graphs import joint_graphs
from support.small_graphs import chain, conv_norm_relu, make
from support.step_records import chain_record

needs_native = pytest.mark.skipif(core()[0] is None, reason=core()[1])
QUICK = Options(seconds=0.02)


def without_idle_runs(graph, schedule):
    """Without first runs of optional operators that nothing reads before they run again: they are not needed."""
    kept, wanted = [], set()
    for i, step in reversed(list(enumerate(schedule.forward + schedule.backward))):
        op = graph.operators[step.operator]
        first = i < len(schedule.forward) and op.optional and op.replayable
        if first and op.outputs and not any(graph.tensors[t].kept for t in op.outputs) and not wanted & set(op.outputs):
            continue
        kept.append((i, step))
        wanted -= set(op.outputs)
        wanted |= set(op.implementations[step.implementation].inputs)
    cut = len(schedule.forward)
    kept.reverse()
    return Schedule(tuple(s for i, s in kept if i < cut), tuple(s for i, s in kept if i >= cut))


@needs_native
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_the_search_counts_the_bytes_and_seconds_that_simulate_counts(data):
    graph, costs = data.draw(joint_graphs())
    plain = simulate(graph, costs, plain_schedule(graph))
    budget = data.draw(st.integers(0, plain.peak_bytes))
    with NativeSearch(Allowed.of(graph, costs, QUICK), budget, plain_schedule(graph), QUICK.seed) as search:
        search.greedy()
        search.anneal(data.draw(st.integers(0, 3000)), 3.0, 0.1, 0.0, until_it_fits=False)
        current = search.current()
        assert current is not None
        current = without_idle_runs(graph, current)
        timeline = simulate(graph, costs, current)
        steps = current.forward + current.backward
        if any(graph.operators[s.operator].implementations[s.implementation].in_place_of is not None for s in steps):
            assert timeline.peak_bytes <= search.peak_bytes()  # it may need less workspace than it is counted with
        else:
            assert timeline.peak_bytes == search.peak_bytes()
        assert timeline.seconds == pytest.approx(search.seconds())
        best = search.best()
        if best is not None:
            assert simulate(graph, costs, best).peak_bytes <= budget


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_solution_fits_and_costs_between_its_bound_and_the_plain_schedule(data):
    graph, costs = data.draw(joint_graphs())
    plain = simulate(graph, costs, plain_schedule(graph))
    budget = data.draw(st.integers(0, plain.peak_bytes + 1))
    solution = greedy.solve(graph, costs, budget, QUICK)
    if solution.schedule is None:
        assert budget < plain.peak_bytes
        assert solution.status in ("infeasible", "unknown")
        return
    timeline = simulate(graph, costs, solution.schedule)
    assert timeline.peak_bytes <= budget
    assert solution.bound_seconds <= timeline.seconds + 1e-9
    if budget >= plain.peak_bytes:
        assert timeline.seconds <= plain.seconds


@needs_native
def test_the_same_inputs_give_the_same_schedule():
    graph, costs = chain(12, 10)
    first, second = (greedy.solve(graph, costs, 60, Options(seconds=0.05)) for _ in range(2))
    assert first.schedule is not None
    assert first.schedule == second.schedule


@needs_native
def test_a_chain_in_half_of_its_memory_recomputes_each_dropped_operator_once():
    graph, costs = chain(12, 10)
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 130
    solution = greedy.solve(graph, costs, 80, Options(seconds=0.2))
    assert solution.schedule is not None
    timeline = simulate(graph, costs, solution.schedule)
    assert timeline.peak_bytes <= 80
    assert timeline.seconds == 24 + 5  # seven of twelve stay; two steps need room for input and output


@needs_native
def test_tight_budgets_recompute_an_operator_more_than_once():
    graph, costs = chain(12, 10)
    frugal = simulate(graph, costs, greedy.most_frugal(graph, costs, Options(seconds=2.0)))
    assert frugal.peak_bytes == 30
    assert frugal.seconds > 24 + 12


def test_a_budget_below_the_largest_step_is_infeasible():
    late, late_costs = make("8 8k 9 4", "f: > 0", "b: 0 > 1", "b: > 2", "b: 2 > 3")
    assert greedy.least_step_bytes(late, late_costs) == 8 + 9 + 4  # what is kept counts in later steps
    graph, costs = make("8 8 8k 4", "f: > 0", "f: 0 > 1", "b: 0 1 > 2", "b: 0 > 3")
    assert greedy.least_step_bytes(graph, costs) == 24
    solution = greedy.solve(graph, costs, 23, QUICK)
    assert (solution.status, solution.schedule) == ("infeasible", None)
    assert greedy.solve(graph, costs, 24, QUICK).status == "optimal"


@needs_native
def test_in_place_variants_are_used_where_legal_and_named():
    graph, costs = make("8 8 8 1", "f: > 0", "f: 0 > 1 i0", "b: 1 > 2 i1", "b: 2 > 3")
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 16
    solution = greedy.solve(graph, costs, 9, QUICK)
    assert solution.schedule is not None
    assert [s.implementation for s in solution.schedule.forward + solution.schedule.backward] == [0, 1, 1, 0]


@needs_native
def test_an_optional_operator_runs_when_its_output_replaces_a_tensor():
    # op5 reads 64 bytes, which op4 with its workspace has no room for, or the 2-byte mask that op2 makes of them
    graph, costs = make(
        "64 64 2 64 1 1", "f: > 0 r", "f: 0 > 1 r", "f: 1 > 2 o", "f: 1 > 3 r", "b: 3 > 4 w40", "b: 1 > 5 a2"
    )
    assert simulate(graph, costs, plain_schedule(graph)).peak_bytes == 64 + 64 + 1 + 40
    solution = greedy.solve(graph, costs, 130, Options(seconds=0.05))
    assert solution.schedule is not None
    assert [(s.operator, s.implementation) for s in solution.schedule.forward] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert [(s.operator, s.implementation) for s in solution.schedule.backward] == [(4, 0), (5, 1)]
    assert greedy.solve(graph, costs, 129, Options(seconds=0.05)).schedule is None
    assert greedy.solve(graph, costs, 169, Options(seconds=0.05)).schedule == plain_schedule(graph)


@needs_native
def test_an_implementation_that_reads_less_at_no_cost_is_used_from_the_start():
    graph, costs = make("64 8 8 1", "f: > 0 r", "f: 0 > 1 r", "b: 0 1 > 2 a1", "b: 2 > 3")
    costs = Costs("test", ((1.0,), (1.0,), (1.0, 1.0), (1.0,)), costs.workspace_bytes)
    plain = plain_schedule(graph)
    with NativeSearch(Allowed.of(graph, costs, QUICK), 10**6, plain, QUICK.seed) as search:
        current = search.current()
    assert current is not None
    assert [s.implementation for s in current.backward] == [1, 0]


@needs_native
@pytest.mark.parametrize(("blocks", "tenths", "overhead"), [(24, 5, 0.06066), (40, 4, 0.10302)])
def test_recomputation_and_other_implementations_are_combined_in_a_short_search(blocks, tenths, overhead):
    graph, costs = conv_norm_relu(blocks)
    plain = simulate(graph, costs, plain_schedule(graph))
    # not QUICK: on a busy machine that is the time of a few moves
    solution = greedy.solve(graph, costs, plain.peak_bytes * tenths // 10, Options(seconds=0.2))
    assert solution.schedule is not None
    # the optimum's overhead; without a view of what is alive anyway recomputation costs 0.078 and 0.142
    assert simulate(graph, costs, solution.schedule).seconds / plain.seconds - 1 < 1.1 * overhead


@needs_native
def test_options_exclude_implementations_and_recomputation():
    graph, costs = make("8 8 8 1", "f: > 0", "f: 0 > 1 i0", "b: 1 > 2 i1", "b: 2 > 3")
    assert greedy.solve(graph, costs, 9, Options(seconds=0.02, implementations=())).schedule is None
    graph, costs = chain(12, 10)
    assert greedy.solve(graph, costs, 100, Options(seconds=0.02, recompute=False)).schedule is None
    assert greedy.solve(graph, costs, 100, Options(seconds=0.02)).schedule is not None


@needs_native
def test_improving_a_schedule_never_makes_it_worse():
    graph, costs = chain(12, 10)
    start = cut.dropping(graph, plain_schedule(graph), range(1, 12, 2))
    peak_bytes = simulate(graph, costs, start).peak_bytes
    solution = greedy.solve(graph, costs, peak_bytes, QUICK, [start])
    assert solution.schedule is not None
    assert simulate(graph, costs, solution.schedule).seconds <= simulate(graph, costs, start).seconds


def test_without_a_compiler_a_schedule_is_still_found(monkeypatch):
    monkeypatch.setattr(simulate_module, "core", lambda: (None, "no compiler"))
    monkeypatch.setattr(native_search, "core", lambda: (None, "no compiler"))
    graph, costs = chain(12, 10)
    solution = greedy.solve(graph, costs, 100, QUICK)
    assert isinstance(solution.schedule, Schedule)
    assert simulate(graph, costs, solution.schedule).peak_bytes <= 100


@needs_native
def test_where_greedy_gives_up_the_search_starts_from_a_cut(monkeypatch):
    graph, costs = conv_norm_relu(12)
    budget_bytes = simulate(graph, costs, plain_schedule(graph)).peak_bytes * 6 // 10
    options = Options(seconds=0.05, implementations=())
    cuts = cut.schedules(graph, costs, budget_bytes, options)
    loaded: list[Schedule] = []
    load = NativeSearch.load
    monkeypatch.setattr(NativeSearch, "greedy", lambda self: False)
    monkeypatch.setattr(NativeSearch, "load", lambda self, schedule: (loaded.append(schedule), load(self, schedule)))
    greedy.solve(graph, costs, budget_bytes, options)
    assert loaded[:2] == [plain_schedule(graph), greedy.nearest(graph, costs, budget_bytes, cuts)]


@needs_native
def test_greedy_stops_after_the_given_number_of_tries():
    graph, costs = chain(12, 10)
    with NativeSearch(Allowed.of(graph, costs, QUICK), 60, plain_schedule(graph), QUICK.seed) as search:
        assert not search.greedy(1)
        assert search.greedy()


@needs_native
def test_where_the_budget_is_not_reached_the_search_goes_on_from_what_is_known_to_fit(monkeypatch):
    graph, costs = conv_norm_relu(12)
    known = greedy.most_frugal(graph, costs, Options(seconds=0.5))
    timeline = simulate(graph, costs, known)
    budget = (timeline.peak_bytes + simulate(graph, costs, plain_schedule(graph)).peak_bytes) // 2
    monkeypatch.setattr(greedy, "_REACH_RUNS", ())
    monkeypatch.setattr(greedy._Search, "cuts", lambda self, budget_bytes: [])
    monkeypatch.setattr(NativeSearch, "greedy", lambda search, tries=0: search.peak_bytes() <= budget)
    solution = greedy.solve(graph, costs, budget, Options(seconds=0.5), [known])
    assert simulate(graph, costs, solution.schedule).seconds < timeline.seconds


@needs_native
def test_a_long_search_still_counts_as_simulate_does():
    """What is added to whole blocks of slots and taken off in parts grows: it once overflowed after so many changes."""
    draw = random.Random(0)
    widths = tuple(draw.choice((20, 40, 80, 160, 320)) for _ in range(100))
    batch = (1 << 30) // (6 * sum(widths))
    record = chain_record(batch, widths, tuple(draw.uniform(0.5, 3) for _ in widths))
    graph, costs = record.graphs[0], record.costs[0]
    plain = plain_schedule(graph)
    budget = int(0.75 * simulate(graph, costs, plain).peak_bytes)
    with NativeSearch(Allowed.of(graph, costs, Options()), budget, plain, 3) as search:
        search.greedy()
        search.ruin(20_000, 2.0, 2.0, 0.0)
        assert simulate(graph, costs, search.best()).peak_bytes <= budget
