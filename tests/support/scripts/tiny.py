"""A small training script: `tiny.py OUT [--ddp] [--bucket-mb M] [--steps N] [--fail WHERE] [--lost RANK]`.

Saves losses and weights to OUT.<rank>.
"""

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn


def model():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--bucket-mb", type=float, default=25)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fail", default="")
    parser.add_argument("--hold", type=int, default=0, help="bytes that grow at the third step")
    parser.add_argument("--untried", type=int, default=0, help="bytes that only a planned run takes, before backward")
    parser.add_argument("--lost", type=int, default=-1, help="the rank whose machine is lost in the third step, once")
    args = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    net = module = model()
    if args.ddp:
        torch.distributed.init_process_group("gloo")
        net = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=args.bucket_mb)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    losses, held = [], []
    for step in range(args.steps):
        x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        if step == 2 and rank == args.lost and not os.path.exists(f"{args.out}.lost"):
            open(f"{args.out}.lost", "w").close()
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent
            os.kill(os.getpid(), signal.SIGKILL)
        if args.fail == "backward":
            raise ValueError("a bad batch")
        untried = torch.zeros(args.untried if os.environ.get("MONETRUN_MODE") == "run" else 0, dtype=torch.uint8)
        loss.backward()
        del untried
        optimizer.step()
        losses.append(loss.item())
        with open(f"{args.out}.steps", "a") as file:
            file.write(f"{rank} {step}\n")
        if args.hold and step == 1:
            held.append(torch.zeros(args.hold, dtype=torch.uint8))
    torch.save({"losses": losses, "state": module.state_dict()}, f"{args.out}.{rank}")
    if args.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
