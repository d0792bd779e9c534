"""Overhead against budget: the first and last point, their order, and the budgets."""

import itertools
from dataclasses import replace

import pytest

from monetrun.core.budget import parse
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.keeping import keeping, over_link
from monetrun.core.link import Link
from monetrun.core.options import Options
from monetrun.core.step import replay
from monetrun.planning import kept_parameters, planner
from monetrun.planning.frontier import Frontier, Point, frontier, next_budget, spread
from support.sharded_steps import sharded_record
from support.small_graphs import chain
from support.step_records import chain_record, on_a_device

RECORD = chain_record(64)
BASE = planner.baseline(RECORD)
PLAIN, SMALLEST = BASE.plain.peak_bytes, BASE.frugal.peak_bytes


def found(budgets, seconds=2.0):
    return frontier(RECORD, budgets, "hierarchical", Options(seconds=seconds), BASE)


def test_the_table_goes_from_the_plain_peak_to_the_smallest_budget_and_is_monotone():
    points = found(spread(PLAIN, SMALLEST, 6)).points
    assert [points[0].budget_bytes, points[-1].budget_bytes] == [PLAIN, SMALLEST]
    assert points[0].overhead == 0.0
    for a, b in itertools.pairwise(points):
        assert a.budget_bytes > b.budget_bytes
        assert a.overhead <= b.overhead
        assert a.bound <= b.bound
    for p in points:
        assert p.planned_peak_bytes <= p.budget_bytes
        assert p.gap == p.overhead - p.bound >= 0
    assert points[-1].overhead > 0


def test_a_plan_of_a_smaller_budget_serves_a_larger_one_and_a_bound_the_other_way(monkeypatch):
    overheads = {PLAIN: 0.5, PLAIN - 1: 0.2, PLAIN - 2: 0.3}
    bounds = {PLAIN: 0.15, PLAIN - 1: 0.05, PLAIN - 2: 0.1}
    real = planner.plan_step

    def worse(record, budget_bytes, *rest):
        plan = real(record, PLAIN, *rest)
        return planner.replace(
            plan,
            overhead=overheads[budget_bytes],
            bound=bounds[budget_bytes],
            planned_peak_bytes=budget_bytes,
            status="feasible",
        )

    monkeypatch.setattr(planner, "plan_step", worse)
    points = found(list(overheads)).points
    assert [p.overhead for p in points] == [0.2, 0.2, 0.3]
    assert [p.bound for p in points] == [0.15, 0.15, 0.15]
    assert [p.planned_peak_bytes for p in points] == [PLAIN - 1, PLAIN - 1, PLAIN - 2]


def test_a_budget_under_the_smallest_is_a_row_without_a_plan_and_none_over_it_an_error():
    points = found([PLAIN, SMALLEST // 2]).points
    assert [p.status for p in points] == ["optimal", "infeasible"]
    assert points[1].overhead is None
    with pytest.raises(InfeasibleBudget) as refused:
        found([SMALLEST - 1])
    assert refused.value.smallest_bytes == SMALLEST


def test_each_point_is_planned_as_the_step_is_replayed():
    budget = (PLAIN + SMALLEST) // 2
    (point,) = found([budget]).points
    plan = planner.plan_step(RECORD, budget, "hierarchical", Options(seconds=2.0), BASE)
    assert point.overhead == pytest.approx(plan.overhead)
    timeline = replay(RECORD, [g.schedule for g in plan.graphs])
    assert point.overhead == pytest.approx(timeline.seconds / BASE.plain.seconds - 1)


def test_the_next_command_has_the_budget_at_the_knee_that_can_be_typed():
    mib = 1 << 20
    points = tuple(
        Point(size * mib, size * mib, overhead, 0.0, overhead, "feasible")
        for size, overhead in ((100, 0.0), (80, 0.02), (60, 0.05), (50, 0.9))
    )
    made = Frontier(100 * mib, 50 * mib, "greedy", "cpu", points)
    assert next_budget(made) == "60MiB"
    assert parse(next_budget(made)).value == 60 * mib


def test_budgets_are_spread_evenly_and_are_different():
    assert spread(100, 50, 3) == (100, 75, 50)
    assert spread(100, 99, 5) == (100, 99)


def test_a_frontier_of_which_no_point_can_be_planned_is_refused():
    record = chain_record(1 << 20)
    base = planner.baseline(record)
    budget_bytes = (base.frugal.peak_bytes + base.plain.peak_bytes) // 2
    with pytest.raises((InfeasibleBudget, NoPlanInTime)):
        frontier(record, [budget_bytes], "hierarchical", Options(seconds=1.0, recompute=False), base)


def test_on_a_gpu_all_bytes_are_reserved_ones_and_the_smallest_budget_has_a_plan():
    record = on_a_device(chain_record(64))
    base = planner.baseline(record)
    budgets = spread(planner.plain_bytes(record, base), planner.smallest_bytes(record, base), 3)
    found = frontier(record, budgets, "greedy", Options(seconds=1.5), base)
    assert (found.plain_peak_bytes, found.smallest_bytes) == (budgets[0], budgets[-1])
    assert found.smallest_bytes > base.frugal.peak_bytes  # allocated
    assert all(p.planned_peak_bytes <= p.budget_bytes for p in found.points)


def sharded(monkeypatch, seconds_by_kept):
    """Plans of a sharded step by budget: which modules keep their parameters, as is written."""
    record = over_link(sharded_record(modules=3, of=chain(12, 100)), Link(1e3, 0.0))
    kept_at = dict(seconds_by_kept)

    def plan_step(record, budget_bytes, algorithm, options, base, starts):
        kept, bound = kept_at[budget_bytes]
        of = keeping(record, kept)
        plan = planner.plan_step(of, 1 << 40, "none", options)
        return replace(plan, budget_bytes=budget_bytes, bound=bound, overhead=plan.overhead + 0.01 * len(kept))

    monkeypatch.setattr(kept_parameters, "plan_step", plan_step)
    return frontier(record, list(kept_at), "none", Options(seconds=1.0), planner.baseline(record)).points


def test_where_modules_are_sharded_the_steps_seconds_decide_and_bounds_are_of_one_choice(monkeypatch):
    """With every module that keeps its parameters there is more to compute, and less to gather."""
    budgets = {1 << 32: ((0, 1, 2), -0.125), 1 << 31: ((0, 1), -0.25), 1 << 30: ((), -0.5)}
    points = sharded(monkeypatch, budgets)
    assert [round(p.overhead, 6) for p in points] == [0.03, 0.02, 0.0]
    assert [p.bound for p in points] == [-0.125, -0.25, -0.5]


def test_where_modules_are_sharded_the_smallest_budget_is_of_those_that_keep_nothing():
    record = keeping(sharded_record(modules=3, kept=True, of=chain(12, 100)), (0, 1, 2))
    base = planner.baseline(record)
    smallest_bytes = kept_parameters.smallest_bytes(record, base)
    assert smallest_bytes < planner.smallest_bytes(record, base)
    (point,) = frontier(record, [smallest_bytes], "greedy", Options(seconds=1.0), base).points
    assert point.planned_peak_bytes <= smallest_bytes


def test_each_plan_that_is_found_is_given_on():
    given = []
    table = frontier(RECORD, spread(PLAIN, SMALLEST, 3), "hierarchical", Options(seconds=1.0), BASE, None, given.append)
    assert [plan.budget_bytes for plan in given] == sorted(p.budget_bytes for p in table.points)
