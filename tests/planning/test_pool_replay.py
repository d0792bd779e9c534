"""The native replay of a step's large requests says what the one in Python says."""

import random

import pytest

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.step import DeviceMemory, Segment
from monetrun.planning.large_requests import Free, Request, StepBegins, StepEnds, otherwise
from monetrun.planning.native_pool_replay import NativePoolReplay
from monetrun.planning.pool_replay import PoolReplay
from monetrun.solve import native_search

MIB = 1 << 20
SETTINGS = {
    "expandable": AllocatorSettings(expandable=True),
    "divided": AllocatorSettings(expandable=True, divisions=(8,) * 16),
    "not split": AllocatorSettings(expandable=True, max_split_bytes=64 * MIB),
    "split, however much is left": AllocatorSettings(
        expandable=True, max_split_bytes=64 * MIB, max_rounding_bytes=1 << 63
    ),
    "large pages": AllocatorSettings(expandable=True, large_segment_bytes=50 * MIB),
}

needs_core = pytest.mark.skipif(not native_search.available(), reason="there is no compiler")


def random_trace(draw, base_blocks, steps=40):
    """Requests and frees in and between steps, of which some run more than once."""
    events, alive = [], [~i for i in range(base_blocks)]

    def some(count):
        for _ in range(count):
            if alive and draw.random() < 0.5:
                events.append(Free(alive.pop(draw.randrange(len(alive)))))
            else:
                nbytes = MIB + draw.choice((512, MIB, 30 * MIB, 300 * MIB)) * draw.randrange(1, 9)
                alive.append(len(events))
                events.append(Request(len(events), nbytes))

    for i in range(steps):
        some(draw.randrange(3))
        events.append(StepBegins((0, i % 25)))
        some(draw.randrange(1, 5))
        events.append(StepEnds())
    return events


def random_memory(draw, settings):
    base = [
        Segment(False, tuple(draw.choice((1, -1)) * draw.randrange(1, 200) * 2 * MIB for _ in range(n)), gap * 20 * MIB)
        for n, gap in ((draw.randrange(1, 6), 0), (draw.randrange(1, 6), draw.randrange(3)))
    ]
    small = Segment(True, (512, -1024, 2048, 4096 - (2 << 20)))  # its blocks are in another pool
    return DeviceMemory(settings, AllocatorSettings(), 80 << 30, (base[0], small, base[1]))


@needs_core
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("seed", range(20))
def test_the_native_replay_says_the_same(settings, seed):
    draw = random.Random(seed)
    memory = random_memory(draw, settings)
    base_blocks = sum(n > 0 for segment in memory.base for n in segment.blocks)
    traces = [random_trace(draw, base_blocks) for _ in range(2)]
    traces += [otherwise(traces[0], seed) for seed in range(2)]
    reference = PoolReplay(memory, traces, 20 * MIB)
    with NativePoolReplay(memory, traces, 20 * MIB) as native:
        for _ in range(15):
            holds = {
                (0, draw.randrange(25)): tuple(draw.randrange(2, 400) * MIB + 5 for _ in range(draw.randrange(4)))
                for _ in range(draw.randrange(6))
            }
            assert native.replay(holds) == reference.replay(holds)
            assert native.most_of_variants(holds, 1 << 60) == reference.most_of_variants(holds, 1 << 60)
            most = reference.most_of_variants({}, 1 << 60)
            assert (native.most_of_variants(holds, most) > most) == (reference.most_of_variants(holds, most) > most)
            for _ in range(draw.randrange(3)):
                native.keep()
                reference.keep()
            for in_the_way in (False, True):
                count = reference.count(in_the_way=in_the_way)
                assert native.count(in_the_way=in_the_way) == count
                for i in range(count):
                    one, other = (r.served(i, in_the_way=in_the_way) for r in (native, reference))
                    assert (one.place, one.nbytes, list(one.fitting)) == (other.place, other.nbytes, other.fitting)


def test_what_is_in_the_way_was_alive_when_more_was_reserved_last():
    memory = DeviceMemory(AllocatorSettings(expandable=True), AllocatorSettings(), 80 << 30, ())
    events = [
        StepBegins((0, 0)),
        *(Request(1, 100 * MIB), Request(2, 100 * MIB)),
        StepEnds(),
        Free(1),
        StepBegins((0, 1)),
        Request(3, 140 * MIB),
        StepEnds(),
        StepBegins((0, 2)),
        Request(4, 60 * MIB),
        StepEnds(),
    ]
    reference = PoolReplay(memory, [events], MIB)
    assert reference.replay({}) == (340 * MIB, 300 * MIB)
    reference.keep()
    assert [reference.served(i, in_the_way=False).place for i in range(4)] == [(0, 0), (0, 0), (0, 1), (0, 2)]
    ways = [reference.served(i, in_the_way=True) for i in range(reference.count(in_the_way=True))]
    assert [(one.place, one.nbytes) for one in ways] == [((0, 0), 100 * MIB), ((0, 1), 140 * MIB)]
