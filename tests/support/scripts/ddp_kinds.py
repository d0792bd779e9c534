"""DistributedDataParallel as scripts use it: `ddp_kinds.py OUT KIND ...`, for kinds of ``KINDS``.

Saves losses and weights to OUT.<rank>.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

KINDS = ("unused", "static", "view", "hook", "join", "no_sync", "gan", "restart")
STEPS = 5


def stack(width, depth, out):
    layers = [nn.Linear(64, width), nn.GELU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, out))


class Branches(nn.Module):
    """One of two branches takes part in each step, another one on each rank where ``by_rank``."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = stack(256, 2, 64), nn.Linear(64, 10)
        self.left, self.right = stack(256, 2, 64), stack(256, 2, 64)

    def forward(self, x, right):
        x = self.stem(x)
        return self.head((self.right if right else self.left)(x))


def batch(rows=2048):
    return torch.randn(rows, 64), torch.randint(0, 10, (rows,))


def one_model(kinds, rank, out):
    net = Branches() if "unused" in kinds else stack(256, 6, 10)
    ddp = DistributedDataParallel(
        net,
        bucket_cap_mb=0.5,
        find_unused_parameters="unused" in kinds,
        static_graph="static" in kinds,
        gradient_as_bucket_view="view" in kinds,
    )
    if "hook" in kinds:
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    begin = 0
    if "restart" in kinds and os.path.exists(f"{out}.checkpoint"):
        kept = torch.load(f"{out}.checkpoint", weights_only=True)
        ddp.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        begin = kept["step"]
    losses = []
    steps = range(begin, STEPS + (rank if "join" in kinds else 0))
    with ddp.join() if "join" in kinds else contextlib.nullcontext():
        for step in steps:
            torch.manual_seed(100 * step + rank)
            rounds = 3 if "no_sync" in kinds else 1
            for turn in range(rounds):
                x, y = batch()
                given = (x, (step + rank) % 2 == 1) if "unused" in kinds else (x,)
                with ddp.no_sync() if turn + 1 < rounds else contextlib.nullcontext():
                    loss = F.cross_entropy(ddp(*given), y) / rounds
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if "restart" in kinds and step == 2 and not begin:
                if rank == 0:
                    state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, f"{out}.checkpoint")
                break
    return losses, net.state_dict()


def gan(rank):
    make, judge = stack(256, 4, 64), stack(256, 4, 1)
    maker, judging = DistributedDataParallel(make), DistributedDataParallel(judge, broadcast_buffers=False)
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (maker, judging)]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        real, noise = torch.randn(256, 64), torch.randn(256, 64)
        optimizers[1].zero_grad()
        fake = maker(noise)
        loss = F.softplus(-judging(real)).mean() + F.softplus(judging(fake.detach())).mean()
        loss.backward()
        optimizers[1].step()
        losses.append(loss.item())
        optimizers[0].zero_grad()
        loss = F.softplus(-judging(fake)).mean()
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
    return losses, {**make.state_dict(prefix="make."), **judge.state_dict(prefix="judge.")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("kinds", choices=KINDS, nargs="+")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    losses, state = gan(rank) if "gan" in args.kinds else one_model(args.kinds, rank, args.out)
    torch.save({"losses": losses, "state": state}, f"{args.out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
