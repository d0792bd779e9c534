"""All ranks run rank 0's plan, within the smallest of their budgets, or say why not."""

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.errors import InfeasibleBudget, MonetrunError, PlanningFault
from monetrun.core.options import Options
from monetrun.core.sharding import Sharding
from monetrun.core.step import DeviceMemory, Segment
from monetrun.planning import planner
from monetrun.runtime import agreement, collective_times, exchange
from monetrun.runtime.earlier_plans import EarlierPlans
from monetrun.runtime.first_steps import FirstSteps
from monetrun.runtime.running_plan import RunningPlan
from monetrun.runtime.settings import CHECK, Settings
from monetrun.runtime.step_meter import SETTLING_STEPS
from support.step_records import chain_record

RECORD = chain_record(10)
PLAN = planner.plan_step(RECORD, 1 << 20)
MIB = 1 << 20
LARGE = chain_record(1_000_000)
MEMORY = DeviceMemory(
    AllocatorSettings(expandable=True), AllocatorSettings(), 80 << 30, (Segment(False, (LARGE.base_bytes,)),)
)
DEVICE_RECORD = replace(LARGE, memory=MEMORY)
DEVICE_PLAN = planner.plan_step(
    DEVICE_RECORD, planner.plain_bytes(DEVICE_RECORD, planner.baseline(DEVICE_RECORD)), "greedy", Options(seconds=0.5)
)


def failing(budgets):
    raise KeyError("odd")


@pytest.fixture
def ranks(monkeypatch):
    """Calls a function in two threads, each a rank; gives what each returned or raised."""

    def call(*functions):
        store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False)
        own, results = threading.local(), [None] * len(functions)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(functions))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: own.rank)
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)
        numbers = [k for k in range(2) for _ in functions]  # a rank comes to its second agreement after all have met
        monkeypatch.setattr(agreement, "_numbers", iter(numbers))

        def run(rank):
            own.rank = rank
            try:
                results[rank] = functions[rank]()
            except MonetrunError as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(functions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return call


def not_here(budgets):
    pytest.fail("another rank than 0 planned")


def test_a_process_of_its_own_plans_by_itself():
    assert agreement.plan_in_rank_0(lambda budgets: PLAN if budgets == ["1GiB"] else None, "1GiB") is PLAN


def test_workers_that_start_again_do_not_read_what_earlier_ones_have_left(monkeypatch):
    kept = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: kept)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    for life in "01":
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", life)
        assert not exchange.is_posted(exchange.store_of_ranks(), "plan")
        exchange.post(exchange.store_of_ranks(), "plan", f"of life {life}")
        assert exchange.read(exchange.store_of_ranks(), "plan") == f"of life {life}"


def test_other_ranks_get_rank_0s_plan_which_knows_the_budgets_of_all(ranks):
    seen = []
    given = ranks(
        lambda: agreement.plan_in_rank_0(lambda budgets: seen.append(budgets) or PLAN, "0.5x"),
        lambda: agreement.plan_in_rank_0(not_here, "1MiB"),
        lambda: agreement.plan_in_rank_0(not_here, "2MiB"),
    )
    assert seen == [["0.5x", "1MiB", "2MiB"]]
    assert given == [PLAN, PLAN, PLAN]


def test_where_rank_0_refuses_all_ranks_say_why_with_its_exit_code(ranks):
    def refuse(budgets):
        raise InfeasibleBudget("too little", "more", budget_bytes=1, smallest_bytes=2)

    given = ranks(lambda: agreement.plan_in_rank_0(refuse), lambda: agreement.plan_in_rank_0(not_here))
    assert [(error.exit_code, str(error)) for error in given] == [(80, "too little\n  more")] * 2


def test_a_rank_without_a_rank_0_that_trains_plans_by_itself(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)
    assert ranks(lambda: "trains nothing", lambda: agreement.plan_in_rank_0(lambda budgets: PLAN))[1] is PLAN


def test_a_rank_whose_graphs_have_other_shapes_plans_its_own_step_and_keeps_the_same_parameters(ranks):
    def own(budgets):
        assert budgets == ["1MiB"]
        return DEVICE_PLAN

    rank_0s = replace(PLAN, keeps_parameters={"a": True})
    given = ranks(
        lambda: agreement.plan_in_rank_0(lambda budgets: rank_0s, "2MiB", DEVICE_RECORD),
        lambda: agreement.plan_in_rank_0(own, "1MiB", DEVICE_RECORD),
    )
    assert given == [rank_0s, replace(DEVICE_PLAN, keeps_parameters={"a": True})]


def test_where_rank_0_does_not_come_what_runs_goes_on(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)
    sharded = replace(RECORD, sharding=Sharding((), ()))
    given = ranks(lambda: "runs as it is", lambda: agreement.plan_in_rank_0(not_here, record=sharded, present=PLAN))
    assert given[1] is PLAN


def test_the_seconds_of_collectives_for_which_planning_fails_leave_the_plan_as_it_is(ranks, monkeypatch, caplog):
    def fails(record, by_rank):
        raise ZeroDivisionError

    monkeypatch.setattr(collective_times, "with_collectives", fails)
    weighed = partial(collective_times.weighed, DEVICE_RECORD, DEVICE_PLAN, Settings(), ())
    assert ranks(weighed, weighed) == [(DEVICE_RECORD, DEVICE_PLAN)] * 2
    assert "is not weighed" in caplog.text


def test_of_many_ranks_the_last_one_alone_reads_what_each_has_said(ranks, monkeypatch):
    asked, read = [], exchange.read
    monkeypatch.setattr(exchange, "read", lambda store, key: asked.append(key) or read(store, key))
    assert ranks(*(partial(agreement.largest, k) for k in (3, 9, 4))) == [9, 9, 9]
    assert len(asked) == 3


def seen(reserved_bytes, retries=0):
    """What planned steps took, for ``RunningPlan.correct``, of a rank that plans within 256 MiB."""
    steps = SimpleNamespace(reserved_bytes=reserved_bytes, retries=retries, forget_peaks=lambda: None)
    settings = SimpleNamespace(algorithm="greedy", solver_options=lambda: Options(seconds=0.5))
    running = SimpleNamespace(steps=steps, settings=settings, record=DEVICE_RECORD, plan=DEVICE_PLAN, followed=[])
    running._earlier = EarlierPlans()
    running.schedules = {graph.fingerprint: graph.schedule for graph in DEVICE_PLAN.graphs}
    running.follow = running.followed.append
    return running


@pytest.mark.parametrize(
    ("more", "room", "retries", "again"), [(5, 9, 0, False), (5, 0, 0, True), (-1, 9, 1, True), (18, 99, 0, True)]
)
def test_a_little_more_than_planned_within_the_budget_needs_no_other_plan(ranks, more, room, retries, again):
    planned = DEVICE_PLAN.pool.planned_bytes
    one = seen(planned + more * MIB, retries)
    one.plan = replace(DEVICE_PLAN, budget_bytes=planned + room * MIB)
    assert ranks(partial(RunningPlan.correct, one, lambda said: None)) == [again]
    assert bool(one.followed) == again


def test_where_requests_are_short_again_the_next_plan_leaves_twice_as_much(ranks):
    one, found = seen(DEVICE_PLAN.pool.planned_bytes, retries=3), []
    for _ in range(3):
        assert ranks(partial(RunningPlan.correct, one, lambda said: None)) == [True]
        found.append(one.record.memory.excess_bytes)
    assert found == [20 * MIB, 40 * MIB, 80 * MIB]


def test_a_plan_is_looked_at_until_it_needs_no_correction_and_three_times_at_most():
    steps = SimpleNamespace(steps=0, settled=False)
    first = FirstSteps(steps, Settings())
    looked = []
    for number in range(1, 20):
        steps.steps, steps.settled = number, number > SETTLING_STEPS
        if first.have_settled:
            looked.append(number)
            assert first.looked(True)
    assert looked == [3, 5, 7]
    trusted = FirstSteps(steps, Settings())
    assert trusted.have_settled
    assert not trusted.looked(False)
    steps.steps += 9
    assert not trusted.have_settled
    assert not FirstSteps(steps, Settings(mode=CHECK)).have_settled


def test_what_steps_of_other_shapes_reserved_needs_no_other_plan(ranks):
    one = seen(DEVICE_PLAN.pool.planned_bytes + 99 * MIB)
    one.schedules["another shape's"] = None
    assert ranks(partial(RunningPlan.correct, one, lambda said: None)) == [False]


def test_ranks_plan_again_together_where_one_of_them_reserved_more(ranks):
    planned, said = DEVICE_PLAN.pool.planned_bytes, []
    two = seen(planned), seen(planned + 33 * MIB)
    assert ranks(*(partial(RunningPlan.correct, rank, said.append) for rank in two)) == [True, True]
    assert [rank.excess_bytes for rank in two] == [40 * MIB] * 2  # whole pages
    assert [rank.record.memory.excess_bytes for rank in two] == [40 * MIB] * 2
    assert two[0].followed == two[1].followed
    assert two[0].followed[0].pool.planned_bytes <= DEVICE_PLAN.budget_bytes
    assert len(said) == 2


def test_ranks_that_reserve_what_was_planned_keep_their_plans(ranks):
    two = [seen(DEVICE_PLAN.pool.planned_bytes - nbytes) for nbytes in (0, MIB)]
    assert ranks(*(partial(RunningPlan.correct, rank, pytest.fail) for rank in two)) == [False, False]
    assert [rank.followed for rank in two] == [[], []]


def test_a_rank_that_comes_late_finds_what_those_have_done_that_waited(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)

    def late():
        time.sleep(1)
        return agreement.largest(7)

    assert ranks(late, lambda: agreement.largest(3)) == [0, 0]


def test_no_rank_waits_as_long_as_a_collective_of_the_scripts_may(ranks):
    """Another rank may stand in one, for which this one is waited for."""

    def alone():
        exchange.store_of_ranks().set_timeout(timedelta(seconds=2))
        began = time.monotonic()
        return agreement.largest(7), time.monotonic() - began

    _, (found, seconds) = ranks(lambda: "stands in a collective", alone)
    assert found == 0
    assert seconds < 1


def test_after_a_rank_has_waited_in_vain_none_waits_as_long_again(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(agreement, "_AFTER_THAT_SECONDS", 0.1)

    def alone():
        agreement.largest(7)
        monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 20)
        began = time.monotonic()
        return agreement.plan_in_rank_0(lambda budgets: PLAN), time.monotonic() - began

    plan, seconds = ranks(alone, lambda: "trains nothing")[0]
    assert plan is PLAN
    assert seconds < 1


def test_a_rank_that_waits_says_so(ranks, monkeypatch, capfd):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(agreement, "_QUIET_SECONDS", 0.1)
    ranks(lambda: agreement.largest(7), lambda: "trains nothing")
    assert capfd.readouterr().err == "monetrun (rank 0): waiting for the other ranks to plan, 0 s at most\n"


def test_a_rank_that_waits_in_vain_knows_of_no_largest_value(ranks, monkeypatch):
    monkeypatch.setattr(agreement, "_PATIENCE_SECONDS", 0.2)
    assert ranks(lambda: "does not come", lambda: agreement.largest(7)) == ["does not come", 0]


def test_texts_longer_than_a_store_takes_at_once_arrive_whole(monkeypatch):
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=20), wait_for_workers=False)
    text = random.Random(0).randbytes(10_000).hex()
    monkeypatch.setattr(exchange, "_PIECE_BYTES", 1 << 10)
    assert not exchange.is_posted(store, "long")
    exchange.post(store, "long", text)
    assert exchange.read(store, "long") == text
    assert store.check(["long/3"])


def test_a_fault_in_rank_0_is_told_to_all_as_one(ranks):
    found = ranks(*[partial(agreement.plan_in_rank_0, failing, "1GiB")] * 2)
    assert all(isinstance(error, PlanningFault) and "KeyError: 'odd'" in error.message for error in found)
