"""Whatever valid schedule runs, outputs and gradients are those of the plain one, to the bit."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import execute, operands
from monetrun.core.errors import ScheduleError
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import judge
from support.captured import captured


class Halves(nn.Module):
    """Views that one operator gives several of."""

    def __init__(self):
        super().__init__()
        self.stem, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        left, right = x.chunk(2, 1)
        y = torch.cat([right * left, F.elu(left)], 1) + 0.1
        y.mul_(x)
        y = torch.tanh(y)
        first, *_, last = (y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))).unbind(1)
        return torch.stack([first, last * 2], 1).square().mean((2, 3))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        for _ in range(2):
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).split(16, -1))
            weights = F.dropout(torch.softmax(q @ k.transpose(-2, -1) / 3, -1), 0.2, self.training)
            x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        value, gate = x.chunk(2, -1)
        return value * torch.sigmoid(gate)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1, bias=False) for c in (3, 8, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = F.relu(norm(conv(x)), inplace=True)
            x = y + x if y.shape == x.shape else F.max_pool2d(F.dropout(y, 0.3, self.training), 2)
        return F.hardswish(x).mean((2, 3))


MODELS = {"halves": (Halves, (2, 3, 6, 6)), "heads": (Heads, (2, 5, 16)), "blocks": (Blocks, (2, 3, 8, 8))}


def usable(joint):
    """For each operator the implementations that are bitwise identical to the default, whatever the weights."""
    guarded = {(g.operator, g.implementation) for g in joint.guards.guards}
    return [
        [k for k, i in enumerate(op.implementations) if i.exact and i.usable and (op.id, k) not in guarded]
        for op in joint.graph.operators
    ]


def drawn(joint, choices, draw):
    """A valid schedule with implementations and reruns by chance; None: this draw gives none."""
    graph = joint.graph
    operators = graph.operators

    def step(i):
        return Step(i, draw.choice(choices[i]) if draw.random() < 0.8 else 0)

    forward = [step(i) for i in range(graph.forward_count)]
    wanted = [step(i) for i in range(graph.forward_count, len(operators))]
    again = [i for i in range(graph.forward_count) if operators[i].replayable]
    for i in draw.choices(again, k=draw.randrange(6)):
        wanted.insert(draw.randrange(len(wanted) + 1), step(i))
    present = {t.id for t in graph.tensors if t.external}
    backward = []

    def run(one, into):
        implementation = operators[one.operator].implementations[one.implementation]
        for t in implementation.inputs:
            if t in present:
                continue
            writer = graph.writer[t]
            if into is None or not operators[writer].replayable:
                raise LookupError(t)
            run(step(writer), into)
        if not present.issuperset(implementation.inputs):
            raise LookupError(implementation.inputs)  # what was computed again for one was written over for another
        present.discard(implementation.in_place_of)
        present.update(operators[one.operator].outputs)
        if into is not None:
            into.append(one)

    try:
        for one in forward:
            run(one, None)
        saved = draw.choice([0.1, 0.3, 0.6])  # what is not saved is computed again
        present -= {t for op in operators[: graph.forward_count] for t in op.outputs if draw.random() > saved}
        for one in wanted:
            run(one, backward)
        schedule = Schedule(tuple(forward), tuple(backward))
        judge(graph, schedule)
    except (LookupError, ScheduleError):
        return None
    return schedule


def made(fake):
    real = operands.empty_like(fake)
    return real.normal_(0, 0.5) if fake.is_floating_point() else real.zero_()  # a batch norm's count


def result(joint, schedule, primals, tangents):
    """Outputs and gradients, of the same random numbers each time."""
    forward, backward = execute.build(joint, schedule)
    torch.manual_seed(5)
    with torch.no_grad():
        primals = [p.clone() for p in primals]
        outputs = forward(*primals)
        gradients = backward(*outputs[len(joint.outputs) :], *(t.clone() for t in tangents))
    return [*(o.clone() for o in outputs[: len(joint.outputs)]), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_any_valid_schedule_gives_the_plain_ones_bits(name):
    """Halves were taken from what a step in place had written over, once both were computed again."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    joint = captured(make(), torch.randn(shape))
    torch.manual_seed(1)
    primals, tangents = ([made(n.meta["val"]) for n in nodes] for nodes in (joint.primals, joint.tangents))
    choices, draw = usable(joint), random.Random(0)
    plain = result(joint, plain_schedule(joint.graph), primals, tangents)
    tried = set()
    for _ in range(3000):
        schedule = drawn(joint, choices, draw)
        if schedule is None or schedule in tried:
            continue
        tried.add(schedule)
        found = result(joint, schedule, primals, tangents)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), schedule
        if len(tried) == 60:
            break
    assert len(tried) == 60
    assert any(s.operator < joint.graph.forward_count for schedule in tried for s in schedule.backward)
