"""Models that cannot be captured whole, how they train, and sessions in which they do."""

import torch
import torch.nn.functional as F
from torch import nn

from support.sessions import opened_session

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.through(x))

    def through(self, x):
        raise NotImplementedError


class ShapesFromData(Net):
    def __init__(self):
        super().__init__(Block(), Block())

    def through(self, x):
        x = self.blocks[0](x)
        return self.blocks[1](x) + x.detach()[x > 0].mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(256, WIDTH, generator=generator), torch.randint(0, 5, (256,), generator=generator)


def trained(kind, steps=4):
    """Losses, state, and the generator's state after training; no tensor of the model stays."""
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {k: v.tolist() for k, v in model.state_dict().items()}
    return losses, state, torch.get_rng_state().tolist(), getattr(model, "seen", None)


def minimized(model, rate, loss_of, batches):
    """The losses of the batches, one after the other, each followed by an optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def session(**options):
    return opened_session(**{"budget": "0.95x", "solver_seconds": 0.5, "implementations": "exact", **options})
