"""Each training recipe at a small size: losses and weights under `monetrun --budget 0.7x` are those under torchrun.

Where its data do not fill a step it says so, and ends.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from support import launcher
from support.launches import set_apart, skip_without
from support.paths import RECIPES

IMAGES = "--data pictures --data-path pictures --train-crop-size 64 --val-crop-size 64 --val-resize-size 72 --workers 0"
MIXED = "--label-smoothing 0.1 --mixup-alpha 0.2 --cutmix-alpha 1 --random-erase 0.5 --auto-augment ta_wide --model-ema"
BERT = "--width 64 --layers 2 --heads 2 --length 64 --vocabulary 400 --per_device_train_batch_size 16 --max_steps 3"
QUIET = "--logging_steps 1 --report_to none --use_cpu --disable_tqdm true"

CASES = {
    "imagenet.py": (
        (),
        f"{IMAGES} {MIXED} --model mobilenet_v2 -b 16 --total-batch-size 64 --max-steps 3 --print-freq 1 "
        "--output-dir OUT",
    ),
    "unet.py": (
        (),
        "--size 64x96 --batch-size 4 --channels 8 --images 18 --epochs 1 --workers 0 --print-freq 1 --output-dir OUT",
    ),
    "gpt.py": (
        (),
        "--layers 2 --width 64 --heads 2 --length 64 --batch-size 16 --accumulate 2 --steps 3 --print-freq 1 "
        "--output-dir OUT",
    ),
    "bert_trainer.py": (
        ("transformers", "accelerate", "tokenizers"),
        f"{BERT} {QUIET} --output_dir OUT",
    ),
    "lightning_resnet.py": (
        ("lightning",),
        "--data-path pictures --model mobilenet_v2 --size 64 --batch-size 16 --epochs 1 --limit-batches 3 --workers 0 "
        "--ema 0.9 --output-dir OUT",
    ),
    "lora.py": (
        ("transformers", "peft"),
        "--model random --length 64 --batch-size 16 --steps 3 --print-freq 1 --output-dir OUT",
    ),
}

RANKS = {"imagenet.py": 2}


def weights(folder):
    """Every tensor in the files that a recipe has left, by file and name."""
    found = {}

    def collect(name, value):
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                collect(f"{name}/{key}", one)

    for path in sorted(Path(folder).rglob("*")):
        if path.suffix in (".pth", ".ckpt"):
            collect(path.name, torch.load(path, weights_only=False))
        elif path.suffix == ".safetensors":
            from safetensors.torch import load_file

            collect(path.name, load_file(path))
    return found


def losses(done, folder):
    """The lines with losses, without the times in them; Lightning writes its own to a file."""
    lines = [line for line in done.stdout.splitlines() if "loss" in line]
    metrics = Path(folder, "metrics.csv")
    lines += metrics.read_text().splitlines() if metrics.is_file() else []
    timed = ("eta:", "img/s:", "time:", "time", "data:", "mem:", "train_runtime", "train_samples", "train_steps")
    words = [line.replace(",", " ").split() for line in lines if "train_runtime" not in line]
    return [[w for k, w in enumerate(one) if not {w, one[k - 1]} & {*timed}] for one in words]


@pytest.mark.parametrize("script", CASES)
def test_a_training_recipe_imports_nothing_of_monetrun(script):
    paths, seen = [RECIPES / script], set()
    while paths:
        path = paths.pop()
        seen.add(path)
        text = path.read_text()
        assert not re.search(r"^\s*(from|import) monetrun\b", text, re.MULTILINE), path
        lines = re.findall(r"^from lib import (.+)|^from lib\.(\w+) import", text, re.MULTILINE)
        used = [name for several, one in lines for name in (one, *several.split(", ")) if name]
        paths += [p for name in used if (p := RECIPES / "lib" / f"{name}.py") not in seen]
    assert len(seen) > 1


@pytest.mark.slow
@pytest.mark.parametrize("script", CASES)
def test_a_recipe_trains_alike_under_torchrun_and_within_a_budget(script, tmp_path, monkeypatch):
    packages, options = CASES[script]
    skip_without(packages)
    set_apart(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = str(RECIPES / script)
    ranks = f"--nproc-per-node={RANKS.get(script, 1)}"
    plain = launcher.run(launcher.TORCHRUN, "--standalone", ranks, path, *options.replace("OUT", "plain").split())
    settings = ("--budget", "0.7x", "--implementations", "exact", "--solver-seconds", "1", "--strict")
    planned = launcher.run(
        launcher.MONETRUN, "--standalone", ranks, *settings, path, *options.replace("OUT", "planned").split()
    )
    assert "measured peak" in planned.stdout + planned.stderr
    assert len(losses(plain, "plain")) >= 3
    assert losses(planned, "planned") == losses(plain, "plain")
    ours, theirs = weights("planned"), weights("plain")
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


TOO_FEW = {
    "lora": (
        "--model random --text text --length 16 --batch-size 4 --steps 1",
        r"48 tokens do not fill 4 texts of 16: give a longer --text, or a smaller --batch-size or --length",
    ),
    "bert_trainer": (
        f"{BERT} {QUIET} --text text --dataloader_drop_last true --output_dir OUT --length 4",
        r"no step was trained: \d texts do not fill a batch: give a longer --text, or a smaller --per_device_train",
    ),
    "bert_trainer, less than a text": (
        f"{BERT} {QUIET} --text text --output_dir OUT",
        r"\d+ tokens do not fill a text of 64: give a longer --text, or a smaller --length",
    ),
    "lightning_resnet": (
        "--data-path images --size 16 --batch-size 4 --epochs 1 --workers 0 --output-dir OUT",
        r"no step was trained: the images in images/train do not fill a batch of 4 on each device: give a smaller",
    ),
}


@pytest.mark.parametrize("case", TOO_FEW)
def test_data_that_do_not_fill_a_step_are_refused(case, tmp_path, monkeypatch):
    script = case.partition(",")[0]
    skip_without(CASES[f"{script}.py"][0])
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("three little words, ".ljust(48, "x"))
    for part in ("train", "val"):
        Path("images", part, "a").mkdir(parents=True)
        for k in range(3):
            Image.new("RGB", (16, 16)).save(Path("images", part, "a", f"{k}.png"))
    options, message = TOO_FEW[case]
    monkeypatch.setattr(sys, "argv", [script, *options.split()])
    with pytest.raises(SystemExit, match=message):
        importlib.import_module(script).main()
    assert [path for path in (*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.ckpt"))] == []
