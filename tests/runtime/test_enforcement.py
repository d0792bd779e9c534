"""The limit that is set while a step is held to the budget."""

import contextlib

import pytest
import torch

from monetrun.capture.peaks import Peaks
from monetrun.core.plan import Pool
from monetrun.runtime import enforcement

MIB = 1 << 20
POOL = Pool(2000 * MIB, 4 * MIB, 900 * MIB)


class NoMeter:
    exact = True

    def peaks(self):
        return Peaks(0)


@pytest.mark.parametrize(
    ("benchmark", "conf", "budget", "limit"),
    [
        (False, "expandable_segments:True", 1000 * MIB, 1000 * MIB),
        (True, "expandable_segments:True", 1000 * MIB, 980 * MIB),
        (True, "expandable_segments:True,large_segment_size_mb:40", 1000 * MIB, 960 * MIB),
        (True, "expandable_segments:True", 910 * MIB, 904 * MIB),
        (True, "", 1000 * MIB, 1000 * MIB),
    ],
)
def test_a_search_for_kernels_cannot_round_up_beyond_the_budget(monkeypatch, benchmark, conf, budget, limit):
    limits, held = [], []
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", conf)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    monkeypatch.setattr(enforcement.reserved, "hold", lambda *arguments: held.append(arguments))
    of = enforcement.Enforcement(torch.device("cuda", 0), NoMeter(), print)
    of.plan_is(budget, POOL, libraries=False)
    of.enforce()
    assert held
    assert limits == [None, limit]


def test_a_pool_that_the_script_gave_back_is_held_again_and_one_that_the_allocator_gave_back_is_not(monkeypatch):
    now, held = {"reserved": 0, "retries": 0}, []

    class Meter(NoMeter):
        exact = True

        def peaks(self):
            return Peaks(0, 904 * MIB, now["reserved"] * MIB, now["retries"])

        def reset_peak(self):
            pass

    def hold(*arguments):
        held.append(arguments)
        now["reserved"] = 904

    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: None)
    monkeypatch.setattr(enforcement.reserved, "hold", hold)
    of = enforcement.Enforcement(torch.device("cuda", 0), Meter(), print)
    of.plan_is(1000 * MIB, POOL, libraries=False)
    found = []
    for reserved, retries in ((904, 0), (500, 0), (800, 1), (800, 2), (700, 2)):
        of.enforce()
        now.update(reserved=reserved, retries=retries)
        of.lift()
        of.call_begins()
        found.append(len(held))
    assert found == [1, 2, 2, 2, 3]


def test_a_graph_at_other_shapes_has_a_pool_beside_the_plans_where_the_budget_allows_it(monkeypatch):
    held = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: None)
    monkeypatch.setattr(enforcement.reserved, "hold", lambda device, pool, *_: held.append(pool))
    of = enforcement.Enforcement(torch.device("cuda", 0), NoMeter(), print)
    of.plan_is(1000 * MIB, POOL, libraries=False)
    small, large, beside = (Pool(2000 * MIB, s * MIB, n * MIB) for s, n in ((300, 600), (4, 980), (40, 700)))
    for name, pool in (("small", small), ("large", large), ("beside", beside)):
        of.graph_has(name, pool)
    for name in ("the plan's", "beside", "beside", "the plan's", "small", "small", "large", "the plan's"):
        of.use_pool_of(name)
    both = Pool(2000 * MIB, 40 * MIB, 900 * MIB)
    assert held == [POOL, both, small, large]
    of.plan_is(1000 * MIB, POOL, libraries=False)
    of.use_pool_of("small")
    assert held[4:] == [POOL]  # of another plan it has another schedule


def test_a_share_of_which_part_runs_in_python_is_not_enforced_and_bytes_are(monkeypatch):
    said = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: None)
    for of_plain in (True, False):
        of = enforcement.Enforcement(torch.device("cpu"), NoMeter(), said.append, of_plain=of_plain)
        of.plan_is(1000 * 1024, None, libraries=False)
        of.share_is_estimate = True
        of.enforce()
        assert of.holds is not of_plain
    assert len(said) == 1


@pytest.mark.parametrize(("of_plain", "limit"), [(True, 1001 * 1024), (False, 1000 * 1024)])
def test_on_a_cpu_a_share_of_the_plain_peak_is_held_to_a_thousandth(monkeypatch, of_plain, limit):
    limits = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    of = enforcement.Enforcement(torch.device("cpu"), NoMeter(), print, of_plain=of_plain)
    of.plan_is(1000 * 1024, None, libraries=False)
    of.enforce()
    assert limits == [1000 * 1024 + (1000 if of_plain else 0)]
    assert limits[0] <= limit


def test_a_step_whose_loss_is_of_other_outputs_is_not_held_to_a_share_and_the_next_one_is(monkeypatch):
    limits, said = [], []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    for of_plain in (True, False):
        of = enforcement.Enforcement(torch.device("cpu"), NoMeter(), said.append, of_plain=of_plain)
        of.plan_is(1000 * 1024, None, libraries=False)
        monkeypatch.setattr(of.meter, "reset_peak", lambda: None, raising=False)
        for _ in range(2):
            of.enforce()
            assert of.holds
            of.other_outputs_are_used()
            assert of.holds is not of_plain
            of.lift()
        assert of.share_was_estimated is of_plain
    assert len(said) == 1
    assert "other outputs than in the recorded step" in said[0]


def test_where_a_cpus_bytes_cannot_be_counted_one_line_says_that_nothing_is_enforced(monkeypatch):
    class Inexact(NoMeter):
        exact = False

    monkeypatch.setattr(enforcement.cpu_allocator, "unavailable_reason", lambda: "there is no compiler")
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: None)
    notes = []
    of = enforcement.Enforcement(torch.device("cpu"), Inexact(), notes.append)
    for budget_bytes in (100, 90):
        of.plan_is(budget_bytes, None, libraries=False)
    assert notes == ["warning: the budget is planned for, but not enforced: there is no compiler"]


def test_what_a_step_that_is_not_bounded_leaves_reserved_is_left_to_it(monkeypatch):
    reserved, held, said = [1300], [], []

    class Meter(NoMeter):
        def peaks(self):
            return Peaks(0, reserved[0] * MIB, reserved[0] * MIB, 0)

        def reset_peak(self):
            pass

    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: None)
    monkeypatch.setattr(enforcement.reserved, "hold", lambda *arguments: held.append(arguments))
    of = enforcement.Enforcement(torch.device("cuda", 0), Meter(), said.append, of_plain=True)
    of.plan_is(1000 * MIB, POOL, libraries=False)
    del held[:]
    for _ in range(3):
        of.enforce(suspended=True)
        of.lift()
        of.call_begins()
    assert held == []
    assert len(said) == 1  # that the share is not enforced
    of.enforce()
    of.lift()
    reserved[0] = 1400  # an evaluation
    of.call_begins()
    assert len(held) == 1


@pytest.mark.parametrize("began", [False, True])
def test_a_capture_within_a_step_is_not_bounded_and_operators_that_are_measured_in_it_are(began, monkeypatch):
    limits = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    of = enforcement.Enforcement(torch.device("cpu"), NoMeter(), print)
    of.plan_is(1000, None, libraries=False)
    if began:
        of.enforce()
    with contextlib.suppress(ValueError), enforcement.unbounded(of):
        assert limits[-1:] in ([], [None])
        of.enforce()
        assert limits[-1] is None
        with of.measuring(bounded=True):
            assert limits[-1] == 1000
        with enforcement.unbounded(of):
            pass
        assert limits[-1] is None
        raise ValueError("it cannot be captured")
    assert limits[-1] == 1000
