"""Train a network on random data on a GPU, and print as JSON what its steps took: a plain PyTorch script.

    python recipes/gpu_training.py resnet50
    python recipes/gpu_training.py resnet50 --compile inductor --memory-budget 0.5
    monetrun --budget 0.5x recipes/gpu_training.py resnet50

The networks are the five of MONeT's paper at its batch sizes, and GPT-2's smallest with a vocabulary of 16,384: with
all of its 50,257 tokens, most of the memory would be logits, which no plan can drop. Peaks and retries are the caching
allocator's own counters; ``settled`` are the steps after the warm-up. A step's time is the median between two device
events; the host's clock gives ``wall_seconds``, the mean of the settled steps, with one wait at the end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib.paper_networks import Transformer, UNet

tv = torchvision.models
COUNTERS = {  # of torch.cuda.memory_stats
    "allocation_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
    "device_allocations": "num_device_alloc",
    "device_frees": "num_device_free",
}


@dataclass(frozen=True, slots=True)
class Size:
    """Of a network's inputs.

    Attributes:
        batch: examples in it.
        example: height and width of an image, or the length of a text.
        vocabulary: of a text's tokens; 0 for images.
    """

    batch: int
    example: tuple[int, ...]
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class Network:
    """A network.

    Attributes:
        make: the model for a size.
        paper: the size of the paper's batch, for the five of the paper.
        small: a small one, yet large enough that activations take most of the memory.
        example_mib: what training in float32 takes for one of the paper's examples: the peak divided by the batch.
    """

    make: Callable[[Size], nn.Module]
    paper: Size
    small: Size
    example_mib: float


def gpt(size: Size) -> nn.Module:
    """GPT-2's smallest; a smaller one for a small vocabulary."""
    (length,) = size.example
    width, layers, heads = (768, 12, 12) if size.vocabulary > 1000 else (256, 6, 8)
    return Transformer(size.vocabulary, length, width, layers, heads, causal=True)


def googlenet(size: Size) -> nn.Module:
    return tv.googlenet(aux_logits=False, init_weights=False)


NETWORKS = {
    "resnet50": Network(lambda size: tv.resnet50(), Size(184, (224, 224)), Size(256, (64, 64)), 84),
    "googlenet": Network(googlenet, Size(320, (224, 224)), Size(64, (64, 64)), 47),
    "mobilenet_v2": Network(lambda size: tv.mobilenet_v2(), Size(272, (224, 224)), Size(64, (64, 64)), 76),
    "vgg16": Network(lambda size: tv.vgg16(init_weights=False), Size(176, (224, 224)), Size(512, (64, 64)), 80),
    "unet": Network(lambda size: UNet(), Size(11, (416, 608)), Size(64, (64, 64)), 1282),
    "gpt": Network(gpt, Size(16, (1024,), 16384), Size(64, (256,), 512), 869),
}


# ---- one training


class Training:
    """A model, its data and its optimizer, as a user's script would write them."""

    def __init__(self, model: nn.Module, size: Size, precision: str) -> None:
        self.model, self.size, self.precision = model, size, precision
        device = next(model.parameters()).device
        if size.vocabulary:
            (length,) = size.example
            tokens = torch.randint(size.vocabulary, (size.batch, length + 1), device=device)
            self.inputs, self.next = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        else:
            self.inputs = torch.randn(size.batch, 3, *size.example, device=device)
            self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.classes = torch.arange(size.batch, device=device) % 1000
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step(self) -> torch.Tensor:
        """One training step; gives the loss."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def loss(self) -> torch.Tensor:
        """Of the batch; the forward pass runs in the wanted precision."""
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.precision)
        with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
            out = self.model(self.inputs)
            if self.size.vocabulary:
                return F.cross_entropy(out.flatten(0, 1), self.next.flatten())
            if out.dim() == 4:
                return F.binary_cross_entropy_with_logits(out, (self.inputs[:, :1] > 0).to(out.dtype))
            return F.cross_entropy(out, self.classes)


def counters(device: torch.device) -> dict[str, int]:
    """The allocator's counts so far."""
    stats = torch.cuda.memory_stats(device)
    return {name: int(stats.get(key, 0)) for name, key in COUNTERS.items()}


def peaks(device: torch.device) -> tuple[int, int]:
    """The most allocated and reserved, in bytes, since the counters were last reset."""
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def train(training: Training, warm_up: int, steps: int) -> dict[str, Any]:
    """Train for ``warm_up`` steps, then for the settled ones, of which it gives peaks, counts and seconds."""
    device = training.inputs.device
    started = time.perf_counter()
    first_loss = float(training.step())  # no loss is kept as a tensor: that would take memory from step to step
    first_seconds = time.perf_counter() - started
    whole = peaks(device)
    for _ in range(warm_up - 1):
        training.step()
        whole = highest(whole, peaks(device))
    torch.cuda.reset_peak_memory_stats(device)
    before = counters(device)
    settled = (0, 0)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        loss = training.step()
        event.record()
        settled = highest(settled, peaks(device))  # read in each step: under monetrun, peaks are counted by the step
        if event is not events[-1]:
            del loss
    torch.cuda.synchronize(device)
    wall_seconds = (time.perf_counter() - started) / steps
    after = counters(device)
    between = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    return {
        "allocated_bytes": settled[0],
        "reserved_bytes": settled[1],
        "whole_run_allocated_bytes": max(whole[0], settled[0]),
        "whole_run_reserved_bytes": max(whole[1], settled[1]),
        **{f"settled_{name}": after[name] - before[name] for name in COUNTERS},
        **after,
        "step_seconds": statistics.median(between),
        "wall_seconds": wall_seconds,
        "first_step_seconds": first_seconds,
        "losses": [value if math.isfinite(value) else None for value in (first_loss, float(loss))],
        "warm_up": warm_up,
        "steps": steps,
    }


def highest(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    """The larger of each."""
    return max(first[0], second[0]), max(first[1], second[1])


@click.command()
@click.argument("name", metavar="NETWORK", type=click.Choice(list(NETWORKS)))
@click.option("--small", is_flag=True, help="A small batch of small images or short texts.")
@click.option("--batch", type=click.IntRange(1), help="Examples in a batch; default: the paper's.")
@click.option(
    "--fill", type=click.FloatRange(0, min_open=True), help="A batch for about so much of the device's memory."
)
@click.option("--precision", type=click.Choice(("fp32", "bf16", "fp16")), default="fp32", help="fp16: with GradScaler.")
@click.option("--compile", "backend", default="", metavar="BACKEND", help="Run torch.compile with this backend.")
@click.option("--memory-budget", type=float, help="With --compile: torch's activation_memory_budget, from 0 to 1.")
@click.option("--process-group", default="", metavar="BACKEND", help="Train under DDP: nccl or gloo.")
@click.option("--cudnn/--no-cudnn", default=True, help="Whether convolutions run in cuDNN.")
@click.option("--cudnn-benchmark", is_flag=True, help="cuDNN times its algorithms at a convolution's first call.")
@click.option("--warm-up", type=click.IntRange(1), default=8, show_default=True, help="Steps before those measured.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps to measure.")
def main(
    name: str,
    small: bool,
    batch: int | None,
    fill: float | None,
    precision: str,
    backend: str,
    memory_budget: float | None,
    process_group: str,
    cudnn: bool,
    cudnn_benchmark: bool,
    warm_up: int,
    steps: int,
) -> None:
    """Train NETWORK and print what its steps took."""
    torch.backends.cudnn.enabled = cudnn
    torch.backends.cudnn.benchmark = cudnn_benchmark
    if not cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    network = NETWORKS[name]
    size = network.small if small else network.paper
    if fill is not None:
        batch = int(fill * torch.cuda.mem_get_info(device)[1] / (network.example_mib * 2**20))
    size = replace(size, batch=batch or size.batch)
    model = network.make(size).to(device).train()
    if process_group:
        torch.distributed.init_process_group(process_group)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    if backend:
        if memory_budget is not None:
            torch._functorch.config.activation_memory_budget = memory_budget
        model.compile(backend=backend, dynamic=False)
    training = Training(model, size, precision)
    found = {"network": name, "batch": size.batch, "precision": precision, **train(training, warm_up, steps)}
    if process_group:
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        click.echo(json.dumps({"training": found}))
    if backend:  # a compiler's threads may still run when the interpreter ends, which aborts it
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
