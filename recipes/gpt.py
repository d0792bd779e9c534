"""Train a GPT on bytes of text: a plain PyTorch script.

    python recipes/gpt.py
    torchrun --nproc-per-node 8 recipes/gpt.py --layers 12 --width 768 --heads 12 --length 1024 --bf16
    monetrun --budget 0.5x recipes/gpt.py

Without ``--text`` it reads Python's own language reference, which ships with Python.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lib.imagenet_options import positive
from lib.paper_networks import Transformer
from lib.place import Place, placed
from lib.python_docs import read


class Text:
    """Bytes, of which batches are drawn at random; the last tenth is for validation."""

    def __init__(self, path: str, length: int, device: torch.device) -> None:
        tokens = torch.frombuffer(bytearray(read(path).encode()), dtype=torch.uint8)
        cut = len(tokens) * 9 // 10
        self.train, self.validation = tokens[:cut], tokens[cut:]
        self.length, self.device = length, device
        if len(self.validation) <= length:
            raise SystemExit(f"{path} has {len(tokens)} bytes: too few for a length of {length}")

    def batch(self, part: torch.Tensor, size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and the next one of each."""
        starts = torch.randint(len(part) - self.length, (size, 1), generator=generator)
        rows = part[starts + torch.arange(self.length + 1)].to(self.device).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def optimizer_for(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW, which decays matrices and leaves gains and biases alone."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--text", default="", metavar="FILE", help="default: Python's language reference")
    add("--layers", type=positive, default=6, metavar="N")
    add("--width", type=positive, default=256, metavar="N")
    add("--heads", type=positive, default=8, metavar="N")
    add("--length", type=positive, default=256, metavar="BYTES", help="of a text")
    add("--batch-size", type=positive, default=32, metavar="N", help="texts of a forward pass on a device")
    add("--accumulate", type=positive, default=1, metavar="N", help="forward passes of a step")
    add("--steps", type=positive, default=2000, metavar="N")
    add("--lr", type=float, default=1e-3)
    add("--warm-up", type=int, default=100, metavar="STEPS")
    add("--weight-decay", type=float, default=0.1)
    add("--clip-grad-norm", type=float, default=1.0, metavar="NORM")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--seed", type=int, default=0)
    add("--print-freq", type=positive, default=20, metavar="STEPS")
    add("--eval-freq", type=positive, default=500, metavar="STEPS")
    add("--output-dir", default="", metavar="DIR", help="for gpt.pth")
    return options.parse_args()


def fit(args: argparse.Namespace, place: Place) -> None:
    """Train as the options say."""
    device = place.device
    text = Text(args.text, args.length, device)
    torch.manual_seed(args.seed)
    model = Transformer(256, args.length, args.width, args.layers, args.heads, causal=True).to(device)
    net: nn.Module = DistributedDataParallel(model) if place.world_size > 1 else model
    optimizer = optimizer_for(model, args.lr, args.weight_decay)

    def factor(step: int) -> float:
        if step < args.warm_up:
            return (step + 1) / args.warm_up
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - args.warm_up) / max(1, args.steps - args.warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    drawn = torch.Generator().manual_seed(args.seed + place.rank)
    torch.manual_seed(args.seed + place.rank)  # of dropout
    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        net.train()
        for k in range(args.accumulate):
            tokens, targets = text.batch(text.train, args.batch_size, drawn)
            last = k == args.accumulate - 1
            with contextlib.nullcontext() if last or net is model else net.no_sync():  # type: ignore[operator]
                with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                    loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten())
                (loss / args.accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if place.first and step % args.print_freq == 0:
            seconds = time.perf_counter() - began
            print(f"step {step} loss {loss.item():.9f} time {seconds / step:.4f}", flush=True)
        if place.first and (step % args.eval_freq == 0 or step == args.steps):
            model.eval()
            with torch.no_grad():
                tokens, targets = text.batch(text.validation, args.batch_size, torch.Generator().manual_seed(0))
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            print(f"step {step} validation loss {loss.item():.9f}", flush=True)
    if place.first and args.output_dir:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), Path(args.output_dir, "gpt.pth"))


def main() -> None:
    args = parse()
    with placed("auto") as place:
        fit(args, place)


if __name__ == "__main__":
    main()
