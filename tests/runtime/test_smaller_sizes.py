"""New sizes that are smaller than known ones run as they are where the plain step has room enough."""

import pytest
import torch
from torch import nn

from monetrun.capture import open_sizes
from monetrun.runtime.smaller_sizes import SmallerSizes
from support.models_in_parts import WIDTH, Block, minimized
from support.sessions import opened_session


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, 4)

    def forward(self, x, scale=1.0):
        return self.head(self.blocks(x)) * scale


LENGTHS = [64, 200, 256, 90, 130, 200, 255, 31, 17, 300, 299, 64, 5]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, WIDTH, generator=generator) for length in LENGTHS]


@pytest.mark.parametrize(("budget", "captured"), [("1GiB", 4), ("0.9x", 8)])
def test_only_what_is_larger_than_all_before_is_captured_where_there_is_room(budget, captured, monkeypatch):
    fixed, original = [], open_sizes.with_numbers
    monkeypatch.setattr(open_sizes, "with_numbers", lambda *given: fixed.append(1) or original(*given))

    def script():
        torch.manual_seed(0)
        model = Net()
        return minimized(model, 0.05, lambda x: model(x).square().mean(), batches())

    plain = script()
    del fixed[:]
    with opened_session(budget=budget, solver_seconds=0.5, implementations="exact") as opened:
        assert script() == plain
        assert opened.engine is not None
        within = opened.engine.running.plan.budget_bytes
        assert opened.engine.peak_bytes <= within
    if budget == "1GiB":
        assert len(fixed) <= captured  # 200, 256, 300, and the one with which sizes were left open
    else:
        assert len(fixed) >= captured


def test_calls_are_compared_in_all_that_decides_their_graph():
    sizes, x = SmallerSizes(), torch.zeros(8, 4)
    for given in ((x, torch.zeros(3)), (x.double(), torch.zeros(9))):
        sizes.captured(["graph"], 0, given, {})
    sizes.captured(["one", "another"], 0, (torch.zeros(99, 4), torch.zeros(99)), {})

    def small(*args, fits=True, **kwargs):
        return sizes.are_small(lambda graph: fits and graph == "graph", args, kwargs)

    y = torch.zeros(2)
    assert small(torch.zeros(7, 4), y)
    assert not small(torch.zeros(7, 4), y, fits=False)
    assert not small(torch.zeros(9, 4), y)
    assert not small(x, torch.zeros(3))  # it is known
    assert not small(torch.zeros(7, 4).double(), torch.zeros(10))
    assert small(torch.zeros(7, 4).double(), torch.zeros(9))
    assert not small(torch.zeros(7, 4, requires_grad=True), y)
    assert not small(torch.zeros(7, 4), y, scale=2.0)
    assert not small([torch.zeros(7, 4), y])
    with torch.autocast("cpu", torch.bfloat16):
        assert not small(torch.zeros(7, 4), y)
    sizes.captured(["graph"], 1, (torch.zeros(2, 4), y), {})
    assert not small(torch.zeros(7, 4), y)  # nothing else is known any more


def test_nested_tensors_are_neither_smaller_nor_larger_than_others():
    def script():
        torch.manual_seed(0)
        model = Net()

        def loss_of(texts):
            return model(torch.nested.nested_tensor(texts, layout=torch.jagged)).values().square().mean()

        texts = [[torch.randn(n, WIDTH) for n in lengths] for lengths in ((9, 30), (40, 12), (20, 20), (9, 30), (5, 3))]
        return minimized(model, 0.05, loss_of, texts)

    plain = script()
    with opened_session(budget="1GiB", solver_seconds=0.5, implementations="exact"):
        assert script() == plain
