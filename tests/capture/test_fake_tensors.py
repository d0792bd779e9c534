"""Trial runs on fake tensors: the bytes of a real run, and a clear error where a script needs a tensor's value."""

import contextlib
import gc
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lib import networks
from monetrun.capture import cpu_allocator, fake_tensors
from monetrun.core.errors import CaptureFailed
from monetrun.core.plan import plain_schedule
from monetrun.core.step import replay
from monetrun.launcher.job import Job
from monetrun.launcher.parser import launch_parser
from monetrun.runtime import session as session_module
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from support import zoo


@contextlib.contextmanager
def running_fake():
    with contextlib.ExitStack() as undo:
        fake_tensors.start(undo)
        yield fake_tensors.meter()


def recorded(train, *, on_fake_tensors):
    """The record of one training step, without bytes that other tests left allocated, and the schedules that it ran."""
    gc.collect()
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    held = 0 if on_fake_tensors else cpu_allocator.allocated_bytes()
    session = Session(Settings(mode=RUN, budget="1x", cost_model="roofline:p100"))
    with contextlib.ExitStack() as undo:
        undo.callback(torch._dynamo.reset)
        undo.callback(session.close)
        if on_fake_tensors:
            fake_tensors.start(undo)
        session.watch_process()
        train()
        recorder = session.engine.recorder
        record = recorder.record(recorder.measure(None))
        return replace(record, base_bytes=record.base_bytes - held), recorder.schedules


def small_cnn():
    zoo.classify(networks.SmallResNet(blocks=2, dropout=0.1), 1, 16, 64)


def small_gpt():
    model = networks.GPT(layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(networks.tokens(8, 256, 0))["loss"]
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert math.isfinite(loss.item())
    optimizer.step()


@pytest.mark.parametrize("train", [small_cnn, pytest.param(small_gpt, marks=pytest.mark.nightly)])
def test_a_fake_trial_plans_the_same_bytes_as_a_real_one(train):
    (real, _), (imagined, frugal) = (recorded(train, on_fake_tensors=f) for f in (False, True))
    assert [g.fingerprint for g in imagined.graphs] == [g.fingerprint for g in real.graphs]
    assert imagined.base_bytes == pytest.approx(real.base_bytes, rel=0.01)
    for name in ("parameters", "gradients", "optimizer state"):
        assert imagined.ledger[name] == pytest.approx(real.ledger[name], rel=0.01)
    peaks = []
    for schedules in ([plain_schedule(g) for g in real.graphs], frugal):
        expected, found = (replay(record, schedules).peak_bytes for record in (real, imagined))
        assert found == pytest.approx(expected, rel=0.03)
        peaks.append(found)
    assert peaks[1] < 0.7 * peaks[0]
    assert imagined.device == "roofline:p100"


def test_the_meter_counts_each_storage_once_until_its_last_view_is_freed():
    with running_fake() as meter:
        x = torch.empty(1 << 20)
        view = x.view(1024, 1024)[:512]
        assert meter.current_bytes() == 4 << 20
        del x
        assert meter.current_bytes() == 4 << 20
        del view
        assert meter.current_bytes() == 0
        assert meter.peak_bytes() == 4 << 20
        torch.relu_(torch.empty(1 << 20))
        torch.empty(1 << 20).add(1.0)
        assert meter.peak_bytes() == 8 << 20
        meter.reset_peak()
        assert meter.peak_bytes() == 0
    assert fake_tensors.meter() is None
    assert not isinstance(torch.empty(1), torch._subclasses.FakeTensor)


def test_a_loss_can_be_logged_and_averaged_but_not_compared():
    with running_fake():
        loss = F.mse_loss(torch.ones(4), torch.zeros(4))
        value = loss.item()
        assert f"{loss:.2f} {value:.2f} {(2 * value + 1) / 3:.2f}" == "1.00 1.00 1.00"
        assert math.isfinite(value)
        for decide in (lambda: value < 0.5, lambda: (value + 1) / 2 > 3, lambda: bool(value), lambda: value == 1.0):
            with pytest.raises(CaptureFailed, match=r"test_fake_tensors\.py:\d+ needs the value of a tensor"):
                decide()
        assert torch.tensor(3.5).item() == 3.5  # a fake tensor made of a number has a value


def test_a_scaler_finds_no_overflow():
    with running_fake():
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert len(optimizer.state) == 2


@pytest.mark.parametrize(
    "look",
    [
        lambda t: bool((t > 0).any()),
        lambda t: int(t.sum()),
        lambda t: t.long().sum().item(),
        lambda t: t.long().tolist(),
        lambda t: t[t > 0],
        lambda t: t.numpy(),
        lambda t: t.nonzero(),
    ],
)
def test_an_operator_that_needs_values_fails_with_the_scripts_line(look):
    with running_fake():
        line = look.__code__.co_firstlineno
        with pytest.raises(CaptureFailed, match=rf"test_fake_tensors\.py:{line} needs the value of a tensor") as error:
            look(torch.randn(8))
        assert "--cost-model measured" in error.value.hint


@pytest.mark.parametrize("module", [session_module, fake_tensors], ids=lambda m: m.__name__)
def test_the_error_names_the_scripts_line_where_monetruns_or_torchs_code_needs_the_value(module):
    look = {}
    exec(compile("def look(t): return bool(t > 0)", module.__file__, "exec"), look)
    with running_fake():
        line = sys._getframe().f_lineno + 2
        with pytest.raises(CaptureFailed, match=rf"test_fake_tensors\.py:{line} needs the value of a tensor"):
            look["look"](torch.randn(()))


SCRIPT = """
import copy, sys, torch, torch.nn.functional as F, torchvision
from torch.utils.data import DataLoader

class Images(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        x = torch.rand(3, 96, 96)
        assert x.sum().item() > 0  # data is real
        return x, i % 10

model = torchvision.models.squeezenet1_1(num_classes=10)
ema = copy.deepcopy(model)
assert not list(model.parameters())[0] is list(ema.parameters())[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
torch.save(model.state_dict(), sys.argv[0] + ".pt")
for x, y in DataLoader(Images(), batch_size=16, shuffle=True, num_workers=2):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if "best" in sys.argv and loss.item() < 3: print("best")
    optimizer.step()
raise SystemExit("the trial ends at the first step")
"""


def plan(tmp_path, *words):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "monetrun", *words[:1], "--no-cache", "--solver-seconds", "1", *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=1200, check=False)


@pytest.mark.nightly
def test_an_unmodified_script_is_planned_for_a_device_that_is_not_present(tmp_path):
    done = plan(tmp_path, "plan", "--cost-model", "roofline:p100", "--budget", "0.7x", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    plan_ = json.loads(done.stdout)
    assert plan_["device"] == "roofline:p100"
    assert plan_["planned_peak_bytes"] <= plan_["budget_bytes"] == int(0.7 * plan_["plain_peak_bytes"])
    assert plan_["ledger"]["parameters"] == sum(p.nbytes for p in _squeezenet().parameters())
    assert "nothing was measured" in done.stderr
    assert not (tmp_path / "train.py.pt").exists()


def _squeezenet():
    import torchvision

    return torchvision.models.squeezenet1_1(num_classes=10)


@pytest.mark.nightly
def test_a_script_that_needs_values_ends_with_82_and_its_line(tmp_path):
    done = plan(tmp_path, "plan", "--cost-model", "roofline:p100", "--budget", "0.7x", "train.py", "best")
    assert done.returncode == 82
    line = 1 + SCRIPT.splitlines().index('    if "best" in sys.argv and loss.item() < 3: print("best")')
    assert f"train.py:{line} needs the value of a tensor (Tensor.item())" in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--cost-model", "roofline:p100", "train.py"), "plans for a device that is not here"),
        (("plan", "--cost-model", "roofline:z9", "train.py"), "'roofline:z9' is none of the cost models"),
    ],
)
def test_cost_models_that_cannot_be_used_are_refused(tmp_path, words, why):
    done = plan(tmp_path, *words) if words[0] == "plan" else plan(tmp_path, "--quiet", *words)
    assert done.returncode == 2
    assert why in done.stderr


def test_a_percentage_budget_is_of_the_named_devices_memory():
    words = ["--cost-model", "roofline:h200", "--budget", "80%", "--no-cache", "train.py"]
    job = Job(launch_parser().parse_launch(words)[0])
    try:
        assert job.budget_bytes() == pytest.approx(0.8 * (143771 << 20), rel=0.01)
    finally:
        job.close()
