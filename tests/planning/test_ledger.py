"""What a peak consists of."""

import dataclasses

import pytest

from monetrun.core.keeping import keeping
from monetrun.core.plan import plain_schedule
from monetrun.core.step import BUCKETS, replay
from monetrun.planning.ledger import GATHERED, OWN, ledger, ledger_line
from support.sharded_steps import SIZE, sharded_record
from support.step_records import chain_record


def test_the_rows_add_up_to_the_peak():
    record = chain_record(3)
    record = dataclasses.replace(record, ledger={**record.ledger, BUCKETS: 5})
    timeline = replay(record, [plain_schedule(g) for g in record.graphs])
    rows = ledger(record, timeline)
    assert rows[BUCKETS] == 5
    assert sum(rows.values()) == timeline.peak_bytes
    assert ledger_line(rows).index(BUCKETS) < ledger_line(rows).index("script") < ledger_line(rows).index(OWN)


@pytest.mark.parametrize(("kept", "gathered"), [((), 2), ((0, 1), 3)])
def test_what_sharded_modules_have_gathered_at_the_peak_is_a_row(kept, gathered):
    record = keeping(sharded_record(2), kept)
    timeline = replay(record, [plain_schedule(g) for g in record.graphs])
    rows = ledger(record, timeline)
    assert sum(rows.values()) == timeline.peak_bytes
    assert rows[GATHERED] == gathered * SIZE
