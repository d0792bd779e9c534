"""What is held before a step, and what its plain run takes, may change while training: losses stay eager's."""

import gc
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cost, cpu_allocator
from monetrun.capture.meter import meter_for
from monetrun.core.errors import BudgetExceeded, InfeasibleBudget
from monetrun.core.step import HELD_SINCE
from monetrun.planning import planner
from monetrun.runtime import adaptation, running_plan
from monetrun.runtime.other_shapes import OtherShapes
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from support import zoo
from support.sessions import opened_session

MIB = 1 << 20
WIDTH = 128


class Net(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))

    def forward(self, x):
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = x + F.gelu(linear(norm(x)))
        return x


@pytest.fixture(autouse=True)
def _counted():
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    gc.collect()


def pair(depth=5):
    model = Net(depth)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def minimize(optimizer, loss_of, *given):
    optimizer.zero_grad()
    loss = loss_of(*given)
    loss.backward()
    optimizer.step()
    return loss.item()


def step(model, optimizer, batch=1024):
    return minimize(optimizer, lambda: F.mse_loss(model(torch.randn(batch, WIDTH)), torch.ones(batch, WIDTH)))


def under(budget, script, **options):
    """What ``script`` gives, run as it is and under ``budget``, and the session's engine."""
    torch.manual_seed(0)
    plain = script()
    gc.collect()
    settings = Settings(mode=RUN, budget=budget, solver_seconds=1.0, implementations="exact", **options)
    session = Session(settings)
    session.watch_process()
    torch.manual_seed(0)
    try:
        planned = script()
    finally:
        session.close()
        torch._dynamo.reset()
    return plain, planned, session.engine


def plain_peaks(budget, script):
    """The session's engine, and the plain peaks of ``script``, said and measured, less what is held before."""
    meter, peaks = meter_for(torch.device("cpu")), []

    def measured():
        meter.reset_peak()
        result = script()
        peaks.append(meter.peaks().allocated_bytes)
        return result

    held = meter.current_bytes()
    plain, planned, engine = under(budget, measured)
    assert planned == plain
    return engine, engine.plan.plain_peak_bytes - held, peaks[0] - held


def test_a_planned_step_holds_what_a_plain_one_holds_when_it_is_over():
    def script():
        gc.collect()  # what tests before this one left in cycles
        model = nn.Sequential(Net(2), nn.Dropout(0.5))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        held = []
        for _ in range(3):
            loss = F.mse_loss(model(torch.randn(64, WIDTH)), torch.ones(64, WIDTH))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            held.append(cpu_allocator.allocated_bytes())  # with the loss, whose graph has the generator's state
        del model, optimizer, loss
        gc.collect()
        return held[-1] - cpu_allocator.allocated_bytes()

    plain, planned, _ = under("0.9x", script)
    assert planned == plain


def test_what_is_kept_later_and_larger_evaluations_are_planned_around_on_the_spot(capsys, monkeypatch):
    searched, baseline = [], planner.baseline

    def observed(record, frugal=None, *given, **named):
        searched.append(frugal is None)
        return baseline(record, frugal, *given, **named)

    monkeypatch.setattr(planner, "baseline", observed)

    def script():
        model, optimizer = pair()
        losses = [step(model, optimizer) for _ in range(3)]
        kept = [p.detach().clone() for p in model.parameters()]  # an EMA's copy
        for _ in range(2):
            losses.append(step(model, optimizer))
            kept.append(torch.randn(1024, WIDTH))
            with torch.no_grad():
                losses.append(model.eval()(torch.randn(1 << 15, WIDTH)).mean().item())
            model.train()
        return [*losses, *(p.sum().item() for p in model.parameters())]

    plain, planned, engine = under(str(8 * MIB), script)
    assert planned == plain
    assert engine.plan.budget_bytes == 8 * MIB
    assert engine.peak_bytes <= 8 * MIB
    err = capsys.readouterr().err
    assert 1 <= err.count("planned again within") <= 3  # not in each step
    assert len(searched) > 1
    assert not any(searched[1:])  # at length: the other ranks wait
    assert err.count("monetrun: between steps") == 1


def test_once_what_was_held_in_a_few_steps_is_gone_the_first_plan_runs_again(capsys):
    """As DistributedDataParallel's first buckets under NCCL, which stay into the second step."""

    def script():
        model, optimizer = pair()
        losses = []
        for number in range(12):
            held = torch.randn(MIB // 2) if number in (3, 4) else None
            losses.append(step(model, optimizer))
            del held
        return [*losses, *(p.sum().item() for p in model.parameters())]

    plain, planned, engine = under("0.6x", script)
    assert planned == plain
    assert engine.peak_bytes <= engine.plan.budget_bytes
    err = capsys.readouterr().err
    first = re.search(r"overhead ([+0-9.]+%)", err)[1]
    again = re.search(r"planned again within [0-9.]+ MiB, overhead ([+0-9.]+%)", err)[1]
    assert f"held no more: that plan runs again, overhead {first}\n" in err
    assert float(again[:-1]) >= float(first[:-1]) + 1
    assert HELD_SINCE not in engine.running.record.ledger


@pytest.mark.parametrize(
    ("begins", "followed_by"), [(0, "a forward"), pytest.param(1, "the optimizer", marks=pytest.mark.nightly)], ids=str
)
def test_evaluation_in_an_accumulation_that_is_left_open_is_not_within_the_budget(begins, followed_by, capsys):
    open_after = 1 if followed_by == "a forward" else 0  # evaluation after an odd number of backward passes: of two

    def script():
        model, optimizer = pair()
        batches, losses = 0, []
        for epoch in range(4):
            for _ in range(2 + open_after * (epoch % 2)):
                loss = F.mse_loss(model(torch.randn(1024, WIDTH)), torch.ones(1024, WIDTH))
                loss.backward()
                losses.append(loss.item())
                batches += 1
                last = not open_after and batches % 2 == 0
                if epoch > begins and last:
                    evaluated(model, losses)
                if batches % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch > begins and not last:
                evaluated(model, losses)
        return [*losses, *(p.sum().item() for p in model.parameters())]

    def evaluated(model, losses):
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.randn(1 << 15, WIDTH)).mean().item())
        model.train()

    plain, planned, engine = under(str(8 * MIB), script)
    assert planned == plain
    assert engine.peak_bytes <= 8 * MIB
    assert capsys.readouterr().err.count("monetrun: between steps") == 1


def test_evaluation_that_is_a_part_of_each_step_is_within_the_budget():
    def script():
        model, optimizer = pair()
        for batch in (512, 512, 512, 1 << 15):
            F.mse_loss(model(torch.randn(512, WIDTH)), torch.ones(512, WIDTH)).backward()
            with torch.no_grad():
                model(torch.randn(batch, WIDTH))
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(torch.OutOfMemoryError):
        under(str(8 * MIB), script)


def test_a_share_is_of_the_largest_plain_peak_seen(capsys):
    def script():
        model, optimizer = pair()
        losses = [step(model, optimizer, batch) for batch in (512, 512, 1024, 512)]
        other = pair()
        return losses + [step(*other, 512) for _ in range(3)]

    plain, planned, engine = under("0.7x", script)
    assert planned == plain
    plan = engine.plan
    assert plan.budget_bytes == pytest.approx(0.7 * plan.plain_peak_bytes, abs=1)
    assert engine.peak_bytes <= plan.budget_bytes
    assert "inputs of 1024x128: the plain run takes" in capsys.readouterr().err


def test_the_first_step_of_an_epoch_has_no_outputs_of_the_last_one_and_what_is_held_since_counts():
    """What it holds is less than in other steps, but it frees less: what came to be held must not pass for outputs."""

    def script():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 784), nn.Sigmoid())
        optimizer = torch.optim.Adam(model.parameters())
        data = torch.rand(4, 128, 784)
        losses = []

        def epoch():
            for x in data:
                optimizer.zero_grad()
                y = model(x)
                loss = (torch.log(1.0 + y) * torch.log(2.0 - y) + torch.pow(y - 0.5, 2) * torch.pow(y - 0.5, 4)).sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        epoch()
        held = torch.rand(64, 784)
        epoch()
        return losses, held.sum()

    plain, planned, engine = under("1.0x", script)
    assert planned == plain
    assert engine.plan.plain_peak_bytes > engine.findings()["measured_peak_bytes"] * 0.99


class Pooled(nn.Module):
    """Its last layer has most of its weights, whose gradient comes while all activations are there."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Net(4), nn.Linear(WIDTH, 8192)

    def forward(self, x):
        return self.head(self.body(x).mean(0, keepdim=True))


def test_gradients_freed_before_the_backward_are_not_in_the_plain_peak_of_other_shapes():
    """As in torchvision's scripts: the loss, ``zero_grad``, the backward."""

    def script():
        model = Pooled()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for batch in (512, 512, 512, 640, 512, 640):
            loss = model(torch.randn(batch, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    engine, said, measured = plain_peaks("0.9x", script)
    assert said == pytest.approx(measured, rel=0.005)
    assert engine.peak_bytes <= engine.plan.budget_bytes


class Widening(Pooled):
    """Its outputs are the largest tensors, and few others are saved."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 16 * WIDTH)

    def forward(self, x):
        return self.head(self.body(x))


def test_the_last_smaller_batch_fits_where_the_script_holds_the_last_outputs_until_it_has_new_ones():
    def script():
        model = Widening()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        losses = []
        for batch in (512, 512, 512, 508, 512, 508):
            optimizer.zero_grad()
            outputs = model(torch.randn(batch, WIDTH))
            loss = torch.tanh(outputs).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    engine, said, measured = plain_peaks("0.92x", script)
    assert said == pytest.approx(measured, rel=0.005)
    assert engine.peak_bytes <= engine.plan.budget_bytes


def test_what_a_steps_first_call_holds_is_in_the_plain_peak_of_other_shapes_once():
    """As in preference optimization: the model is called for what was chosen and for what was rejected."""

    def script():
        model, optimizer = pair()

        def loss(batch):
            return F.mse_loss(model(torch.randn(batch, WIDTH)), model(torch.randn(batch, WIDTH)))

        return [minimize(optimizer, loss, batch) for batch in (512, 768, 512, 768)]

    _, said, measured = plain_peaks("0.9x", script)
    assert said == pytest.approx(measured, rel=0.05)


def test_a_share_that_is_an_estimate_follows_what_another_optimizer_comes_to_hold():
    """Layers that are trained later: another graph, and an optimizer whose state is not there at its first step."""

    def script():
        model, _ = pair(10)
        model.linears[:-1].requires_grad_(False)
        model.norms[:-1].requires_grad_(False)
        losses = []
        for _ in range(2):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
            losses += [step(model, optimizer, 512) for _ in range(3)]
            model.requires_grad_(True)
        return losses

    _, said, measured = plain_peaks("1x", script)
    assert said == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
def test_what_no_schedule_fits_ends_with_the_bytes_by_kind_and_a_budget_that_does():
    def script():
        model, optimizer = pair()
        losses = [step(model, optimizer) for _ in range(3)]
        kept = torch.randn(4096, 256)
        return [*losses, step(model, optimizer), kept.sum().item()]

    with pytest.raises(BudgetExceeded) as refused:
        under(str(7 * MIB), script)
    text = str(refused.value)
    for words in (
        "no schedule fits",
        "parameters 327.5 KiB (planned 327.5 KiB)",
        "other tensors of the script 4.5 MiB",
        "fits: --budget ",
    ):
        assert words in text, text
    fitting = int(text.split("--budget ")[1].split("KiB")[0]) << 10
    assert 7 * MIB < fitting < 11 * MIB  # 4 MiB are kept


@pytest.mark.slow
@pytest.mark.parametrize(  # the second one's input alone is larger than the budget
    "batch", [4096, pytest.param(16384, marks=pytest.mark.nightly)]
)
def test_a_shape_that_cannot_fit_is_refused_with_the_sizes(batch):
    def script():
        model, optimizer = pair()
        return [step(model, optimizer, n) for n in (512, 512, batch)]

    with pytest.raises(InfeasibleBudget, match=rf"inputs of {batch}x128 needs .* are held before it"):
        under(str(4 * MIB), script)


@pytest.mark.parametrize("caught", [torch.OutOfMemoryError, pytest.param(RuntimeError, marks=pytest.mark.nightly)])
def test_scripts_that_skip_a_batch_for_which_memory_runs_out_skip_what_cannot_fit(caught):
    said = []

    def script():
        model, optimizer = pair()
        losses = []
        for n in (512, 512, 4096, 512, 256, 512):
            x, y = torch.randn(n, WIDTH), torch.ones(n, WIDTH)
            try:
                losses.append(minimize(optimizer, lambda x=x, y=y: F.mse_loss(model(x), y)))
            except caught as error:
                said.append((*error.args, error.exit_code))
                optimizer.zero_grad()
            else:
                del losses[2:3]  # that of the plain run, where the batch fits
        return losses[-1] > 0

    plain, planned, engine = under(str(4 * MIB), script)
    assert (plain, planned) == (True, True)
    ((message, exit_code),) = said
    assert " out of memory." in message  # as accelerate looks, in the one argument
    assert "DefaultCPUAllocator: can't allocate memory" in message  # as Lightning does
    assert exit_code == InfeasibleBudget.exit_code
    assert engine.meters.steps.steps >= 3
    assert engine.peak_bytes <= 4 * MIB


def test_a_closures_backward_is_no_part_of_the_optimizers_state():
    states = []

    def script():
        model, optimizer = pair()
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(torch.randn(512, WIDTH)), torch.ones(512, WIDTH)).backward()

            def closure():
                loss = F.mse_loss(model(torch.randn(512, WIDTH)), torch.ones(512, WIDTH))
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        states.append(sum(v.nbytes for s in optimizer.state.values() for v in s.values()))
        return losses

    plain, planned, engine = under("0.8x", script)
    assert planned == plain
    assert engine.plan.ledger["optimizer state"] == pytest.approx(states[0], rel=0.01)


@pytest.mark.slow
def test_a_new_batch_size_takes_no_rounding_implementation_that_saves_little(monkeypatch):
    chosen, measure, schedule_plainly = [], cost.measure, OtherShapes.schedule

    def schedule(self, new, step, *, estimated):
        step, found = schedule_plainly(self, new, step, estimated=estimated)
        chosen.append(adaptation.inexact(step.graphs[0], found))
        return step, found

    monkeypatch.setattr(OtherShapes, "schedule", schedule)
    # by estimated seconds: what saves little is then no matter of chance
    monkeypatch.setattr(cost, "measure", lambda *given, **named: measure(*given, **{**named, "rounds": 0}))
    session = Session(Settings(mode=RUN, budget="0.7x", solver_seconds=4.0))
    session.watch_process()
    torch.manual_seed(0)
    try:
        model = zoo.SmallResNet(channels=16, blocks=3, dropout=0.1)
        optimizer = zoo.sgd(model)
        for batch in (16, 16, 20):
            x, y = zoo.images(batch, 48)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    finally:
        session.close()
        torch._dynamo.reset()
    assert chosen == [[]]  # the batch of 20 took convolutions in parts, which fit but are not needed


@pytest.mark.parametrize("most_steps", [pytest.param(1_000_000, marks=pytest.mark.nightly), 100])
def test_a_schedule_made_for_one_number_runs_for_the_next_ones(most_steps, monkeypatch):
    """A model that is given the number of the epoch, say: nothing is solved anew for each, and few are kept."""
    monkeypatch.setattr(running_plan, "_most_steps", lambda: most_steps)
    solved, adapted = [], adaptation.adapted_schedule
    monkeypatch.setattr(adaptation, "adapted_schedule", lambda *given: (solved.append(given), adapted(*given))[1])

    class Scheduled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net(5)

        def forward(self, x, epoch):
            return self.net(x) + 0.01 * epoch

    def script():
        model = Scheduled()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def loss(epoch):
            return model(torch.randn(512, WIDTH), epoch).square().mean()

        return [minimize(optimizer, loss, epoch) for epoch in range(7)]

    plain, planned, engine = under("0.8x", script)
    assert planned == plain
    assert len(solved) <= 2
    assert len(engine.running.schedules) == (7 if most_steps > 100 else 2)


@pytest.mark.parametrize("skipped", [(), (4, 7)], ids=["no step", "some steps"])
def test_a_step_that_is_skipped_keeps_its_graph_until_the_next_loss_is_there(skipped, capsys):
    """The share is of what the plain run then takes, which has kept all activations of that forward."""
    meter = meter_for(torch.device("cpu"))

    def train():
        torch.manual_seed(0)
        convolutions = [
            layer
            for a, b in ((3, 32), (32, 32))
            for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        ]
        model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
        optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
        losses = []
        meter.reset_peak()
        for number in range(10):
            x, y = torch.randn(16, 3, 40, 40), torch.randint(0, 5, (16,))
            loss = F.cross_entropy(model(x), y)
            if number in skipped:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, meter.peak_bytes()

    before = meter.current_bytes()
    expected, plain_peak = train()
    with opened_session(budget="0.7x", solver_seconds=1.0, implementations="exact") as opened:
        found, _ = train()
        told = opened.engine.findings()
        plan = opened.engine.plan
    assert found == expected
    assert told["measured_peak_bytes"] <= plan.budget_bytes
    assert plan.plain_peak_bytes == pytest.approx(plain_peak - before, rel=0.02)
