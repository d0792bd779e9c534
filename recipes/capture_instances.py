"""Capture planning problems from well-known models on fake tensors: nothing is allocated, and nothing runs.

    python recipes/capture_instances.py [NAME...] --cost-model roofline:p100 --out recipes/instances

Each problem is one training step in fp32, the loss included, at the batch size given below (MONeT's for its five
networks). recipes/plan_instances.py plans them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib import instances, offline
from lib.paper_networks import Transformer, UNet
from monetrun.capture import roofline
from monetrun.capture.joint import JointGraph

Problem = tuple[nn.Module, tuple[Any, ...], Callable[[Any], torch.Tensor]]

PROBLEMS: dict[str, Callable[[], Problem]] = {}


def problem(function: Callable[[], Problem]) -> Callable[[], Problem]:
    PROBLEMS[function.__name__] = function
    return function


def capture(name: str) -> JointGraph:
    """The joint graph of one of ``PROBLEMS``."""
    with offline.fake_tensors():
        module, arguments, loss = PROBLEMS[name]()
        return offline.capture(module, arguments, loss=loss, name=name)


def parameter_bytes(name: str) -> int:
    """Bytes of the model's parameters and buffers."""
    with offline.fake_tensors():
        module, _, _ = PROBLEMS[name]()
        return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


# ---- networks for images


def classify(module: nn.Module, batch: int, size: int = 224) -> Problem:
    targets = torch.zeros(batch, dtype=torch.int64)
    return module, (torch.empty(batch, 3, size, size),), lambda logits: F.cross_entropy(logits, targets)


@problem
def resnet50() -> Problem:
    return classify(torchvision.models.resnet50(), 184)


@problem
def googlenet() -> Problem:
    return classify(torchvision.models.googlenet(aux_logits=False, init_weights=False), 320)


@problem
def mobilenet_v2() -> Problem:
    return classify(torchvision.models.mobilenet_v2(), 272)


@problem
def vgg16() -> Problem:
    return classify(torchvision.models.vgg16(init_weights=False), 176)


@problem
def vit_b_16() -> Problem:
    return classify(torchvision.models.vit_b_16(), 64)


@problem
def swin_t() -> Problem:
    return classify(torchvision.models.swin_t(), 64)


@problem
def convnext_tiny() -> Problem:
    return classify(torchvision.models.convnext_tiny(), 64)


@problem
def efficientnet_v2_s() -> Problem:
    return classify(torchvision.models.efficientnet_v2_s(), 64)


@problem
def densenet121() -> Problem:
    return classify(torchvision.models.densenet121(), 64)


@problem
def unet() -> Problem:
    targets = torch.empty(11, 1, 416, 608)
    loss = lambda logits: F.binary_cross_entropy_with_logits(logits, targets)  # noqa: E731
    return UNet(), (torch.empty(11, 3, 416, 608),), loss


# ---- transformers


def language(module: Transformer, vocabulary: int, batch: int, length: int) -> Problem:
    tokens, targets = (torch.zeros(batch, length, dtype=torch.int64) for _ in range(2))
    mask = () if module.causal else (torch.empty(batch, 1, 1, length),)
    return module, (tokens, *mask), lambda logits: F.cross_entropy(logits.view(-1, vocabulary), targets.view(-1))


@problem
def gpt_12() -> Problem:
    return language(Transformer(50257, 1024, 768, 12, 12, causal=True), 50257, 8, 1024)


@problem
def bert_24() -> Problem:
    return language(Transformer(30522, 512, 1024, 24, 16, causal=False), 30522, 8, 512)


@problem
def bert_24_unfused() -> Problem:
    return language(Transformer(30522, 512, 1024, 24, 16, causal=False, fused=False), 30522, 8, 512)


def rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PROBLEMS)))
@click.option("--cost-model", default="roofline:p100", show_default=True, type=click.Choice(roofline.names()[1:]))
@click.option(
    "--implementations/--no-implementations",
    default=True,
    show_default=True,
    help="Beside the default.",
)
@click.option("--out", default=Path(__file__).parent / "instances", type=click.Path(file_okay=False, path_type=Path))
def main(names: tuple[str, ...], cost_model: str, implementations: bool, out: Path) -> None:
    """Write the problems NAMES, or all."""
    out.mkdir(parents=True, exist_ok=True)
    for name in names or PROBLEMS:
        joint = capture(name)
        found = instances.problem(joint.graph, offline.costs(joint, cost_model))
        data = instances.to_json(found)
        for op in (*data["ops"], *data.get("optional_ops", ())):
            op["name"] = op["name"].rpartition(".")[2]
            op["seconds"] = rounded(op["seconds"])
            for other in op.get("implementations", ()):
                other["seconds"] = rounded(other["seconds"])
            if not implementations:
                op.pop("implementations", None)
        if not implementations:
            data.pop("optional_ops", None)
        data["seconds"] = sum(op["seconds"] for op in data["ops"])
        data.update(cost_model=cost_model, torch=torch.__version__, parameter_bytes=parameter_bytes(name))
        path = out / f"{name}.json"
        path.write_text(json.dumps(data, separators=(",", ":")) + "\n")
        click.echo(
            f"{name:18} {len(data['ops']):5} operators  plain peak {found.plain_peak_bytes / 2**30:6.2f} GiB  "
            f"gradients {found.gradient_bytes / 2**30:5.2f} GiB  {data['seconds']:.3f} s a step  "
            f"{path.stat().st_size / 1024:.0f} KiB"
        )


if __name__ == "__main__":
    main()
