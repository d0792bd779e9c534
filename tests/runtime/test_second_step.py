"""A trial sees the step after the recorded one until its backward begins: when the script drops its last outputs."""

import gc
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monetrun.capture import cpu_allocator
from monetrun.core.last_gradients import last_gradients_bytes
from monetrun.core.last_outputs import last_outputs_bytes, with_outputs_dropped
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import plain_schedule
from monetrun.core.step import LAST_OUTPUTS, OUTSIDE, Event, replay
from monetrun.planning.intervals import Stretch
from monetrun.runtime import probe, second_step
from monetrun.runtime.second_step import freed_outputs
from monetrun.runtime.session import Session
from monetrun.runtime.settings import PROBE, RUN, Settings
from support.step_records import chain_record

WORDS = 3000


class Left(Exception):
    """In place of the process's end."""

    def __init__(self, record):
        super().__init__()
        self.record = record


def train(steps, *, late=False):
    """A model whose logits stay in a variable until the next step has its own, or has its loss (``late``)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, WORDS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = 0
    for step in range(steps):
        tokens = torch.randint(0, WORDS, (256,))
        optimizer.zero_grad()
        if step == steps - 1 and cpu_allocator.install():
            cpu_allocator.reset_peak()
        if late:
            new = model(tokens)
            loss = F.cross_entropy(new, tokens)
            logits = new
            del new
        else:
            logits = model(tokens)
            loss = F.cross_entropy(logits, tokens)
        loss.backward()
        optimizer.step()
        peak = cpu_allocator.peak_bytes()
    assert logits is not None
    return peak


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Gives the record of a trial run of a script, and what was allocated before it."""

    def leave(record, path):
        raise Left(record)

    def run(script):
        monkeypatch.setattr(probe, "leave", leave)
        nothing = SimpleNamespace(register=lambda end: None, unregister=lambda end: None)
        monkeypatch.setattr(second_step, "atexit", nothing)
        # a thread that waits would keep the step's tensors
        never = SimpleNamespace(start=lambda: None, cancel=lambda: None)
        without_timer = SimpleNamespace(Lock=threading.Lock, Timer=lambda seconds, end: never)
        monkeypatch.setattr(second_step, "threading", without_timer)
        monkeypatch.setattr(probe, "stand_in_for_the_other_ranks", lambda *args, **kwargs: None)
        gc.collect()
        before = cpu_allocator.allocated_bytes()
        session = Session(Settings(mode=PROBE, budget="1x", record_file=str(tmp_path / "record.json")))
        session.watch_process()
        try:
            with pytest.raises(Left) as found:
                script()
            return found.value.record, before
        finally:
            session.close()
            torch._dynamo.reset()

    return run


@pytest.mark.parametrize("late", [False, True])
def test_the_plain_peak_has_outputs_that_a_variable_holds_as_long_as_it_does(late, recorded):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    before = cpu_allocator.allocated_bytes()
    true = train(4, late=late) - before
    record, before = recorded(lambda: train(3, late=late))
    plain = replay(record, [plain_schedule(g) for g in record.graphs]).peak_bytes - before
    assert last_outputs_bytes(record) >= 256 * WORDS * 4
    assert plain == pytest.approx(true, rel=0.005)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_without_a_trial_the_second_step_shows_it_and_the_third_is_planned(late, tmp_path):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    gc.collect()
    before = cpu_allocator.allocated_bytes()
    true = train(4, late=late) - before
    session = Session(Settings(mode=RUN, budget="1x", solver_seconds=1.0, report_folder=str(tmp_path)))
    session.watch_process()
    try:
        gc.collect()
        before = cpu_allocator.allocated_bytes()
        train(4, late=late)
        assert session.engine.plan.plain_peak_bytes - before == pytest.approx(true, rel=0.005)
        assert session.engine.findings()["steps"] == 2
        assert session.engine.peak_bytes == pytest.approx(session.engine.plan.planned_peak_bytes, rel=0.005)
    finally:
        session.close()
        torch._dynamo.reset()


def train_adversaries(steps, batch=4096):
    """As a GAN: inputs that only the critic's first backward holds, and samples that a variable holds to the next step.

    The samples are as large as those inputs, and the critic's first backward is the peak.
    """
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 64))
    critic = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
    peak = 0
    for step in range(steps):
        if step == steps - 1 and cpu_allocator.install():
            cpu_allocator.reset_peak()
        critic.zero_grad()
        critic(torch.randn(batch, 64)).square().mean().backward()
        peak = cpu_allocator.peak_bytes()
        fake = generator(torch.randn(batch // 4, 8).repeat(4, 1))
        critic(fake.detach()[: batch // 4]).square().mean().backward()
        of_critic.step()
        generator.zero_grad()
        critic(fake[: batch // 4]).mean().backward()
        of_generator.step()
    return peak


def test_outputs_that_a_variable_holds_count_although_inputs_as_large_were_freed(recorded):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    before = cpu_allocator.allocated_bytes()
    true = train_adversaries(4) - before
    record, before = recorded(lambda: train_adversaries(3))
    plain = replay(record, [plain_schedule(g) for g in record.graphs]).peak_bytes - before
    assert last_outputs_bytes(record) >= 4096 * 64 * 4
    assert plain == pytest.approx(true, rel=0.005)


def test_outputs_are_dropped_after_the_forward_after_which_less_is_allocated():
    def step(base, *peaks):
        kinds = [OUTSIDE, "forward", OUTSIDE, "forward", OUTSIDE]
        return [
            Stretch(k, -1 if k == OUTSIDE else 0, "", base, base + p, base) for k, p in zip(kinds, peaks, strict=True)
        ]

    first, second = step(100, 0, 10, 50, 10, 80), step(400, 0, 10, 50, 10, 45)
    assert freed_outputs(first, second, 60) == [(0, 0), (35, 35)]
    assert freed_outputs(first, second, 20) == [(0, 0), (20, 20)]
    assert freed_outputs(first, second[:3], 60) == [(0, 0)]
    record = chain_record(10)
    held = (Event(OUTSIDE, -1, 60, 60, LAST_OUTPUTS), *record.events)
    backward = next(i for i, e in enumerate(held) if e.kind == "backward")
    late = replace(record, events=(*held[:backward], Event(OUTSIDE, -1, -60, 0, LAST_OUTPUTS), *held[backward:]))
    early = with_outputs_dropped(late, [(35, 35)])
    drops = [(i, e.delta_bytes) for i, e in enumerate(early.events) if e.name == LAST_OUTPUTS]
    forward = next(i for i, e in enumerate(early.events) if e.kind == "forward")
    assert drops == [(0, 60), (forward + 1, -35), (backward + 1, -25)]
    assert with_outputs_dropped(late, [(0, 0)]) == late
    kept = with_outputs_dropped(late, [(0, 0), (0, 20)])  # seen until the optimizer began
    drops = [(i, e.delta_bytes) for i, e in enumerate(kept.events) if e.name == LAST_OUTPUTS]
    assert drops == [(0, 60), (len(kept.events) - 1, -60)]


def train_against_perturbed(steps):
    """As SAM: the perturbations of the last step are held until those of this one are made, after a backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = 0
    for step in range(steps):
        if step == steps - 1 and cpu_allocator.install():
            cpu_allocator.reset_peak()
        model(torch.randn(128, 64)).square().mean().backward()
        peak = cpu_allocator.peak_bytes() if step == steps - 1 else 0
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(0.01 * p.grad)
                p.add_(moved[-1])
        optimizer.zero_grad()
        model(torch.randn(96, 64)).square().mean().backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)
        optimizer.step()
        optimizer.zero_grad()
    return peak


def test_what_the_script_holds_beyond_a_backward_is_held_in_it(recorded):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    before = cpu_allocator.allocated_bytes()
    true = train_against_perturbed(4) - before
    record, before = recorded(lambda: train_against_perturbed(3))
    plain = replay(record, [plain_schedule(g) for g in record.graphs]).peak_bytes - before
    assert last_outputs_bytes(record) >= 64 * 256 * 4
    assert plain == pytest.approx(true, rel=0.005)


def train_keeping_gradients(steps, zero):
    """The gradients stay from step to step, and the outputs until there are new ones; ``zero``: how it zeroes them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = 0
    for step in range(steps):
        if step == steps - 1 and cpu_allocator.install():
            cpu_allocator.reset_peak()
        output = model(torch.randn(512, 256))
        output.square().mean().backward()
        optimizer.step()
        if zero == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        else:
            for p in model.parameters():
                p.grad = None if zero == "none" else p.grad.zero_()
        peak = cpu_allocator.peak_bytes()
    return peak


def recorded_with_its_peak(recorded, script):
    """The record of a script whose plain peak, which it gives, is told right."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    before = cpu_allocator.allocated_bytes()
    peak = script() - before
    gc.collect()
    record, started = recorded(script)
    assert abs(replay(*plain_step(record)).peak_bytes - started - peak) <= 0.01 * peak
    return record


@pytest.mark.parametrize("zero", ["optimizer", pytest.param("by hand", marks=pytest.mark.nightly), "none"])
def test_the_plain_peak_has_gradients_that_stay_from_step_to_step(zero, recorded):
    record = recorded_with_its_peak(recorded, lambda: train_keeping_gradients(3, zero))
    assert (last_gradients_bytes(record) > 0) == (zero != "none")


def train_in_buckets(steps, views):
    """Gradients are views of the buckets, which stay; the script frees gradients between forward and backward."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))), gradient_as_bucket_view=views
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peak = 0
    for step in range(steps):
        if step == steps - 1 and cpu_allocator.install():
            cpu_allocator.reset_peak()
        loss = model(torch.randn(512, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        peak = cpu_allocator.peak_bytes()
    return peak


@pytest.mark.parametrize("views", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_plain_peak_has_gradients_that_are_views_of_buckets_once(views, recorded):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        recorded_with_its_peak(recorded, lambda: train_in_buckets(3, views))
    finally:
        torch.distributed.destroy_process_group()
