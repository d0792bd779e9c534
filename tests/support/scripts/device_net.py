"""A small convolution network on a CUDA device: ``device_net.py [STEPS]``; prints what the device held at the end."""

import json
import os
import sys

import torch
from torch import nn

rank, world = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
if world > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Conv2d(3, 48, 3, padding=1), nn.ReLU()]
for _ in range(6):
    layers += [nn.Conv2d(48, 48, 3, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)).to(device)
if world > 1:
    model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
    x = torch.randn(16, 3, 96, 96, device=device)
    y = torch.zeros(16, dtype=torch.long, device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
stats = torch.cuda.memory_stats(device)
found = {
    "rank": rank,
    "allocated": stats["allocated_bytes.all.peak"],
    "reserved": stats["reserved_bytes.all.peak"],
    "retries": stats["num_alloc_retries"],
}
print(f"DEVICE {json.dumps(found)}\n", end="", flush=True)  # one write: ranks print at the same time
