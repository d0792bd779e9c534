"""A training script under FSDP2: `sharded.py OUT [--steps N] [--save FOLDER] [--load FOLDER] [--device cuda]`.

Saves losses and this rank's parts of the weights to OUT.<rank>.
"""

import argparse

import sharded_ranks
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

WIDTH, WORDS = 64, 96


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        weights = self.drop((q @ k.transpose(-2, -1) / 4).softmax(-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).flatten(-2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save", default="")
    parser.add_argument("--load", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    args = parser.parse_args()
    rank, device, mesh = sharded_ranks.begin(args.device, args.backend)
    torch.manual_seed(0)
    model = GPT(args.blocks).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if args.load:
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=args.load)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    torch.manual_seed(rank + 10 * bool(args.load))
    losses = []
    for _ in range(args.steps):
        x = torch.randint(0, WORDS, (8, args.length)).to(device)
        loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if args.save:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=args.save)
    parts = {name: value.to_local() for name, value in model.state_dict().items()}
    torch.save({"losses": losses, "state": parts}, f"{args.out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
