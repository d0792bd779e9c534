"""Whether others' work is seen, by made-up times of the processors: all, idle, own."""

import pytest

from monetrun.machine import busy


@pytest.mark.parametrize(
    ("passed", "seconds", "share"),
    [
        ((20.0, 0.0, 10.0), 10.0, 0.5),
        ((20.0, 0.0, 19.0), 10.0, 0.0),  # no more than what is always there
        ((20.0, 8.0, 6.0), 10.0, 0.0),  # processors were left
        ((1.0, 0.0, 0.5), 0.5, 0.0),  # too short
        ((0.0, 0.0, 0.0), 10.0, 0.0),
    ],
)
def test_what_others_took(monkeypatch, passed, seconds, share):
    before = 5.0, 3.0, 1.0
    after = tuple(then + more for then, more in zip(before, passed, strict=True))
    clock, times = iter([100.0, 100.0 + seconds]), iter([before, after])
    monkeypatch.setattr(busy.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(busy, "_times", lambda: next(times))
    assert busy.OthersWork().share() == pytest.approx(share)


def test_the_times_of_this_machine_add_up():
    all_of_it, idle, own = busy._times()
    assert all_of_it > idle >= 0
    assert own > 0
