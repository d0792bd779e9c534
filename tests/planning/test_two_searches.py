"""Plans with implementations that round otherwise, and those without: two searches, of which one plan is taken."""

import pytest

from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.step import replay
from monetrun.planning import two_searches
from monetrun.planning.device_budget import Found
from monetrun.solve import timing
from support.step_records import chain_record

PLENTY = 1 << 50


@pytest.fixture
def record():
    return chain_record(6)


def searched(record, *bounds, interrupted=False):
    """The plan taken where searches find the plain step, at ``bounds`` times its seconds; and how many there were."""
    schedules = tuple(map(plain_schedule, record.graphs))
    seconds, left = replay(record, schedules).seconds, list(bounds)

    def solved(options, starts=()):
        if interrupted:
            timing.interrupt()
        return Found(schedules, left.pop(0) * seconds, "feasible")

    with timing.one_plan():
        found = two_searches.exact_where_nearly_as_fast(record, PLENTY, Options(), solved)
    return found.bound_seconds / seconds, len(bounds) - len(left)


def test_one_interrupt_ends_both(record):
    assert searched(record, 0.8, 0.9, interrupted=True) == (pytest.approx(0.8), 1)
    assert searched(record, 0.8, 0.9)[1] == 2  # the next plan is not interrupted
    timing.interrupt()  # while none is made
    assert not timing.interrupted()


def test_the_bound_is_of_the_plans_that_may_be_taken(record):
    # one that rounds otherwise is taken where it saves 5%: the bound on all plans does not allow that
    assert searched(record, 0.96, 0.99)[0] == pytest.approx(0.99)
    assert searched(record, 0.9, 0.99)[0] == pytest.approx(0.9)
