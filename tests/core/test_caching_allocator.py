"""The model of CUDA's caching allocator does what torch's own does, and its settings are read as torch reads them."""

import json
import os
import subprocess
import sys

import pytest

from monetrun.core.allocator_settings import AllocatorSettings, parse_settings
from monetrun.core.caching_allocator import AllocatorOutOfMemory, CachingAllocator
from support.on_stand_in import needs_stand_in
from support.paths import ROOT, python_path
from support.standin_gpu import environment

MIB = 1 << 20
EXPANDABLE = AllocatorSettings(expandable=True)


def test_small_requests_share_a_segment_of_2_mib_and_large_ones_one_of_20():
    allocator = CachingAllocator(AllocatorSettings())
    first, second = allocator.allocate(1), allocator.allocate(MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (2 * MIB, 512 + MIB)
    allocator.allocate(3 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.allocate(17 * MIB)  # the rest of that segment
    assert (allocator.small_bytes, allocator.large_bytes) == (2 * MIB, 20 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (20 * MIB, 20 * MIB)
    assert allocator.small_bytes == 2 * MIB  # a peak


def test_the_smallest_free_block_that_is_large_enough_is_used():
    allocator = CachingAllocator(EXPANDABLE)
    blocks = [allocator.allocate(n * MIB) for n in (30, 2, 12, 2, 20, 2)]
    for i in (0, 2, 4):
        allocator.free(blocks[i])
    assert allocator.allocate(11 * MIB) == blocks[2]
    assert allocator.allocate(25 * MIB) == blocks[0]


def test_an_expandable_segment_grows_by_pages_and_a_fixed_one_is_added():
    for settings, reserved in ((EXPANDABLE, 60 * MIB), (AllocatorSettings(), 82 * MIB)):
        allocator = CachingAllocator(settings)
        allocator.free(allocator.allocate(30 * MIB))
        allocator.allocate(51 * MIB)
        assert allocator.reserved_bytes == reserved


def test_what_no_device_has_counts_as_reserved():
    allocator = CachingAllocator(EXPANDABLE, device_bytes=1 << 30)
    allocator.allocate(3 << 30)
    assert 3 << 30 <= allocator.reserved_bytes < 4 << 30


def test_a_cap_releases_what_is_cached_before_it_refuses():
    allocator = CachingAllocator(AllocatorSettings(), cap_bytes=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB))
    allocator.allocate(50 * MIB)
    assert (allocator.retries, allocator.reserved_bytes) == (1, 50 * MIB)
    with pytest.raises(AllocatorOutOfMemory, match=f"{20 * MIB} bytes exceed the cap of {64 * MIB}"):
        allocator.allocate(20 * MIB)


def test_loaded_segments_lie_as_they_were():
    allocator = CachingAllocator(EXPANDABLE)
    first, second = allocator.load(False, (8 * MIB, -4 * MIB, 8 * MIB))
    assert second - first == 12 * MIB
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (16 * MIB, 20 * MIB)
    assert allocator.allocate(4 * MIB) == first + 8 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", EXPANDABLE),
        (" max_split_size_mb : 64 , garbage_collection_threshold:0.8", AllocatorSettings(max_split_bytes=64 * MIB)),
        ("large_segment_size_mb:40", AllocatorSettings(large_segment_bytes=40 * MIB, max_rounding_bytes=40 * MIB)),
        (
            "max_non_split_rounding_mb:30,large_segment_size_mb:40",
            AllocatorSettings(large_segment_bytes=40 * MIB, max_rounding_bytes=30 * MIB),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(divisions=(4,) * 16)),
        ("roundup_power2_divisions:[4:2,8:4,>:1]", AllocatorSettings(divisions=(2, 2, 2, 4, *(1,) * 12))),
        ("roundup_power2_divisions:[>:4]", AllocatorSettings(divisions=(0, *(4,) * 15))),
        ("roundup_power2_divisions:[>:8,4:2]", AllocatorSettings(divisions=(2, 2, 2, *(8,) * 13))),
        ("roundup_power2_divisions:[131072:4]", AllocatorSettings(divisions=(4,) * 16)),
        ("nonsense", AllocatorSettings()),
    ],
)
def test_settings_are_read_from_the_environment_variable(text, expected):
    assert parse_settings(text) == expected


def test_requests_are_rounded_to_512_bytes_or_to_parts_of_a_power_of_two():
    assert [AllocatorSettings().rounded(n) for n in (1, 512, 513, 3 * MIB + 1)] == [512, 512, 1024, 3 * MIB + 512]
    divided = parse_settings("roundup_power2_divisions:4")
    assert [divided.rounded(n) for n in (1200, 5 * MIB, 5 * MIB + 1, 8 * MIB)] == [1536, 5 * MIB, 6 * MIB, 8 * MIB]


@needs_stand_in
@pytest.mark.parametrize(
    "settings",
    [
        "",
        "expandable_segments:True",
        "roundup_power2_divisions:[1:8,4:4,16:2,>:1]",
        pytest.param("max_split_size_mb:24,max_non_split_rounding_mb:25", marks=pytest.mark.slow),
        pytest.param("expandable_segments:True,max_split_size_mb:32", marks=pytest.mark.slow),
        pytest.param("large_segment_size_mb:40,expandable_segments:True", marks=pytest.mark.slow),
        pytest.param("large_segment_size_mb:40,max_split_size_mb:64", marks=pytest.mark.slow),
    ],
)
def test_agrees_to_the_byte_with_torchs_own_allocator(settings):
    """Random requests under random caps, against torch's allocator on a stand-in GPU."""
    script = ROOT / "tests" / "support" / "allocator_traces.py"
    done = subprocess.run(
        [sys.executable, script, "40", "150"],
        env={**os.environ, **environment(), "PYTORCH_ALLOC_CONF": settings, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differences"] == []
    assert found["requests"] == 40 * 150
    assert found["retries"] > 0


def test_what_is_free_at_a_segments_end_is_not_a_part_of_the_next_one():
    """Each is loaded with its own pages; what is requested next fills the gap between them first."""
    allocator = CachingAllocator(AllocatorSettings(expandable=True), 1 << 34)
    page = AllocatorSettings(expandable=True).large_segment_bytes
    (first,) = allocator.load(False, (page, -page))
    (second,) = allocator.load(False, (2 * page,), gap_bytes=3 * page)
    assert second - first == 5 * page
    assert allocator.reserved_bytes == 4 * page
    assert allocator.allocate(4 * page) == first + page
    assert allocator.reserved_bytes == 7 * page
    assert allocator.allocate(page) == second + 2 * page
