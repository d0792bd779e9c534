"""docs/integrations.md: its own lines train as without monetrun, within the budget, in other packages' trainers."""

import re
import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import monetrun
from monetrun.capture import cpu_allocator
from monetrun.runtime import session as process
from support.launches import set_apart, skip_without, without_settings
from support.paths import DOCS, SCRIPTS

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", (DOCS / "integrations.md").read_text(), re.DOTALL | re.M)
LINES = dict(BLOCKS)
BUDGET = 'BudgetCallback("0.7x", implementations="exact")'


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, tmp_path):
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    without_settings(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    yield
    monetrun.close()
    torch._dynamo.reset()


def run(lines, **names):
    """Execute lines of the page; gives the names that they leave."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers
        exec(lines, names)
    return names


def within_budget(measured):
    return 0 < measured["measured_peak_bytes"] <= measured["budget_bytes"] < measured["plain_peak_bytes"]


def plain_again():
    """Nothing of monetrun is left in torch."""
    return (
        process._session is None
        and cpu_allocator.limit_bytes() is None
        and torch.optim.Optimizer.zero_grad.__module__ == "torch.optim.optimizer"
    )


def copied(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_under_the_launcher_the_lines_change_nothing(monkeypatch, capsys):
    skip_without(("transformers", "accelerate", "lightning"))
    monkeypatch.setattr(process, "_launched", True)
    for names in (gpt_with(LINES["transformers"], steps=1), classifier_with(LINES["Lightning"])):
        assert names["budget"].measured == {}
        assert names["trainer"].state is not None
    assert "in a training step" not in capsys.readouterr().out
    assert process._session is None


# ---- transformers


class Fails(Exception):
    pass


def gpt_with(lines, steps=4, fail_at=0, folder="checkpoints"):
    """Train a GPT-2 twice by ``lines``, with accumulation, evaluation and checkpoints."""
    from transformers import TrainerCallback

    from support.scripts import real_trainer

    class FailsAt(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if fail_at and state.global_step == fail_at:
                raise Fails

    names = {"model": real_trainer.new_model(), "arguments": real_trainer.arguments(folder, steps)}
    names |= {"data": real_trainer.Tokens(128, 1), "held_out": real_trainer.Tokens(32, 2)}
    if fail_at:
        lines = lines.replace("callbacks=[", "callbacks=[failure, ")
        names["failure"] = FailsAt()
    return run(lines, **names)


def history(trainer):
    return [v for entry in trainer.state.log_history for k, v in entry.items() if k in ("loss", "eval_loss")]


def without_budget(lines):
    """The page's lines for a trainer, without the callback."""
    kept = [line for line in lines.splitlines() if "BudgetCallback" not in line and "peak" not in line]
    return "\n".join(kept).replace(", callbacks=[budget]", "")


@pytest.mark.nightly
def test_transformers_trains_evaluates_accumulates_and_saves_as_without_the_callback_also_a_second_time(tmp_path):
    skip_without(("transformers", "accelerate"))
    from safetensors.torch import load_file

    found = {}
    for kind, lines in (("plain", without_budget(LINES["transformers"])), ("planned", LINES["transformers"])):
        names = gpt_with(lines, folder=kind)
        measured = [names["budget"].measured] if kind == "planned" else []
        first = history(names["trainer"]), load_file(tmp_path / kind / "checkpoint-4" / "model.safetensors")
        assert plain_again()
        names["trainer"].train()
        measured += [names["budget"].measured] if kind == "planned" else []
        assert plain_again()
        found[kind] = (*first, history(names["trainer"]), copied(names["model"]))
    for one in measured:
        assert within_budget(one)
        assert one["steps"] == 3  # all but the first
    losses, saved, losses_again, state = found["planned"]
    assert len(losses) == len(losses_again) == 6
    assert (losses, losses_again) == (found["plain"][0], found["plain"][2])
    assert equal(saved, found["plain"][1])
    assert equal(state, found["plain"][3])


@pytest.mark.nightly
def test_transformers_ends_the_budget_when_training_raises(capsys):
    skip_without(("transformers", "accelerate"))
    with pytest.raises(Fails):
        gpt_with(LINES["transformers"], fail_at=2)
    assert plain_again()


@pytest.mark.nightly
def test_transformers_trains_on_two_ranks_as_without_the_callback(monkeypatch, tmp_path):
    skip_without(("transformers", "accelerate"))
    set_apart(monkeypatch, tmp_path)
    script = str(SCRIPTS / "trainer_callback.py")
    for words in (("plain",), ("planned", "0.8x")):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", script, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        plain, planned = (torch.load(f"{kind}.{rank}") for kind in ("plain", "planned"))
        assert within_budget(planned["measured"])
        assert len(plain["losses"]) == 3
        assert planned["losses"] == plain["losses"]
        assert equal(planned["state"], plain["state"])


# ---- Lightning


def classifier(fail_at):
    from support.scripts import real_lightning

    class FailingClassifier(real_lightning.Classifier):
        def training_step(self, batch, number):
            loss = super().training_step(batch, number)
            if fail_at and self.global_step == fail_at:
                raise Fails
            return loss

    return FailingClassifier()


def classifier_with(lines, fail_at=0):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 3, 24, 24), torch.randint(0, 10, (64,)))
    module = classifier(fail_at)
    arguments = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "accumulate_grad_batches": 2, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    loaders = {"loader": DataLoader(data, batch_size=16, shuffle=True), "held_out": DataLoader(data, batch_size=32)}
    return run(lines, module=module, arguments=arguments, **loaders)


@pytest.mark.nightly
def test_lightning_fits_validates_and_accumulates_as_without_the_callback_also_a_second_time():
    skip_without(("lightning",))
    found = {}
    for kind, lines in (("plain", without_budget(LINES["Lightning"])), ("planned", LINES["Lightning"])):
        names = found[kind] = classifier_with(lines)
        assert plain_again()
        names["trainer"].fit_loop.max_epochs = 4
        names["trainer"].fit(names["module"], names["loader"], names["held_out"])
        assert plain_again()
        names["trainer"].save_checkpoint(f"{kind}.ckpt")
    plain, planned = found["plain"], found["planned"]
    assert within_budget(planned["budget"].measured)
    assert len(plain["module"].losses) > 20
    assert planned["module"].losses == plain["module"].losses
    ours, theirs = (torch.load(f"{kind}.ckpt", weights_only=False) for kind in ("planned", "plain"))
    assert ours.keys() == theirs.keys()
    assert equal(ours["state_dict"], theirs["state_dict"])


@pytest.mark.nightly
def test_lightning_ends_the_budget_when_training_raises():
    skip_without(("lightning",))
    with pytest.raises(Fails):
        classifier_with(LINES["Lightning"], fail_at=2)
    assert plain_again()


# ---- accelerate


def with_accelerate(lines):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # transformers' Trainer leaves one without bf16
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
    layers = [layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    losses = []

    def train(accelerator, model, optimizer, loader):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(F.cross_entropy(model(data.tensors[0]), data.tensors[1]).item())

    loader = DataLoader(data, batch_size=512, shuffle=True)
    return run(lines, accelerator=accelerator, model=model, optimizer=optimizer, loader=loader, train=train) | {
        "losses": losses
    }


@pytest.mark.nightly
def test_accelerate_accumulates_in_bf16_as_without_the_budget():
    skip_without(("accelerate",))
    lines = LINES["accelerate"]
    plain = with_accelerate("\n".join(line for line in lines.splitlines() if "monetrun.apply" not in line))
    planned = with_accelerate(lines)
    assert plain["measured"] == {}
    assert within_budget(planned["measured"])
    assert planned["losses"] == plain["losses"]
    assert equal(copied(planned["model"]), copied(plain["model"]))
    assert plain_again()
