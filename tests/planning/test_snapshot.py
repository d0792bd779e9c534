"""A plan as a memory snapshot: the bytes that ``replay`` adds up, named, in the format of torch's viewer."""

import pickle
from dataclasses import replace

import pytest
from torch.cuda import _memory_viz

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.step import DeviceMemory, Segment, replay
from monetrun.planning.snapshot import snapshot
from support.step_records import chain_record


@pytest.fixture
def record():
    return chain_record(1 << 20)


def highest(found):
    """The most bytes that are held at once, and who asked for them."""
    held, peak, names = {}, 0, set()
    for entry in found["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in held
            held[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            del held[entry["addr"]]
        total = sum(e["size"] for e in held.values())
        if total > peak:
            peak, names = total, {e["frames"][0]["name"] for e in held.values()}
    return peak, names


def test_the_peak_is_the_planned_one_and_everything_in_it_has_a_name(record):
    peak, names = highest(snapshot(record, [plain_schedule(record.graphs[0])]))
    assert peak == replay(record, [plain_schedule(record.graphs[0])]).peak_bytes
    assert {"parameters", "optimizer state", "script (data, buffers, ...)"} <= names
    assert any(name.startswith("block0.relu (aten.relu)") for name in names)


def test_what_runs_again_says_so(record):
    plain = plain_schedule(record.graphs[0])
    again = Schedule(plain.forward, (Step(0), Step(1, 1), *plain.backward))
    entries = snapshot(record, [again])["device_traces"][0]
    assert "block0.linear (aten.linear, run again)" in {e["frames"][0]["name"] for e in entries}


def test_on_cuda_blocks_lie_where_the_allocator_puts_them(record):
    settings = AllocatorSettings()
    base = (Segment(False, (record.base_bytes,)),)
    on_a_device = replace(record, memory=DeviceMemory(settings, settings, 80 << 30, base))
    found = snapshot(on_a_device, [plain_schedule(record.graphs[0])])
    assert "held between steps" in highest(found)[1]


def test_torchs_viewer_reads_it(record, tmp_path):
    found = snapshot(record, [plain_schedule(record.graphs[0])])
    with (tmp_path / "plan.pickle").open("wb") as file:
        pickle.dump(found, file)
    with (tmp_path / "plan.pickle").open("rb") as file:
        page = _memory_viz.trace_plot(pickle.load(file))
    assert "Active Memory Timeline" in page
    assert "8.0MiB" in _memory_viz.trace(found)
