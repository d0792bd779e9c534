"""Train imagenet.py twice, by torchrun and by monetrun within a budget, and compare the two losses of every step.

    python recipes/same_curve.py --out recipes/results/same_curve.json

It trains on a small set of real images (lib/pictures.py) with all of the recipe that draws random numbers: crops,
TrivialAugment, Mixup, CutMix, random erasing and the network's dropout; and with label smoothing, a warm-up, and an
average of the weights. Losses and weights are compared to the bit.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from lib.pictures import GRID, WINDOW, pictures

SCRIPT = Path(__file__).with_name("imagenet.py")
DATA = "--data pictures --train-crop-size 48 --val-crop-size 48 --val-resize-size 54 --workers 0 --device cpu"
DRAWN = "--auto-augment ta_wide --random-erase 0.1 --mixup-alpha 0.2 --cutmix-alpha 1.0 --label-smoothing 0.1"
SCHEDULE = "--lr 0.01 --lr-scheduler cosineannealinglr --lr-warmup-epochs 1 --lr-warmup-method linear --epochs 10"
AVERAGE = "--norm-weight-decay 0 --model-ema --model-ema-steps 4"


def train(launcher: list[str], options: list[str], folder: Path, steps: int) -> tuple[list[str], dict[str, Any]]:
    """Each step's loss, and the checkpoint after the last one."""
    kept = folder / "losses"
    words = [str(SCRIPT), *options, f"--losses={kept}", f"--output-dir={folder}"]
    folder.mkdir()
    subprocess.run([sys.executable, "-m", *launcher, *words, f"--max-steps={steps}"], check=True)
    losses = [line.split()[1] for line in kept.read_text().splitlines()]
    return losses, torch.load(folder / "checkpoint.pth", weights_only=True)


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of tensors that are not equal to the bit."""
    return [
        f"{part}.{name}"
        for part in ("model", "average")
        for name, value in one[part].items()
        if not torch.equal(value, other[part][name])
    ]


@click.command()
@click.option("--model", default="mobilenet_v2", show_default=True)
@click.option("--batch", default=16, show_default=True, help="Images of a step.")
@click.option("--steps", default=300, show_default=True)
@click.option("--budget", default="0.7x", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON of both curves.")
def main(model: str, batch: int, steps: int, budget: str, out: Path | None) -> None:
    """Train twice and compare."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        recipe = f"--model {model} -b {batch} {DATA} {DRAWN} {SCHEDULE} {AVERAGE}"
        options = [*recipe.split(), "--data-path", str(root / "pictures")]
        plain, plain_state = train(["torch.distributed.run", "--standalone"], options, root / "plain", steps)
        plan_file = root / "plan.json"
        limits = ["--budget", budget, "--implementations", "exact"]
        subprocess.run(
            [sys.executable, "-m", "monetrun", "plan", "--out", str(plan_file), *limits, str(SCRIPT), *options],
            check=True,
        )
        launcher = ["monetrun", "--strict", "--plan", str(plan_file)]
        planned, planned_state = train(launcher, options, root / "planned", steps)
        plan = json.loads(plan_file.read_text())
    differing = different(plain_state, planned_state)
    found = {
        "recipe": recipe,
        "images": f"{WINDOW}x{WINDOW} windows of {GRID[0] * GRID[1]} tiles of {', '.join(p.name for p in pictures())}",
        "steps": steps,
        "budget": budget,
        "plain_peak_bytes": plan["plain_peak_bytes"],
        "planned_peak_bytes": plan["planned_peak_bytes"],
        "overhead": plan["overhead"],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "equal_losses": plain == planned,
        "equal_weights": not differing,
        "losses": [float(loss) for loss in planned],
    }
    if out is not None:
        out.write_text(json.dumps(found) + "\n")
    first = next((k for k, pair in enumerate(zip(plain, planned, strict=True), 1) if len({*pair}) > 1), None)
    if first is not None or differing:
        raise SystemExit(f"different from step {first} on; tensors that differ: {', '.join(differing) or 'none'}")
    click.echo(f"{steps} losses and all weights are equal to the bit; the last loss is {planned[-1]}")


if __name__ == "__main__":
    main()
