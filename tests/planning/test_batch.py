"""The search for the largest batch: the line through two trial runs, the search, and its errors."""

from dataclasses import replace

import pytest

from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime, ScriptFailed, UsageError
from monetrun.core.graph import Implementation, check
from monetrun.core.options import Options
from monetrun.core.plan import StepSchedules
from monetrun.core.reserved import reserved
from monetrun.core.step import Event, replay
from monetrun.planning import planner
from monetrun.planning.batch import Verified, _Search, find
from monetrun.planning.batch_prediction import BatchRequest, Prediction, replayed
from monetrun.planning.batch_sizes import Sizes, divisors
from monetrun.planning.rescale import check_alike, rescaled
from support.step_records import chain_record, on_a_device

OPTIONS = Options(seconds=0.3)


def chain(batch):
    return chain_record(batch, widths=(40,) * 10)


class Script:
    """Steps of a chain, as a user's script would give them."""

    def __init__(self, limits, step=chain):
        self.limits = limits
        self.step = step
        self.tried = []

    def trial(self, batch):
        self.tried.append(batch)
        return self.step(batch)

    def plan(self, batch):
        return planner.plan_step(self.step(batch), self.limits.budget_bytes, self.limits.algorithm, OPTIONS)


def limits(budget, overhead=0.3, **more):
    return BatchRequest(budget, overhead, algorithm="greedy", options=OPTIONS, **more)


def search(wanted, step=chain):
    script = Script(wanted, step)
    lines = []
    return find(wanted, script, lines.append), script, lines


def fits(wanted, batch, step=chain):
    try:
        plan = planner.plan_step(step(batch), wanted.budget_bytes, wanted.algorithm, OPTIONS)
    except (InfeasibleBudget, NoPlanInTime):
        return False
    return plan.overhead <= wanted.max_overhead


# ---- the line


@pytest.mark.parametrize("batch", [1, 6, 64, 100_000])
def test_the_step_at_another_batch_is_that_of_a_trial_there_to_the_byte(batch):
    record = rescaled({4: chain_record(4), 8: chain_record(8)}, batch)
    real = chain_record(batch)
    assert record.graphs[0].tensors == real.graphs[0].tensors
    assert record.costs[0].workspace_bytes == real.costs[0].workspace_bytes
    assert record.events == real.events
    assert (record.base_bytes, record.ledger) == (real.base_bytes, real.ledger)
    seconds, expected = record.costs[0].seconds, real.costs[0].seconds
    assert all(a == pytest.approx(b) for a, b in zip(seconds, expected, strict=True))
    check(record.graphs[0], record.costs[0])


def test_the_line_goes_through_the_two_nearest_of_many_trials():
    bent = {b: replace(chain_record(b), base_bytes=b * b) for b in (4, 8, 100, 200)}
    assert rescaled(bent, 150).base_bytes == 25_000
    assert rescaled(bent, 6).base_bytes == 40
    assert rescaled(bent, 300).base_bytes == 70_000
    assert rescaled(bent, 200) is bent[200]


def test_bytes_are_rounded_up_and_never_negative_and_noise_does_not_make_time_negative():
    one, other = chain_record(4), chain_record(8)
    one = replace(one, base_bytes=100, events=(Event("outside", -1, -5, 7),))
    other = replace(other, base_bytes=103, events=(Event("outside", -1, -10, 0),))
    assert rescaled({4: one, 8: other}, 5).base_bytes == 101
    assert rescaled({4: one, 8: replace(other, base_bytes=0)}, 100).base_bytes == 0
    assert rescaled({4: one, 8: other}, 16).events[0].delta_bytes == -20
    faster = chain_record(8, seconds=(1.0,) * 6)
    slow = rescaled({4: chain_record(4), 8: faster}, 1000).costs[0].seconds
    assert slow[0][0] == pytest.approx(3.0)


def test_an_implementation_of_one_batch_only_is_left_out():
    one, other = chain_record(4), chain_record(8)
    graph = other.graphs[0]
    operators = tuple(
        replace(op, implementations=op.implementations[:1]) if op.id == 1 else op for op in graph.operators
    )
    costs = other.costs[0]
    fewer = replace(
        costs,
        seconds=tuple(row[:1] if i == 1 else row for i, row in enumerate(costs.seconds)),
        workspace_bytes=tuple(row[:1] if i == 1 else row for i, row in enumerate(costs.workspace_bytes)),
    )
    other = replace(other, graphs=(replace(graph, operators=operators),), costs=(fewer,))
    record = rescaled({4: one, 8: other}, 16)
    assert [i.name for i in record.graphs[0].operators[1].implementations] == ["default"]
    assert len(record.graphs[0].operators[3].implementations) == 2
    check(record.graphs[0], record.costs[0])


def with_more_implementations(record):
    """The record with another implementation before the last one of each ReLU."""
    (graph,), (costs,) = record.graphs, record.costs

    def more(op):
        if len(op.implementations) == 1:
            return op
        default, in_place = op.implementations
        return replace(op, implementations=(default, Implementation("fused:test", op.inputs), in_place))

    graph = replace(graph, operators=tuple(more(op) for op in graph.operators))
    rows = [
        tuple(row if len(row) == 1 else (row[0], row[0], row[1]) for row in table)
        for table in (costs.seconds, costs.workspace_bytes)
    ]
    return replace(record, graphs=(graph,), costs=(replace(costs, seconds=rows[0], workspace_bytes=rows[1]),))


def test_schedules_found_at_one_batch_mean_the_same_at_a_batch_that_offers_fewer_implementations():
    samples = {4: with_more_implementations(chain(4)), 8: with_more_implementations(chain(8))}
    fewer = {16: chain(16), 32: chain(32)}
    more, less = rescaled(samples, 12), rescaled(fewer, 24)
    kept = StepSchedules.of(more.graphs, planner.plain_in_place(more))
    assert {s.implementation for s in kept.graphs[0].schedule.forward} == {0, 2}
    assert kept.schedules_for(less.graphs) == planner.plain_in_place(less)
    assert replayed(less, kept) == replay(less, planner.plain_in_place(less))


def test_trials_of_other_structure_or_of_the_same_step_are_refused():
    with pytest.raises(UsageError, match=r"batch 8 does not have the structure of that at batch 4.*operators"):
        check_alike({4: chain_record(4), 8: chain_record(8, widths=(40, 30))})
    with pytest.raises(UsageError, match="batch 8 is the same as at batch 4"):
        check_alike({4: chain_record(4), 8: chain_record(4)})


# ---- the search


def test_the_largest_batch_is_that_of_trying_them_all():
    wanted = limits(30_000, 0.0)  # in place or not: no search that may miss a plan
    found, script, _ = search(wanted)
    assert [fits(wanted, found.batch + n) for n in (-1, 0, 1, 2)] == [True, True, False, False]
    assert script.tried == [4, 8, found.batch]
    assert found.next_batch == found.batch + 1
    assert found.verified == (Verified(found.batch, True, ""),)


@pytest.mark.nightly
def test_what_is_found_is_planned_within_both_limits():
    found, script, _ = search(limits(30_000))
    plan = script.plan(found.batch)
    assert found.planned_peak_bytes == plan.planned_peak_bytes <= 30_000 < found.plain_peak_bytes
    assert 0 < found.overhead == plan.overhead <= 0.3
    assert max(script.tried) <= found.batch * 1.02


@pytest.mark.nightly
def test_less_overhead_allows_less():
    batches = [search(limits(30_000, share))[0].batch for share in (0.0, 0.1, 0.4)]
    assert batches == sorted(batches)
    assert batches[0] < batches[-1]


def test_only_multiples_are_tried():
    wanted = limits(30_000, sizes=Sizes(8), trials=(8, 16))
    found, script, _ = search(wanted)
    assert found.batch % 8 == 0
    assert all(b % 8 == 0 for b in script.tried)
    assert fits(wanted, found.batch)
    assert not fits(wanted, found.batch + 8)


def test_sizes_are_multiples_or_divisors():
    assert [Sizes(3)[n] for n in (1, 2, 5)] == [3, 6, 15]
    assert (Sizes(3).number(2), Sizes(3).number(11), Sizes(3).next_after(11)) == (0, 3, 12)
    sizes = divisors(60, 2)
    assert sizes.among == (2, 4, 6, 10, 12, 20, 30, 60)
    assert divisors(36).among == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(7, 2).among == ()
    assert [sizes[n] for n in (1, 8)] == [2, 60]
    assert (sizes.number(1), sizes.number(11), sizes.number(1e9)) == (0, 4, 8)
    assert (sizes.next_after(1), sizes.next_after(10), sizes.next_after(60)) == (2, 12, 0)


def test_only_divisors_are_tried_and_the_largest_one_that_fits_is_found():
    wanted = limits(30_000, 0.0, sizes=divisors(960))
    found, script, _ = search(wanted)
    assert [b for b in script.tried if 960 % b] == []
    fitting = [b for b in wanted.sizes.among if fits(wanted, b)]
    assert found.batch == fitting[-1] < 960
    assert found.next_batch == wanted.sizes.next_after(found.batch)


def test_where_all_that_a_device_has_fits_there_is_no_larger_one():
    found, script, _ = search(limits(30_000, 0.0, sizes=divisors(16)))
    assert (found.batch, found.next_batch) == (16, 0)
    assert script.tried == [4, 8, 16]
    found, script, _ = search(limits(30_000, 0.0, sizes=divisors(2)))
    assert (found.batch, found.next_batch, script.tried) == (2, 0, [4, 8, 2])


def test_a_script_that_fails_at_a_divisor_is_stepped_down_from():
    def failing(batch):
        if batch > 20:
            raise ScriptFailed("it failed in its trial run")
        return chain(batch)

    found, _, _ = search(limits(30_000, 0.0, sizes=divisors(64)), failing)
    assert (found.batch, found.next_batch) == (16, 32)


@pytest.mark.nightly
def test_a_prediction_that_does_not_hold_is_stepped_down_from():
    def bent(batch):
        record = chain(batch)
        return replace(record, base_bytes=record.base_bytes + max(0, batch - 40) * 120)

    wanted = limits(30_000)
    found, script, lines = search(wanted, bent)
    assert not found.verified[0].fits
    assert found.verified[0].batch == script.tried[2] > found.batch
    assert fits(wanted, found.batch, bent)
    assert not fits(wanted, int(found.batch * 1.02) + 1, bent)
    assert any(f"batch {script.tried[2]} does not" in line for line in lines)


def test_a_script_that_feeds_fewer_samples_is_noticed():
    found, _, lines = search(limits(30_000), lambda batch: chain(min(batch, 50)))
    assert found.batch == 50
    assert found.next_batch == 51
    assert any("feeds 50 only" in line for line in lines)


def test_a_script_that_fails_at_a_large_batch_is_stepped_down_from():
    def failing(batch):
        if batch > 60:
            raise ScriptFailed("it failed in its trial run")
        return chain(batch)

    found, _, _ = search(limits(30_000), failing)
    assert 0 < found.batch <= 60
    with pytest.raises(ScriptFailed):
        search(limits(30_000, trials=(64, 128)), failing)


def test_a_search_that_is_stopped_says_what_fits_so_far():
    wanted, lines = limits(30_000), []
    script = Script(wanted)

    def report(line):
        lines.append(line)
        if "fits:" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find(wanted, script, report)
    assert lines[-1] == f"stopped; batch {script.tried[-1]} fits, a larger one may"


def test_a_budget_for_no_batch_names_what_the_smallest_needs():
    with pytest.raises(InfeasibleBudget, match="batch 1 needs") as refused:
        search(limits(1000))
    smallest = refused.value.smallest_bytes
    assert smallest == planner.baseline(chain(1)).frugal.peak_bytes
    assert refused.value.exit_code == 80
    with pytest.raises(InfeasibleBudget):
        search(limits(smallest - 1, 5.0))
    assert search(limits(smallest, 5.0))[0].batch == 1


@pytest.mark.parametrize(
    ("overhead", "hint"),
    [
        (0.0, "--max-overhead 10%"),
        (0.001, "--max-overhead 0.2%"),
        (1.5, "--max-overhead 300%"),
        (60.0, "larger --budget"),
    ],
)
def test_more_overhead_than_was_allowed_is_named_or_none(overhead, hint):
    search = _Search(limits(1 << 40, overhead), None, {4: chain(4), 8: chain(8)}, print)
    assert search._nothing_fits().hint.endswith(hint)


GIB = 1 << 30


def on_device(batch):
    """15 GiB of weights and gradients, and 0.8 GiB for each sample."""
    return on_a_device(chain(batch), plain_reserved_bytes=(batch + 20) * GIB, plain_allocated_bytes=20 * GIB)


def test_on_a_device_all_bytes_beside_the_budget_are_reserved_ones():
    wanted = limits(18 * GIB, 0.5, sizes=divisors(12, 1))
    found, _, lines = search(wanted, on_device)
    assert found.planned_peak_bytes < found.planned_reserved_bytes <= wanted.budget_bytes
    assert found.plain_reserved_bytes == (found.batch + 20) * GIB
    assert f"batch {found.batch} fits: planned {format_bytes(found.planned_reserved_bytes)}, overhead" in " ".join(
        lines
    )
    with pytest.raises(InfeasibleBudget, match="batch 1 needs") as refused:
        search(limits(GIB), on_device)
    assert refused.value.smallest_bytes > planner.baseline(on_device(1)).frugal.peak_bytes


def test_what_the_plain_run_reserves_at_another_batch_than_the_trials_is_modelled(monkeypatch):
    def refused(*_):
        raise NoPlanInTime("none")

    monkeypatch.setattr(planner, "plan_step", refused)
    samples = {4: on_device(4), 8: on_device(8)}
    prediction = Prediction(limits(19 * GIB), print)
    assert prediction.within(samples, 2)
    assert not prediction.within(samples, 4)  # it was measured there


def test_schedules_found_at_another_batch_must_reserve_no_more_than_the_budget(monkeypatch):
    samples = {4: on_device(4), 8: on_device(8)}
    record = samples[4]
    frugal = planner.baseline(record).frugal_schedules
    budget = (replay(record, frugal).peak_bytes + reserved(record, frugal).peak_bytes) // 2
    prediction = Prediction(limits(budget, 100.0), print)
    prediction.found.append(StepSchedules.of(record.graphs, frugal))

    def refused(*_):
        raise NoPlanInTime("none")

    monkeypatch.setattr(planner, "plan_step", refused)
    assert not prediction.within(samples, 4)
