"""The limit that is set while a step is held to the budget."""

import pytest
import torch

from monetrun.capture.peaks import Peaks
from monetrun.core.plan import Pool
from monetrun.runtime import enforcement

MIB = 1 << 20
POOL = Pool(2000 * MIB, 4 * MIB, 900 * MIB)


class NoMeter:
    exact = False

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


@pytest.mark.parametrize(("of_plain", "limit"), [(True, 1001 * 1024), (False, 1000 * 1024)])
def test_on_a_cpu_a_share_of_the_plain_peak_is_held_to_a_thousandth(monkeypatch, of_plain, limit):
    limits = []
    monkeypatch.setattr(enforcement, "set_limit", lambda device, nbytes: limits.append(nbytes))
    of = enforcement.Enforcement(torch.device("cpu"), NoMeter(), print, of_plain=of_plain)
    of.plan_is(1000 * 1024, None, libraries=False)
    of.enforce()
    assert limits == [1000 * 1024 + (1000 if of_plain else 0)]
    assert limits[0] <= limit
