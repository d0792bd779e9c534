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


class Double(nn.Sequential):
    """Twice: convolution, batch normalization, ReLU."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(inside, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Ronneberger et al. (arXiv 1505.04597), padded, normalized, upsampled bilinearly; five levels from 64 channels.

    The usual PyTorch version, as in MONeT's paper: with transposed convolutions and 1024 channels at the bottom, which
    bilinear upsampling does not need, its plain step takes more than the paper's 14.32 GB.
    """

    def __init__(self, classes: int = 1) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 512]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        joined = [(512 + 512, 256), (256 + 256, 128), (128 + 128, 64), (64 + 64, 64)]
        self.join = nn.ModuleList(Double(inside, out) for inside, out in joined)
        self.last = nn.Conv2d(64, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of each pixel."""
        skips = []
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        skips.pop()
        for join in self.join:
            x = join(torch.cat([skips.pop(), self.up(x)], 1))
        return self.last(x)


@problem
def unet() -> Problem:
    targets = torch.empty(11, 1, 416, 608)
    loss = lambda logits: F.binary_cross_entropy_with_logits(logits, targets)  # noqa: E731
    return UNet(), (torch.empty(11, 3, 416, 608),), loss


# ---- transformers


class Attention(nn.Module):
    """Self-attention, fused or written out as in the first implementations."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.heads, self.dropout, self.causal, self.fused = heads, dropout, causal, fused

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attention over the positions of ``x``; ``mask`` is added to the scores."""
        batch, length, width = x.shape
        q, k, v = (
            f(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal
            )
        else:
            scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
            scores = scores if mask is None else scores + mask
            y = F.dropout(F.softmax(scores, -1), self.dropout, self.training) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Norm(nn.LayerNorm):
    """Layer normalization, fused or written out."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__(width)
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each position's features."""
        if self.fused:
            return super().forward(x)
        centered = x - x.mean(-1, keepdim=True)
        return self.weight * centered / (centered.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.bias


class Layer(nn.Module):
    """A transformer's layer; each norm comes before the layers of its residual branch (GPT) or after the sum (BERT)."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout, causal, fused)
        self.norm1, self.norm2 = Norm(width, fused), Norm(width, fused)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.first = causal

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attention, then the two linear layers, each added to its input."""
        if self.first:
            x = x + self.drop(self.attention(self.norm1(x), mask))
            return x + self.drop(self.outer(F.gelu(self.inner(self.norm2(x)))))
        x = self.norm1(x + self.drop(self.attention(x, mask)))
        return self.norm2(x + self.drop(self.outer(F.gelu(self.inner(x)))))


class Transformer(nn.Module):
    """Tied embeddings, dropout, and a head over the vocabulary: a GPT (causal), or a BERT with its mask."""

    def __init__(
        self, vocabulary: int, length: int, width: int, layers: int, heads: int, causal: bool, fused: bool = True
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop, self.norm = nn.Dropout(0.1), Norm(width, fused)
        self.layers = nn.ModuleList(Layer(width, heads, 0.1, causal, fused) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.causal = causal

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the vocabulary at each position."""
        x = self.drop(self.token(tokens) + self.position(torch.arange(tokens.shape[1])))
        x = x if self.causal else self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x) if self.causal else x)


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
