"""Which sharded modules keep their parameters: never slower than all or none of them, within the budget."""

import itertools

import pytest

from monetrun.core.clocks import sharded_clocks
from monetrun.core.errors import InfeasibleBudget
from monetrun.core.keeping import as_planned, keeping, over_link
from monetrun.core.link import Link
from monetrun.core.options import Options
from monetrun.core.step import replay
from monetrun.planning import kept_parameters, planner
from monetrun.planning.summary import summary_lines
from support.sharded_steps import SIZE, sharded_record
from support.small_graphs import chain

OPTIONS = Options(seconds=1.0)
MODULES = 4


def record(seconds=None, kept=False):
    """Four modules with tensors of 30 bytes to save or to compute again; a collective takes ``seconds``."""
    own = sharded_record(MODULES, kept, of=chain(4, 30))
    return own if seconds is None else over_link(own, Link(SIZE / 2 / seconds, 0.0))


def seconds_of(own, plan):
    return sharded_clocks(as_planned(own, plan.keeps_parameters), [g.schedule for g in plan.graphs]).step_seconds


def with_choice(own, kept, budget_bytes):
    try:
        return seconds_of(own, planner.plan_step(keeping(own, kept), budget_bytes, options=OPTIONS))
    except InfeasibleBudget:
        return float("inf")


def budgets(own, shares):
    none, everything = keeping(own, ()), keeping(own, range(MODULES))
    low = planner.baseline(none).frugal.peak_bytes
    high = planner.baseline(everything).plain.peak_bytes
    peak = max(high, replay(everything, planner.baseline(everything).plain_schedules).peak_bytes)
    return [int(low + share * (peak - low)) for share in shares]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        (4.0, (0.6,)),
        *(pytest.param(s, (0.0, 0.6, 1.0), marks=pytest.mark.nightly) for s in (0.5, 4.0, 12.0)),
    ],
)
def test_the_step_is_as_fast_as_under_the_best_of_all_sets_of_modules(seconds, shares):
    own = record(seconds)
    below_both = 0
    for budget_bytes in budgets(own, shares):
        plan = kept_parameters.plan_step(own, budget_bytes, options=OPTIONS)
        chosen = as_planned(own, plan.keeps_parameters)
        assert replay(chosen, [g.schedule for g in plan.graphs]).peak_bytes == plan.planned_peak_bytes <= budget_bytes
        found = {
            kept: with_choice(own, kept, budget_bytes)
            for n in range(MODULES + 1)
            for kept in itertools.combinations(range(MODULES), n)
        }
        assert seconds_of(own, plan) == pytest.approx(min(found.values()))
        ends = min(found[()], found[tuple(range(MODULES))])
        below_both += seconds_of(own, plan) < ends - 1e-9
    assert below_both or seconds < 1


def test_collectives_of_unknown_seconds_are_saved_where_nothing_runs_again_for_it():
    own = record()
    (budget_bytes,) = budgets(own, (1.0,))
    assert all(kept_parameters.plan_step(own, budget_bytes, options=OPTIONS).keeps_parameters.values())
    (budget_bytes,) = budgets(own, (0.0,))
    plan = kept_parameters.plan_step(own, budget_bytes, options=OPTIONS)
    least = planner.plan_step(keeping(own, ()), budget_bytes, options=OPTIONS)
    assert plan.overhead == pytest.approx(least.overhead, abs=0.002)


def test_a_budget_below_all_that_the_script_keeps_is_met_by_freeing_it():
    own = record(4.0, kept=True)
    (budget_bytes,) = budgets(own, (0.0,))
    with pytest.raises(InfeasibleBudget):
        planner.plan_step(keeping(own, range(MODULES)), budget_bytes, options=OPTIONS)
    plan = kept_parameters.plan_step(own, budget_bytes, options=OPTIONS)
    assert sum(plan.keeps_parameters.values()) < MODULES
    with pytest.raises(planner.BudgetBelowSmallest) as refused:
        kept_parameters.plan_step(own, plan.planned_peak_bytes // 4, options=OPTIONS)
    assert refused.value.smallest_bytes <= budget_bytes


def test_the_choice_is_a_line_of_the_summary():
    own = record(4.0)
    (budget_bytes,) = budgets(own, (1.0,))
    lines = summary_lines(kept_parameters.plan_step(own, budget_bytes, options=OPTIONS), "", own)
    assert "4 of 4 sharded modules keep their parameters after the forward (400 bytes; in the script 0)" in lines[-1]
