"""recipes/bench_batch.py: both batches under the limit of the smaller one's plain step."""

import pytest

import bench_batch
from monetrun.capture import cpu_allocator
from monetrun.core.options import Options


@pytest.mark.nightly
def test_a_larger_batch_trains_under_the_limit_that_one_image_more_breaks_plainly():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    found = bench_batch.measure("squeezenet1_1", side=64, batch=4, times=1.5, pairs=1, options=Options(2.0))
    assert found["larger_batch"] == 6
    assert found["plainly"] is None
    assert "out of memory" in found["plainly_one_more"]
    assert found["refused_by_the_cap"] is None
    assert found["allocated_bytes"] <= found["limit_bytes"] < found["plain_bytes"]
    assert any("planned, batch 6: trains" in line for line in bench_batch.lines(found))
