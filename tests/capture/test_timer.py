"""Timing of operators on a device that runs behind the host, which a clock without a GPU stands for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from monetrun.capture import clock, cost, execute, operands, timer
from monetrun.capture.execute import Stopwatch
from monetrun.capture.meter import CpuMeter, CudaMeter, NoMeter
from monetrun.core.graph import Costs
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.ops.registry import Call
from monetrun.runtime.call_timing import CallTiming
from support.captured import captured

aten = torch.ops.aten
CPU = torch.device("cpu")


class Device:
    """A stream: the host gives it work, which takes its own time, one thing after the other.

    Attributes:
        host: seconds of the host's clock.
        idle: when the device has done all that it was given.
        reads: how often the host waited.
    """

    def __init__(self):
        self.host = self.idle = 0.0
        self.reads = 0

    def launch(self, host_seconds, seconds):
        self.host += host_seconds
        self.idle = max(self.idle, self.host) + seconds

    def mark(self):
        self.idle = max(self.idle, self.host)
        return self.idle

    def seconds(self, start, end):
        self.reads += 1
        self.host = max(self.host, end)
        return end - start

    def wait(self, cycles):
        self.launch(0.0, cycles / timer._CYCLES_PER_SECOND)


@pytest.fixture(scope="module")
def addition():
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    (call,) = [c for c, _ in joint.timed.values() if c.target is aten.tanh.default]
    return call


def timed_calls(device, call, host_seconds, seconds, arena_bytes=0):
    """The timer's result for a call that takes so long, and the addresses of its first operand in each run."""
    addresses = []

    def run(x):
        addresses.append(x.data_ptr())
        device.launch(host_seconds, seconds(x) if callable(seconds) else seconds)

    arena = operands.Arena(arena_bytes, CPU)
    measured = timer.DeviceTimer(device, lambda: arena, device.wait, lambda: device.host)
    return measured.seconds(Call(run, call.args)), addresses


@pytest.mark.parametrize("seconds", [2e-6, 3e-5, 4e-3])
def test_the_time_is_the_devices_however_long_the_host_takes_to_launch(addition, seconds):
    device = Device()
    measured, addresses = timed_calls(device, addition, host_seconds=2e-5, seconds=seconds)
    assert measured == pytest.approx(seconds)
    repeats = min(timer._MOST_REPEATS, math.ceil(timer._BATCH_SECONDS / seconds))
    assert len(addresses) == 2 + (repeats if repeats > 1 else 0)
    assert device.reads <= 2  # not once for each call


def test_the_device_does_not_wait_again_and_again_for_what_a_first_call_prepares(addition):
    """A library that is loaded, or a kernel that is compiled, in the first call."""
    device = Device()
    first = iter([0.01])
    waits = []
    wait = device.wait

    def run(x):
        device.launch(next(first, 1e-5), 1e-5)

    device.wait = lambda cycles: (waits.append(cycles / timer._CYCLES_PER_SECOND), wait(cycles))
    measured = timer.DeviceTimer(device, lambda: operands.Arena(0, CPU), device.wait, lambda: device.host)
    assert measured.seconds(Call(run, addition.args)) == pytest.approx(1e-5)
    assert waits == pytest.approx([1.5 * 0.01, 1.5 * timer._MOST_REPEATS * 1e-5], rel=1e-4)


def test_calls_take_their_operands_in_turn_from_the_arena(addition):
    nbytes = 4 * 8 * 4
    _, addresses = timed_calls(Device(), addition, 1e-6, 1e-6, arena_bytes=3 * 512)
    assert len(set(addresses)) == 4  # one set of its own, and three in the arena
    assert all(abs(a - b) >= nbytes for a, b in itertools.pairwise(addresses))
    assert addresses[4:8] == addresses[:4]
    assert len(set(timed_calls(Device(), addition, 1e-6, 1e-6)[1])) == 1


def test_operands_that_are_in_the_cache_are_not_timed_alone(addition):
    """A kernel that is faster on operands that were used by the last call is measured as the slower one."""
    last = []

    def seconds(x):
        hit = last[-1:] == [x.data_ptr()]
        last.append(x.data_ptr())
        return 1e-5 if hit else 5e-5

    assert timed_calls(Device(), addition, 1e-6, seconds, arena_bytes=512)[0] == pytest.approx(5e-5)


class Event:
    """``torch.cuda.Event``, of which only the time is read."""

    stream = 0.0
    synchronized: list[float] = []  # noqa: RUF012

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "the current stream"
        self.time = Event.stream

    def synchronize(self):
        Event.synchronized.append(self.time)

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


def test_recomputation_on_cuda_is_timed_by_events_that_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("waits for the device"))
    monkeypatch.setattr(Event, "synchronized", [])
    timing = CallTiming(CudaMeter(torch.device("cuda", 0)))

    def backward(arguments):
        Event.stream += 3.0
        timing.extra(1.0).start()
        Event.stream += 1.0
        timing.extra(1.0).stop()
        return arguments

    run = timing.early_calls(lambda arguments: arguments, backward)
    for _ in range(6):
        assert run(["x"]) == ["x"]
    assert Event.synchronized == []
    Event.stream += 100.0  # between the calls
    assert timing.overhead() == pytest.approx(3 / 9)
    read = len(Event.synchronized)
    assert timing.overhead() == pytest.approx(3 / 9)
    assert len(Event.synchronized) == read


class Recorded:
    """A clock that is set by what the calls of a module take."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, start, end):
        return end - start


def test_of_a_slower_implementation_what_it_takes_longer_is_overhead():
    """A ReLU whose gradient comes from a mask: costs say that half of the time is extra; all of the mask is."""
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
    plain = plain_schedule(joint.graph)
    backward = next(op for op in joint.graph.operators if op.target == "aten.threshold_backward.default")
    masked = next(k for k, i in enumerate(backward.implementations) if i.name == "intermediate:mask")
    mask = next(op for op in joint.graph.operators if op.target == "monet.range_mask.default")
    steps = tuple(Step(s.operator, masked if s.operator == backward.id else 0) for s in plain.backward)
    seconds = tuple(tuple(2.0 if k == masked else 1.0 for k, _ in enumerate(row)) for row in joint.signatures)
    costs = Costs("", seconds, tuple(tuple(0 for _ in row) for row in joint.signatures))
    relu = next(k for k, s in enumerate(plain.forward) if "relu" in joint.graph.operators[s.operator].target)
    forward = (*plain.forward[: relu + 1], Step(mask.id), *plain.forward[relu + 1 :])
    for given, expected in ((costs, {1.0: ["range_mask"], 0.5: ["mask_backward"]}), (None, {1.0: ["range_mask"]})):
        found = {}
        for module in execute.build(joint, Schedule(forward, steps), given):
            watches = {}
            copy = execute.timed(module, lambda share, w=watches: w.setdefault(share, Stopwatch(Recorded())))
            running = None
            for node in [] if copy is None else copy.graph.nodes:
                if isinstance(getattr(node.target, "__self__", None), Stopwatch):
                    share = next(s for s, w in watches.items() if w is node.target.__self__)
                    running = share if node.target.__name__ == "start" else None
                elif running is not None and "monet." in str(node.target):  # views may follow
                    found.setdefault(running, []).append(str(node.target).split(".")[1])
            assert running is None
        assert found == expected


def test_what_runs_again_is_overhead():
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    plain = plain_schedule(joint.graph)
    tanh = next(op.id for op in joint.graph.operators if op.target == "aten.tanh.default")
    forward, backward = execute.build(joint, Schedule(plain.forward, (Step(tanh), *plain.backward)))
    watch = Stopwatch(Recorded())
    assert execute.timed(forward, lambda share: watch) is None
    names = [getattr(n.target, "__name__", "") for n in execute.timed(backward, {1.0: watch}.__getitem__).graph.nodes]
    assert names.index("stop") - names.index("start") == 2
    assert names[names.index("start") + 1] == "tanh.default"


def test_what_the_scripts_checkpoint_runs_again_is_none_unless_it_runs_more_often():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    joint = captured(Checkpointed(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    plain = plain_schedule(joint.graph)
    again = [step for step in plain.backward if step.operator < joint.graph.forward_count]
    assert again
    for schedule, extra in ((plain, False), (Schedule(plain.forward, (again[0], *plain.backward)), True)):
        _, backward = execute.build(joint, schedule)
        watch = Stopwatch(Recorded())
        assert (execute.timed(backward, {1.0: watch}.__getitem__) is not None) is extra


def test_a_device_that_failed_leaves_the_overhead_unknown():
    class Broken:
        def mark(self):
            return 0

        def seconds(self, start, end):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    timing = CallTiming(NoMeter())
    timing.calls = Stopwatch(Broken())
    timing.calls.start()
    timing.calls.stop()
    assert timing.overhead() is None


def test_a_cpu_is_timed_by_the_hosts_clock():
    assert isinstance(timer.timer_for(CpuMeter(), CPU), timer.HostTimer)
    assert isinstance(clock.clock_of(CpuMeter()), clock.HostClock)
    assert isinstance(clock.clock_of(CudaMeter(torch.device("cuda", 0))), clock.EventClock)


class Searching:
    """An operator that takes a megabyte in its first call, for a search, and 4 KiB in every call."""

    def __init__(self, meter):
        self.calls, self.meter = 0, meter

    def __call__(self, x):
        self.calls += 1
        self.meter.peak = self.meter.now + 4096 + (1 << 20 if self.calls == 1 else 0)
        return x


class FakeMeter(NoMeter):
    exact = True
    now = peak = 1000

    def current_bytes(self):
        return self.now

    def peak_bytes(self):
        return self.peak

    def reset_peak(self):
        self.peak = self.now


def test_what_a_first_call_searches_with_is_no_workspace(addition):
    for first_calls, expected in ((0, 4096 + (1 << 20)), (1, 4096)):
        meter = FakeMeter()
        measured = timer.HostTimer(meter)
        measured.first_calls = first_calls
        call = Call(Searching(meter), addition.args)
        assert cost._memory(call, meter, measured, torch.device("cpu"))[0] == expected
