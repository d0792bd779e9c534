"""A network of torchvision under FSDP2: `sharded_network.py OUT [--steps N] [--device cuda] [--backend B] [--keep]`.

Saves losses and this rank's parts of the weights to OUT.<rank>.
"""

import argparse

import sharded_ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch.distributed.fsdp import fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--size", type=int, default=160)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    rank, device, mesh = sharded_ranks.begin(args.device, args.backend)
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(device)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            fully_shard(block, mesh=mesh, reshard_after_forward=not args.keep)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.manual_seed(rank)
    losses = []
    for _ in range(args.steps):
        images = torch.randn(16, 3, args.size, args.size).to(device)
        labels = torch.randint(0, 10, (16,)).to(device)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parts = {k: v.to_local() if hasattr(v, "to_local") else v for k, v in model.state_dict().items()}
    torch.save({"losses": losses, "state": parts}, f"{args.out}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
