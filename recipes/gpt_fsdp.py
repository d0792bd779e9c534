"""Train a GPT of ``fully_shard``ed blocks (FSDP2) on random tokens: a plain PyTorch script.

    torchrun --nproc-per-node 8 recipes/gpt_fsdp.py --layers 32 --width 4096 --heads 32 --length 2048 --bf16
    monetrun --budget 0.6x --nproc-per-node 8 recipes/gpt_fsdp.py --layers 32 --width 4096 --heads 32 --bf16

``--keep`` has each block keep its parameters between forward and backward (``reshard_after_forward=False``).
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lib.imagenet_options import positive
from lib.place import Place, placed


class Block(nn.Module):
    """Attention, then two linear layers, each added to its input; without dropout, as in pretraining."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(args.vocabulary, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the vocabulary at each position."""
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = options.add_argument
    add("--layers", type=positive, default=6, metavar="N")
    add("--width", type=positive, default=256, metavar="N")
    add("--heads", type=positive, default=8, metavar="N")
    add("--length", type=positive, default=256, metavar="TOKENS", help="of a text")
    add("--vocabulary", type=positive, default=256, metavar="N")
    add("--batch-size", type=positive, default=8, metavar="N", help="texts of a forward pass on a device")
    add("--steps", type=positive, default=20, metavar="N")
    add("--lr", type=float, default=1e-3)
    add("--bf16", action="store_true", help="parameters are gathered as bfloat16")
    add("--keep", action="store_true", help="blocks keep their parameters between forward and backward")
    add("--print-freq", type=int, default=0, metavar="STEPS", help="0: never")
    return options.parse_args()


def fit(args: argparse.Namespace, place: Place) -> None:
    """Train as the options say."""
    torch.manual_seed(0)
    model = GPT(args).to(place.device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(place.device.type, (place.world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not args.keep)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    torch.manual_seed(place.rank)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(args.vocabulary, (args.batch_size, args.length), device=place.device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.print_freq and place.first and step % args.print_freq == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)


def main() -> None:
    args = parse()
    with placed("auto") as place:
        if not dist.is_initialized():
            raise SystemExit("give it several ranks: torchrun --nproc-per-node 2 recipes/gpt_fsdp.py")
        fit(args, place)


if __name__ == "__main__":
    main()
