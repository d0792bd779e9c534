"""Networks of many shapes in plain PyTorch, and their inputs."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def images(batch, size, classes=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=g), torch.randint(0, classes, (batch,), generator=g)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class SmallResNet(nn.Module):
    """A stem and six blocks of 32 channels."""

    def __init__(self, channels=32, blocks=6, classes=10, dropout=0.0, broken=""):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.ModuleList(Block(channels) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, classes)
        self.broken = broken

    def forward(self, x):
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.broken == "loop" and i == len(self.blocks) // 2:
                torch._dynamo.graph_break()  # in a loop: Dynamo leaves this frame alone, and captures the blocks
        if self.broken:
            torch._dynamo.graph_break()
        return self.head(self.dropout(x.mean((2, 3))))


class TwoHalves(nn.Module):
    """Its forward prints in the middle, so that it is captured as two graphs."""

    def __init__(self):
        super().__init__()
        self.first = SmallResNet(blocks=3)
        self.second = SmallResNet(blocks=2)
        self.second.stem = nn.Conv2d(32, 32, 3, padding=1)

    def forward(self, x):
        x = self.first.stem(x)
        for block in self.first.blocks:
            x = block(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Double(nn.Sequential):
    def __init__(self, inside, out):
        super().__init__(
            nn.Conv2d(inside, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Three levels, bilinear upsampling."""

    def __init__(self, channels=16, levels=3, classes=4):
        super().__init__()
        widths = [channels * 2**i for i in range(levels + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(Double(a + b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.last = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skips.pop()], 1))
        return self.last(x)


class Attention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.heads, self.drop = heads, nn.Dropout(dropout)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = (
            a.view(b, t, self.heads, w // self.heads).transpose(1, 2) for a in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, w)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Tied embeddings, dropout, attention by SDPA; dicts in and out."""

    def __init__(self, vocabulary=256, width=128, layers=6, heads=4, length=256, dropout=0.15):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Attention(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / math.sqrt(layers))

    def forward(self, batch):
        tokens = batch["tokens"]
        x = self.drop(self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def tokens(batch, length, seed):
    return {"tokens": torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))}
