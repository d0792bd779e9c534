"""Train a small network on a GPU as many scripts do, and print what its steps took: a plain PyTorch script.

    python recipes/matrix_training.py gan
    monetrun --budget 0.6x --nproc-per-node=2 recipes/matrix_training.py cnn

Peaks and retries are the caching allocator's own counters, ``settled`` ones those after the warm-up. On a stand-in GPU,
whose kernels do nothing, large tensors take no time.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib.paper_networks import Transformer, UNet

STEPS, WARM_UP = 8, 4
CLASSES = 10


class Watch:
    """Reads the allocator's counters after each step; under monetrun, peaks are counted by the step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = 0
        self.peaks = (0, 0)
        self.retries = 0
        self.settled_retries = 0

    def step_ended(self) -> None:
        """A training step has ended."""
        self.steps += 1
        peaks = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        self.peaks = max(self.peaks[0], peaks[0]), max(self.peaks[1], peaks[1])
        retries = int(torch.cuda.memory_stats(self.device)["num_alloc_retries"])
        if self.steps > WARM_UP:
            self.settled_retries += retries - self.retries
        self.retries = retries

    def found(self) -> dict[str, int]:
        """The highest peaks in bytes, and counts."""
        return {
            "steps": self.steps,
            "allocated_bytes": self.peaks[0],
            "reserved_bytes": self.peaks[1],
            "retries": self.retries,
            "settled_retries": self.settled_retries,
        }


# ---- networks


def convolution_net(width: int = 48) -> nn.Module:
    """Convolutions with batch norm, as deep as a small ResNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def dense_net(width: int = 64) -> nn.Module:
    """A network that gives 16 values for each pixel."""
    layers: list[nn.Module] = []
    for channels in (3, width, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 16, 3, padding=1))


def gpt() -> nn.Module:
    """Four layers of a GPT."""
    return Transformer(1024, 256, 256, 4, 8, causal=True)


def vision_transformer() -> nn.Module:
    """torchvision's, with four layers."""
    size = {"image_size": 96, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 256, "mlp_dim": 1024}
    return torchvision.models.VisionTransformer(**size, dropout=0.1, num_classes=CLASSES)


def images(device: torch.device, batch: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch and its labels."""
    return torch.randn(batch, 3, 96, 96, device=device), torch.zeros(batch, dtype=torch.long, device=device)


# ---- trainings: each yields after a step


def plain(
    model: nn.Module, device: torch.device, batches: tuple[int, ...] = (64,), accumulate: int = 1
) -> Iterator[None]:
    """Classify images; ``batches`` are the examples of batches, in turn."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    number = 0
    while True:
        optimizer.zero_grad()
        for _ in range(accumulate):
            x, y = images(device, batches[number % len(batches)])
            number += 1
            (F.cross_entropy(model(x), y) / accumulate).backward()
        optimizer.step()
        yield


def half(model: nn.Module, device: torch.device, dtype: torch.dtype, first: int = 0) -> Iterator[None]:
    """Classify images under autocast, with a scaler for float16; its ``first`` steps find infinite gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    number = 0
    while True:
        x, y = images(device)
        with torch.autocast("cuda", dtype):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number < first:  # a stand-in's kernels find nothing
            flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            flags.update((d, torch.ones_like(flag)) for d, flag in flags.items())
        scaler.step(optimizer)
        scaler.update()
        number += 1
        yield


def segmentation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A U-Net."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    while True:
        x = torch.randn(16, 3, 96, 96, device=device)
        optimizer.zero_grad()
        out = model(x)
        F.binary_cross_entropy_with_logits(out, torch.zeros_like(out)).backward()
        optimizer.step()
        yield


def regression(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Images from images, in channels-last format: targets are larger than the inputs, and made with them."""
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        x = torch.randn(32, 3, 128, 128, device=device).to(memory_format=torch.channels_last)
        target = torch.randn(32, 16, 128, 128, device=device)
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield


def language(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """A language model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    while True:
        tokens = torch.zeros(16, 257, dtype=torch.long, device=device)
        with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
            out = model(tokens[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield


def gan(device: torch.device) -> Iterator[None]:
    """A generator and a critic, each with its optimizer, as DCGAN's example trains them."""
    up: list[nn.Module] = [nn.ConvTranspose2d(64, 96, 4), nn.BatchNorm2d(96), nn.ReLU()]
    down: list[nn.Module] = [nn.Conv2d(3, 48, 4, 2, 1), nn.LeakyReLU(0.2)]
    for _ in range(3):
        up += [nn.ConvTranspose2d(96, 96, 4, 2, 1, bias=False), nn.BatchNorm2d(96), nn.ReLU()]
        down += [nn.Conv2d(48, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.LeakyReLU(0.2)]
    generator = nn.Sequential(*up, nn.ConvTranspose2d(96, 3, 4, 2, 1), nn.Tanh()).to(device)
    critic = nn.Sequential(*down, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 1)).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real = torch.ones(64, 1, device=device)
    while True:
        critic.zero_grad()
        F.binary_cross_entropy_with_logits(critic(torch.randn(64, 3, 64, 64, device=device)), real).backward()
        fake = generator(torch.randn(64, 64, 1, 1, device=device))
        F.binary_cross_entropy_with_logits(critic(fake.detach()), real - 1).backward()
        of_critic.step()
        generator.zero_grad()
        F.binary_cross_entropy_with_logits(critic(fake), real).backward()
        of_generator.step()
        yield


def trainer(kind: str, watch: Watch) -> None:
    """A random BERT or GPT-2 with Hugging Face's Trainer."""
    import transformers

    class Seen(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            watch.step_ended()

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    if kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=1024, **sizes))
    else:
        config = transformers.GPT2Config(vocab_size=1024, n_positions=256, n_embd=256, n_layer=4, n_head=4)
        model = transformers.GPT2LMHeadModel(config)
    tokens = torch.zeros(256, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=2 if kind == "gpt2" else 1,
            bf16=kind == "bert",
            max_steps=STEPS,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            ddp_backend="gloo",  # a stand-in has no NCCL
            disable_tqdm=True,
        )
        data = [{"input_ids": tokens, "labels": tokens}] * (64 * STEPS)
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Seen()]).train()


def lightning(watch: Watch) -> None:
    """A convolution net in a LightningModule."""
    import lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = convolution_net()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            watch.step_ended()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    image = (torch.zeros(3, 96, 96), 0)
    loader = torch.utils.data.DataLoader([image] * (64 * STEPS), batch_size=64)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=1, accelerator="gpu", devices=1, enable_model_summary=False, **options).fit(
        Classifier(), loader
    )


Training = Callable[[Callable[[nn.Module], nn.Module], torch.device], Iterator[None]]
TRAININGS: dict[str, Training] = {
    "cnn": lambda on, device: plain(on(convolution_net()), device),
    "accumulation": lambda on, device: plain(on(convolution_net()), device, accumulate=3),
    "batch_change": lambda on, device: plain(on(convolution_net()), device, batches=(64, 64, 64, 64, 40)),
    "cnn_fp16": lambda on, device: half(on(convolution_net()), device, torch.float16),
    "cnn_fp16_skips": lambda on, device: half(on(convolution_net()), device, torch.float16, first=2),
    "cnn_bf16": lambda on, device: half(on(convolution_net()), device, torch.bfloat16),
    "unet": lambda on, device: segmentation(on(UNet()), device),
    "dense": lambda on, device: regression(on(dense_net()), device),
    "vit": lambda on, device: plain(on(vision_transformer()), device),
    "vit_bf16": lambda on, device: half(on(vision_transformer()), device, torch.bfloat16),
    "gpt": lambda on, device: language(on(gpt()), device),
    "gpt_fp16": lambda on, device: language(on(gpt()), device, torch.float16),
    "gpt_bf16": lambda on, device: language(on(gpt()), device, torch.bfloat16),
    "gan": lambda on, device: gan(device),
}
TRAINERS: dict[str, Callable[[Watch], None]] = {
    "trainer_bert": lambda watch: trainer("bert", watch),
    "trainer_gpt2": lambda watch: trainer("gpt2", watch),
    "lightning": lightning,
}


@click.command()
@click.argument("name", metavar="TRAINING", type=click.Choice([*TRAININGS, *TRAINERS]))
def main(name: str) -> None:
    """Run TRAINING and print what its steps took."""
    rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    watch = Watch(device)
    if name in TRAINERS:
        TRAINERS[name](watch)
    else:
        if ranks > 1:
            torch.distributed.init_process_group("gloo")

        def on_device(model: nn.Module) -> nn.Module:
            model.to(device)
            return nn.parallel.DistributedDataParallel(model, device_ids=[rank]) if ranks > 1 else model

        steps = TRAININGS[name](on_device, device)
        for _ in range(STEPS):
            next(steps)
            watch.step_ended()
        if ranks > 1:
            torch.distributed.destroy_process_group()
    # one write: ranks print at the same time
    print(json.dumps({"training": {"name": name, "rank": rank, **watch.found()}}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
