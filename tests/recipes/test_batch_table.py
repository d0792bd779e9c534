"""The table of largest batches: what it says fits does, by the replay of the step at that batch."""

import json

import pytest

import batch_table
from monetrun.core.options import Options
from monetrun.core.plan import plain_schedule
from monetrun.core.step import replay
from support.paths import RECIPES
from support.step_records import chain_record

WIDTHS = (40,) * 10
GIB = 2**30


@pytest.fixture(scope="module")
def steps():
    samples = {32: chain_record(32, WIDTHS), 64: chain_record(64, WIDTHS)}
    return batch_table.Steps(samples, batch_table.schedules(samples[64], "greedy", Options(seconds=0.3)))


def test_the_largest_number_that_fits_is_found():
    assert [batch_table.largest(lambda n, most=most: n <= most) for most in (0, 1, 2, 7, 100)] == [0, 1, 2, 7, 100]


def test_a_row_has_the_largest_batches_of_a_card(steps):
    budget_bytes = 30_000
    row = steps.row(budget_bytes / GIB, (0.0, 0.3))

    def plain_peak(batch):
        record = chain_record(batch, WIDTHS)
        return replay(record, [plain_schedule(g) for g in record.graphs]).peak_bytes

    assert plain_peak(row["plain"]) <= budget_bytes < plain_peak(row["plain"] + 1)
    none, some = row["within"]["0%"], row["within"]["30%"]
    assert row["plain"] <= none["batch"] < some["batch"]
    assert some["ratio"] == round(some["batch"] / row["plain"], 3)
    assert some["peak_bytes"] <= budget_bytes < some["plain_peak_bytes"] == plain_peak(some["batch"])
    assert 0 < some["overhead"] <= 0.3
    assert steps.best(some["batch"] + 1, budget_bytes, 0.3) is None


def test_the_committed_table_keeps_its_limits():
    found = json.loads((RECIPES / "results" / "batch_table.json").read_text())
    assert [row["gib"] for row in found["rows"]] == [8, 16, 24, 40, 80, 141]
    for row in found["rows"]:
        for share, one in row["within"].items():
            assert one["peak_bytes"] <= row["gib"] * GIB < one["plain_peak_bytes"]
            assert one["overhead"] <= float(share.removesuffix("%")) / 100
            assert one["ratio"] == pytest.approx(one["batch"] / row["plain"], abs=1e-3)
        assert row["within"]["20%"]["ratio"] >= 2.3
