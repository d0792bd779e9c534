"""The quick model of the large pool gives the addresses, and reserves the bytes, that the caching allocator's does."""

import random

import pytest

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator, large_blocks
from monetrun.core.large_pool import LargePool

MIB = 1 << 20
SETTINGS = {
    "expandable": AllocatorSettings(expandable=True),
    "divided": AllocatorSettings(expandable=True, divisions=(8,) * 16),
    "not split": AllocatorSettings(expandable=True, max_split_bytes=64 * MIB),
    "large pages": AllocatorSettings(expandable=True, large_segment_bytes=50 * MIB),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(20))
def test_requests_get_the_same_addresses(settings, seed):
    draw = random.Random(seed)
    allocator = CachingAllocator(settings, 80 << 30)
    for _ in range(draw.randrange(1, 4)):  # what lies there before, with gaps
        allocator.load(
            False, [draw.choice((1, -1)) * draw.randrange(1, 200) * MIB for _ in range(draw.randrange(1, 6))]
        )
    if draw.random() < 0.5:
        allocator.empty_cache()
    before = {block for block, _, allocated, _ in large_blocks(allocator) if allocated}
    pool = LargePool.of(allocator)
    assert (pool.reserved_bytes, pool.allocated_bytes) == (allocator.reserved_bytes, allocator.allocated_bytes)
    live = list(before)
    for _ in range(400):
        if live and draw.random() < 0.48:
            start = live.pop(draw.randrange(len(live)))
            allocator.free(start)
            pool.release(start)
        else:
            nbytes = MIB + draw.choice((1, 512, MIB, 30 * MIB, 300 * MIB)) * draw.randrange(1, 9)
            live.append(allocator.allocate(nbytes))
            assert pool.allocate(settings.rounded(nbytes)) == live[-1]
        if draw.random() < 0.02:
            pool = pool.copy()
        assert (pool.reserved_bytes, pool.allocated_bytes) == (allocator.reserved_bytes, allocator.allocated_bytes)
    assert pool.fitting(0) == sorted(
        (nbytes, start) for start, nbytes, allocated, mapped in large_blocks(allocator) if mapped and not allocated
    )
