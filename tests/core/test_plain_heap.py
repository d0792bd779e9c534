"""What the plain run would have reserved, once its steps are other ones than those of the trial run."""

from dataclasses import replace

import pytest

from monetrun.core.plain_heap import PlainHeap
from monetrun.core.plain_step import plain_step
from monetrun.core.reserved import reserved_under
from monetrun.core.step import Segment, replay
from support.step_records import MIB, chain_record, on_a_device


@pytest.fixture
def record():
    return on_a_device(chain_record(10))


def measured(record, reserved_bytes):
    return replace(record, memory=replace(record.memory, plain_reserved_bytes=reserved_bytes))


def modelled(record):
    return reserved_under(*plain_step(record), record.memory.plain_settings).peak_bytes


def test_before_anything_else_it_is_what_was_measured_or_what_the_model_has(record):
    assert PlainHeap(record).reserved_bytes == modelled(record)
    assert PlainHeap(measured(record, 77 * MIB)).reserved_bytes == 77 * MIB


def test_a_larger_step_takes_what_it_needs_and_fills_what_is_free(record):
    larger = replace(chain_record(30), memory=None)
    larger = replace(on_a_device(larger), memory=None)
    heap = PlainHeap(record)
    before = heap.reserved_bytes
    heap.run(larger, [3 * MIB])
    peak = replay(*plain_step(larger)).peak_bytes
    assert peak <= heap.reserved_bytes < before + peak


def test_the_same_step_again_takes_nothing_more_and_a_smaller_one_does_not_lower_it(record):
    heap = PlainHeap(record)
    for step in (record, record, replace(on_a_device(chain_record(4)), memory=None)):
        heap.run(step, [record.base_bytes])
        assert heap.reserved_bytes == modelled(record)


def test_what_is_held_counts(record):
    heap = PlainHeap(record)
    heap.run(record, [record.base_bytes, 500 * MIB])
    assert heap.reserved_bytes >= 500 * MIB + replay(*plain_step(record)).peak_bytes - record.base_bytes


def test_a_record_without_the_devices_memory_is_refused(record):
    with pytest.raises(ValueError, match="memory"):
        PlainHeap(replace(record, memory=None))


def test_cublas_takes_its_workspaces_when_a_pass_first_calls_it(record):
    """Among the activations that are there then, and not below all of them as under a plan."""
    graph = record.graphs[0]
    last = max(op.id for op in graph.operators if op.phase == "forward")
    operators = [
        replace(op, target="aten.addmm.default" if op.id == last or op.phase == "backward" else "aten.relu.default")
        for op in graph.operators
    ]
    held = (*record.memory.base, Segment(False, (32 * MIB, 32 * MIB)))
    memory = replace(record.memory, library_bytes=64 * MIB, base=held)
    late = replace(record, graphs=(replace(graph, operators=tuple(operators)),), memory=memory)
    first = replace(late, memory=replace(memory, library_bytes=0))
    assert PlainHeap(late).recorded.allocated_peak_bytes == PlainHeap(first).recorded.allocated_peak_bytes
    assert PlainHeap(late).reserved_bytes != PlainHeap(first).reserved_bytes
