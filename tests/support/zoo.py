"""Training scripts of many shapes, unmodified PyTorch: `python zoo.py CASE --out FILE` trains and saves what came out.

Nothing here knows monetrun. `train(case)` gives losses and all weights and buffers, for comparison bit by bit.
"""

import argparse
import contextlib
import copy
import math

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def images(batch, size, classes=10, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, size, size, generator=g), torch.randint(0, classes, (batch,), generator=g)


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def classify(model, steps, batch, size, between=None, classes=10):
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, y = images(batch, size, classes, seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if between:
            between(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


# ---- models


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


# ---- cases


@case
def resnet50(steps):
    return classify(torchvision.models.resnet50(), steps, 16, 160, classes=1000)


@case
def unet(steps):
    model = UNet()
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, _ = images(4, 128, seed=step)
        y = (x.sum(1) > 0).long()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


@case
def gpt(steps):
    model = GPT()
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        out = model(tokens(8, 256, step))
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
    return losses, [model]


@case
def lengths(steps):
    """A new sequence length at every step, the longest first."""
    model = GPT(layers=3)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        out = model(tokens(8, 256 - 9 * step, step))
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
    return losses, [model]


@case
def small_resnet(steps):
    return classify(SmallResNet(), steps, 16, 128)


@case
def graph_break(steps):
    return classify(TwoHalves(), steps, 16, 64)


@case
def graph_break_in_loop(steps):
    return classify(SmallResNet(blocks=4, broken="loop"), steps, 16, 64)


@case
def sequential(steps):
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Dropout(0.45)]
    return classify(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), steps, 16, 64)


@case
def accumulation(steps):
    model = SmallResNet(blocks=4)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            x, y = images(16, 64, seed=10 * step + part)
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses, [model]


@case
def teacher(steps):
    torch.manual_seed(5)
    elder = SmallResNet(blocks=2)
    for p in elder.parameters():
        p.requires_grad_(False)
    model = SmallResNet(blocks=4, dropout=0.1)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, _ = images(16, 64, seed=step)
        with torch.no_grad():
            wanted = elder(x)
        optimizer.zero_grad()
        loss = F.kl_div(F.log_softmax(model(x), -1), F.log_softmax(wanted, -1), log_target=True, reduction="batchmean")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model, elder]


@case
def gan(steps):
    make = nn.Sequential(
        nn.Linear(16, 64 * 8 * 8),
        nn.Unflatten(1, (64, 8, 8)),
        nn.ConvTranspose2d(64, 48, 4, 2, 1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.ConvTranspose2d(48, 32, 4, 2, 1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 3, 4, 2, 1),
        nn.Tanh(),
    )
    judge = nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 16 * 16, 1),
    )
    for_make, for_judge = sgd(make, 1e-3), sgd(judge, 1e-3)
    losses = []
    for step in range(steps):
        real, _ = images(16, 64, seed=step)
        noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
        fake = make(noise)
        for_judge.zero_grad()
        loss_judge = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        loss_judge.backward()
        for_judge.step()
        for_make.zero_grad()
        loss_make = F.softplus(-judge(fake)).mean()
        loss_make.backward()
        for_make.step()
        losses += [loss_judge.item(), loss_make.item()]
    return losses, [make, judge]


@case
def autocast(steps):
    model = SmallResNet(blocks=4)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, y = images(16, 64, seed=step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


@case
def scaler(steps):
    model = SmallResNet(blocks=4)
    optimizer = sgd(model)
    scale = torch.amp.GradScaler("cpu")
    losses = []
    for step in range(steps):
        x, y = images(16, 64, seed=step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        losses.append(loss.item())
    return losses, [model]


@case
def clipping(steps):
    return classify(
        SmallResNet(blocks=4), steps, 16, 64, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    )


@case
def evaluation(steps):
    """An eval pass between steps, over the BatchNorm statistics."""
    model = SmallResNet(blocks=4, dropout=0.2)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, y = images(16, 64, seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            losses += [loss.item(), F.cross_entropy(model(x[:5]), y[:5]).item()]
        model.train()
    return losses, [model]


@case
def last_batch(steps):
    model = SmallResNet(blocks=4, dropout=0.1)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        x, y = images(16 if step % 3 != 2 else 5, 64, seed=step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [model]


@case
def zero_init(steps):
    return classify(torchvision.models.resnet18(num_classes=10, zero_init_residual=True), steps, 32, 96)


@case
def mobilenet_v2(steps):
    return classify(torchvision.models.mobilenet_v2(num_classes=10), steps, 16, 96)


@case
def vgg16(steps):
    return classify(torchvision.models.vgg16(num_classes=10), steps, 16, 96)


@case
def googlenet(steps):
    return classify(torchvision.models.googlenet(num_classes=10, aux_logits=False, init_weights=False), steps, 16, 112)


@case
def adam_ema(steps):
    """Adam, gradients kept through zero_grad(set_to_none=False), and an averaged copy of the model."""
    model = SmallResNet(blocks=4)
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x, y = images(16, 64, seed=step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(b, 0.1)
        losses.append(loss.item())
    return losses, [model, average]


def train(name, steps=4):
    torch.manual_seed(0)
    losses, models = CASES[name](steps)
    state = {f"{i}.{k}": v.clone() for i, m in enumerate(models) for k, v in m.state_dict().items()}
    return losses, state


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out")
    args = parser.parse_args()
    losses, state = train(args.case, args.steps)
    with contextlib.suppress(TypeError):
        print(" ".join(f"{loss:.6f}" for loss in losses))
    if args.out:
        torch.save({"losses": losses, "state": state}, args.out)


if __name__ == "__main__":
    main()
