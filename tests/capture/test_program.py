"""A module as a program: what the generated code computes, in the same memory, and torch's errors."""

from __future__ import annotations

import gc
import operator
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cpu_allocator, execute
from monetrun.capture import program as programs
from monetrun.core.plan import Hold, Schedule, plain_schedule
from support.captured import captured

pytestmark = pytest.mark.skipif(programs.unavailable_reason() != "", reason="there is no compiler")


class Mixed(nn.Module):
    """Lists of tensors and of numbers, several results, optional tensors, strings, dtypes, buffers that change."""

    def __init__(self):
        super().__init__()
        self.conv, self.bare = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1, bias=False)
        self.norm, self.layer = nn.BatchNorm2d(8), nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)
        self.register_buffer("table", torch.arange(16.0))

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        x = F.interpolate(self.bare(x), scale_factor=2.0, mode="bilinear")
        left, right = x.split(4, 1)
        x = torch.cat([left * 0.5, F.gelu(right, approximate="tanh")], 1)
        x = F.max_pool2d(F.dropout(x, 0.3), 2).mean((2, 3), dtype=torch.float64).float()
        x = torch.cat([x, x.softmax(-1)], 1)[:, torch.tensor([1, 0] * 8)] + self.table
        return self.head(self.layer(x))


@pytest.fixture(scope="module")
def joint():
    torch.manual_seed(0)
    return captured(Mixed(), torch.randn(4, 3, 18, 18))


def run(joint, make, holds=()):
    """Outputs and gradients bit by bit, the buffers' new values among them, and the peak over what was held."""
    plain = plain_schedule(joint.graph)
    again = [s for s in plain.forward if joint.graph.operators[s.operator].replayable]
    forward, backward = execute.build(joint, Schedule(plain.forward, (*again, *plain.backward), holds))
    forward_run, backward_run = make(forward), make(backward)
    generator = torch.Generator().manual_seed(3)
    primals = [torch.randn(v.shape, generator=generator).to(v.dtype).abs_() for v in values(joint.primals)]
    torch.manual_seed(5)
    gc.collect()
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.reset_peak()
    with torch.no_grad():
        given = list(primals)
        results = forward_run(given)
        assert given == []
        outputs, saved = results[: len(joint.outputs)], list(results[len(joint.outputs) :])
        del results
        tangents = [torch.ones_like(o) for o in outputs if o.is_floating_point()][: len(joint.tangents)]
        saved += tangents
        gradients = backward_run(saved)
        assert saved == []
    peak = cpu_allocator.peak_bytes() - before
    found = [*outputs, *gradients, *primals]
    return [None if t is None else t.numpy().tobytes() for t in found], peak


def values(nodes):
    return [node.meta["val"] for node in nodes]


def test_a_program_computes_and_holds_what_the_generated_code_does(joint):
    expected, peak = run(joint, execute.boxed)
    given, given_peak = run(joint, lambda module: programs._made(programs._Calls.of(module)))
    assert given == expected
    assert None in given  # the batch has no gradient
    assert 0 < given_peak <= peak


@pytest.mark.parametrize("make", [execute.boxed, lambda module: programs._made(programs._Calls.of(module))])
@pytest.mark.parametrize("last", [False, True])
def test_what_is_held_beside_a_step_is_held_while_it_runs_and_only_on_cuda(joint, monkeypatch, make, last):
    plain = plain_schedule(joint.graph)
    again = [s for s in plain.forward if joint.graph.operators[s.operator].replayable]
    step = len(plain.forward) + len(again) + len(plain.backward) - 1 if last else 2
    holds = (Hold(step, 64 << 20), Hold(step, 32 << 20))
    expected, peak = run(joint, make)
    assert run(joint, make, holds) == (expected, peak)
    monkeypatch.setattr(execute, "_holding_device", lambda joint: torch.device("cpu"))
    given, given_peak = run(joint, make, holds)
    assert given == expected
    assert 96 << 20 <= given_peak < (96 << 20) + peak


def test_what_is_saved_for_the_backward_is_freed_at_its_last_reader():
    big = 1 << 20
    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    for node in (first, second):
        node.meta["val"] = torch.empty(big, device="meta")
    x = first
    for value in (second, 2.0, 3.0):
        x = graph.call_function(torch.ops.aten.mul.Tensor if value is second else torch.ops.aten.mul.Scalar, (x, value))
    graph.output((x,))
    made = programs.program(torch.fx.GraphModule(nn.Module(), graph))
    gc.collect()
    arguments = [torch.ones(big), torch.ones(big)]
    cpu_allocator.reset_peak()
    before = cpu_allocator.allocated_bytes()
    (result,) = made(arguments)
    assert result[0] == 6
    assert cpu_allocator.peak_bytes() - before == 4 * big  # the product; then both inputs are gone
    assert cpu_allocator.allocated_bytes() - before == -4 * big


def test_a_result_that_nobody_reads_is_freed_at_once():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1 << 20, device="meta")
    both = graph.call_function(torch.ops.aten.sort.default, (x,))
    both.meta["val"] = (x.meta["val"],) * 2
    graph.call_function(operator.getitem, (both, 1))  # the places: nobody reads them
    y = graph.call_function(operator.getitem, (both, 0))
    graph.output((graph.call_function(torch.ops.aten.mul.Scalar, (y, 2.0)),))
    made = programs._Calls.of(torch.fx.GraphModule(nn.Module(), graph))
    sort, product = made.calls
    assert sort.freed == [0, sort.results[1]]
    assert product.freed == [sort.results[0]]


def test_errors_keep_their_types_and_free_what_was_held():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1 << 20, device="meta")
    graph.output((graph.call_function(torch.ops.aten.mul.Scalar, (x, 2.0)),))
    made = programs.program(torch.fx.GraphModule(nn.Module(), graph))
    gc.collect()
    before = cpu_allocator.allocated_bytes()
    cpu_allocator.set_limit(before + (5 << 20))
    try:
        with pytest.raises(torch.OutOfMemoryError):
            made([torch.ones(1 << 20)])
    finally:
        cpu_allocator.set_limit(None)
    gc.collect()
    assert cpu_allocator.allocated_bytes() == before


def test_other_threads_run_meanwhile():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, device="meta")
    y = x
    for _ in range(40):
        y = graph.call_function(torch.ops.aten.sort.default, (y,))
        y.meta["val"] = (x.meta["val"],) * 2
        y = graph.call_function(operator.getitem, (y, 0))
    graph.output((y,))
    made = programs.program(torch.fx.GraphModule(nn.Module(), graph))
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    made([torch.randn(1 << 20)])
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert len([t for t in ticks if started < t < ended]) > 2


def test_python_functions_are_called_between_the_programs_calls():
    seen = []

    def halves(x, factor, more=None):
        seen.append(x.clone())
        return x[:2] * factor, more[2:] * factor

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    y = graph.call_function(torch.ops.aten.add.Scalar, (x, 1.0))
    both = graph.call_function(halves, (y, 3.0), {"more": x})
    both.meta["val"] = (torch.empty(2, device="meta"),) * 2
    second = graph.call_function(operator.getitem, (both, 1))
    graph.output((graph.call_function(torch.ops.aten.neg.default, (second,)), None, x))
    made = programs.program(torch.fx.GraphModule(nn.Module(), graph))
    given = torch.arange(4.0)
    result, nothing, same = made([given])
    assert seen[0].tolist() == [1, 2, 3, 4]
    assert result.tolist() == [-6, -9]
    assert nothing is None
    assert same is given


@pytest.mark.parametrize("read", [False, True])
def test_numbers_among_a_python_functions_results(read):
    """Attention that draws again gives lengths beside tensors; where they are read, generated code runs."""

    def with_length(x):
        return x * 2, len(x), None

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    both = graph.call_function(with_length, (x,))
    both.meta["val"] = (torch.empty(4, device="meta"), 4, None)
    doubled, length = (graph.call_function(operator.getitem, (both, k)) for k in (0, 1))
    last = graph.call_function(torch.ops.aten.mul.Scalar, (doubled, length)) if read else doubled
    if not read:
        graph.erase_node(length)
    graph.output((graph.call_function(torch.ops.aten.neg.default, (last,)),))
    made = programs.program(torch.fx.GraphModule(nn.Module(), graph))
    assert (made is None) == read
    if made is not None:
        assert made([torch.arange(4.0)])[0].tolist() == [0, -2, -4, -6]


def test_what_a_program_cannot_do_is_left_to_generated_code():
    graph = torch.fx.Graph()
    number = graph.placeholder("number")
    number.meta["val"] = 3
    graph.output((graph.call_function(torch.ops.aten.full.default, ([2], number)),))
    assert programs.program(torch.fx.GraphModule(nn.Module(), graph)) is None


def test_kernels_of_ours_are_not_recorded_for_a_result_of_unknown_form(monkeypatch):
    """An implementation of an operator with several results gives one of them, and its node has the values of all."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device="meta")
    one_of_two = graph.call_function(torch.ops.aten.neg.default, (x,))
    one_of_two.meta["val"] = (torch.empty(4, device="meta"), torch.empty(2, device="meta"))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, one_of_two)),))
    asked = []
    monkeypatch.setattr(programs.kernels, "recorded", lambda target, given, device: asked.append(target))
    assert programs.program(torch.fx.GraphModule(nn.Module(), graph))([torch.ones(4)])[0].tolist() == [-1] * 4
    assert asked == [torch.ops.aten.neg.default]
