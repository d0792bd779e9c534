"""Train a small language model under DistributedDataParallel, in each rank with lengths of its own; keep OUT.RANK."""

import random
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed, self.qkv, self.norm = nn.Embedding(300, width), nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 300)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + F.dropout(self.perceptron(x), 0.1, self.training)
        return self.head(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
lengths = random.Random(rank)
model = nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.05)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for _ in range(7):
    tokens = torch.randint(300, (4, lengths.randint(20, 60)))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
torch.save({"losses": losses, "state": model.module.state_dict()}, f"{sys.argv[1]}.{rank}")
dist.destroy_process_group()
