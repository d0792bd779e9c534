"""Training scripts of many shapes, as a user would write them: nothing here imports monetrun.

``train(case)`` gives losses and all weights and buffers, so that planned training can be compared with eager training
bit by bit.
"""

import copy

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from lib.networks import GPT, SmallResNet, TwoHalves, UNet, images, tokens

CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


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


# ---- cases


@case
def resnet50(steps):
    return classify(torchvision.models.resnet50(), steps, 8, 96, classes=1000)


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
    model = GPT(layers=1, width=32, length=64)
    optimizer = sgd(model)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        out = model(tokens(8, 64 - 3 * step, step))
        out["loss"].backward()
        optimizer.step()
        losses.append(out["loss"].item())
    return losses, [model]


@case
def small_resnet(steps):
    return classify(SmallResNet(), steps, 16, 64)


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
    model = SmallResNet(blocks=2)
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
    model = SmallResNet(blocks=2, dropout=0.1)
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
        x, y = images(8, 32, seed=step)  # a CPU without instructions for bfloat16 is slow
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
        x, y = images(4, 16, seed=step)  # a CPU without instructions for bfloat16 is slow
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
    return classify(torchvision.models.resnet18(num_classes=10, zero_init_residual=True), steps, 16, 64)


@case
def mobilenet_v2(steps):
    return classify(torchvision.models.mobilenet_v2(num_classes=10), steps, 8, 96)


@case
def vgg16(steps):
    model = torchvision.models.vgg16(num_classes=10)
    # a head of 128 features: with 4096, copies of its weights are most of the time and of the peak
    model.classifier[0], model.classifier[3], model.classifier[6] = (
        nn.Linear(512 * 7 * 7, 128),
        nn.Linear(128, 128),
        nn.Linear(128, 10),
    )
    return classify(model, steps, 4, 96)


@case
def googlenet(steps):
    return classify(torchvision.models.googlenet(num_classes=10, aux_logits=False, init_weights=False), steps, 8, 80)


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
