"""What the history and the snapshots of CUDA's caching allocator tell, on a stand-in GPU."""

from support.on_stand_in import needs_stand_in, printed_by

pytestmark = needs_stand_in

SCRIPT = """
import json
import torch
from monetrun.capture.allocator_history import AllocatorHistory

torch.empty(1, device="cuda")
history = AllocatorHistory(torch.device("cuda"))
history.start()
kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    del kept
print(json.dumps(history.piece()))
"""


def test_a_request_that_fails_is_none():
    assert printed_by(SCRIPT) == [3 << 20, -1]


GAPS = """
import json
import torch
from monetrun.capture import allocator_history
from monetrun.core.caching_allocator import CachingAllocator

MIB = 1 << 20
device = torch.device("cuda")


def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)


kept = [take(mib) for mib in (31, 75, 33, 90, 20)]
kept[1] = kept[3] = None
torch.cuda.empty_cache()  # two gaps, with parts of pages on both sides
model = CachingAllocator(allocator_history.present_settings(), 4 << 30)
segments = allocator_history.segments(device)
for segment in segments:
    model.load(segment.small, segment.blocks, gap_bytes=segment.gap_bytes)
found = [[model.reserved_bytes, torch.cuda.memory_reserved()]]
for mib in (70, 30, 85, 12, 200):
    kept.append(take(mib))
    model.allocate(mib * MIB)
    found.append([model.reserved_bytes, torch.cuda.memory_reserved()])
print(json.dumps([[s.gap_bytes // MIB for s in segments], found]))
"""


def test_gaps_between_segments_are_filled_as_torchs_allocator_fills_them(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gaps, reserved = printed_by(GAPS)
    assert gaps[0] == 0
    assert [gap > 0 for gap in gaps[1:]] == [True, True]
    assert [modelled for modelled, _ in reserved] == [real for _, real in reserved]


UNCACHED = """
import json
import torch
from monetrun.capture.allocator_history import other_allocator

print(json.dumps([other_allocator(torch.device(name)) for name in ("cuda", "cpu")]))
"""


def test_an_allocator_that_caches_nothing_is_another_one(monkeypatch):
    """Torch then counts nothing: neither a budget nor a plain peak could be told."""
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert printed_by(UNCACHED) == ["of PYTORCH_NO_CUDA_MEMORY_CACHING", ""]


STREAMS = """
import json
import torch
from torch import nn
from monetrun.core.errors import CaptureFailed
from monetrun.runtime import breaks

side = torch.cuda.Stream()

def waits(x):
    torch.cuda.current_stream().wait_stream(side)
    return x * 2

def runs_there(x):
    with torch.cuda.stream(side):
        return x * 2

def refusal(function):
    found = []

    def compiler(module, inputs):
        try:
            breaks.check(module)
        except CaptureFailed as error:
            found.append(error.message)
        return module

    torch.compile(function, backend=compiler, fullgraph=True)(torch.ones(4, device="cuda"))
    return found

print(json.dumps([refusal(waits), refusal(runs_there), refusal(lambda x: x * 2)]))
"""


def test_a_forward_that_waits_for_a_stream_or_runs_on_one_is_refused():
    reason = "its forward uses CUDA streams, on which a graph's operators would not run"
    assert printed_by(STREAMS) == [[reason], [reason], []]


GIVEN_BACK = """
import json
import torch
from monetrun.capture.allocator_history import AllocatorHistory

MIB = 1 << 20
torch.empty(1, device="cuda")
side, other = torch.cuda.Stream(), torch.cuda.Stream()


def take(stream, mib):
    with torch.cuda.stream(stream):
        torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


take(other, 40)
history = AllocatorHistory(torch.device("cuda"))
history.start()
take(side, 100)
history.piece()
torch.cuda.empty_cache()  # what is measured between two pieces may do so
take(side, 20)
history.piece()
history.stop()
print(json.dumps(history.other_streams_bytes() // MIB))
"""


def test_what_other_streams_had_reserved_counts_though_it_was_given_back():
    assert printed_by(GIVEN_BACK) == 100 + 2 + 40 + 2
