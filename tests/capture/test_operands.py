"""Operands that are made up to time a call: their indices, their memory, and that nothing keeps them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from monetrun.capture import operands
from monetrun.ops.registry import Call
from support.captured import captured

aten = torch.ops.aten


@given(elements=st.integers(0, 200), bound=st.integers(1, 300))
def test_spread_indices_are_in_range_and_used_evenly(elements, bound):
    x = torch.full((elements,), -1)
    operands.spread(x, bound)
    counts = torch.bincount(x, minlength=bound)
    assert len(counts) == bound
    assert counts.max() - counts.min() <= 1


def test_neighbouring_indices_are_far_apart():
    x = torch.empty(1000, dtype=torch.int32)
    operands.spread(x, 50_000)
    assert x.unique().numel() == 1000
    assert (x[1:] - x[:-1]).abs().min() > 10_000


class Indices(nn.Module):
    """Operators with indices, each into a range of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 6)
        self.register_buffer("rows", torch.zeros(4, dtype=torch.long))
        self.register_buffer("columns", torch.zeros(4, 3, dtype=torch.long))
        self.register_buffer("chosen", torch.tensor([True, False, True, True]))

    def forward(self, x):
        y = self.table(self.rows) * x  # [4, 6]
        y = y + torch.zeros_like(y).scatter_add(1, self.columns, y[:, :3].sin())
        y = y + y.gather(1, self.columns).sum(1, keepdim=True) + y.index_select(0, self.rows)
        y = y + y[self.rows, self.columns[:, 0]].view(-1, 1) + y[:, self.columns[:, 1]].sum()
        return F.cross_entropy(y, self.rows)


BOUNDS = {
    "aten.embedding.default": {50},
    "aten.embedding_dense_backward.default": {50},
    "aten.scatter_add.default": {6},
    "aten.gather.default": {6},
    "aten.index_select.default": {4},
    "aten.index.Tensor": {4, 6},
    "aten.index_put.default": {4, 6},
    "aten.nll_loss_forward.default": {6},
    "aten.nll_loss_backward.default": {6},
    "monet.log_softmax_nll_backward.default": {6},
}


def test_indices_are_spread_over_the_range_that_each_operator_accepts():
    joint = captured(Indices(), torch.randn(4, 6))
    found = {}
    for call, _ in joint.timed.values():
        found.setdefault(str(call.target), set()).update(operands.index_bounds(call).values())
        arguments, keywords = operands.make(call, spread_indices=True)
        if any(n.meta.get("val") is not None for n in call.nodes):
            call.target(*arguments, **keywords)  # a CPU checks indices
    assert {name: found[name] for name in BOUNDS} == BOUNDS
    assert not found["aten.mul.Tensor"]


def test_an_index_after_a_mask_is_into_the_dimension_behind_it():
    shapes = {"x": (2, 3, 4), "mask": (2, 3), "index": (5,)}
    graph = torch.fx.Graph()
    x, mask, index = (graph.placeholder(name) for name in shapes)
    for node, dtype in ((x, torch.float32), (mask, torch.bool), (index, torch.int64)):
        node.meta["val"] = torch.empty(shapes[node.name], dtype=dtype, device="meta")
    assert operands.index_bounds(Call(aten.index.Tensor, (x, [mask, index]))) == {index: 4}
    assert operands.index_bounds(Call(aten.index.Tensor, (x, [None, index]))) == {index: 3}


def call_of(joint, target):
    return next(call for call, _ in joint.timed.values() if call.target is target)


def test_operands_are_gone_with_their_last_user():
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8))
    call = call_of(joint, aten.tanh.default)
    gc.collect()
    gc.disable()
    try:
        ((x,), _) = operands.make(call, random=True, spread_indices=True)
        gone = weakref.ref(x)
        del x
        assert gone() is None
    finally:
        gc.enable()


def test_an_optional_operators_result_agrees_with_its_operand_in_a_trial():
    dropped = captured(nn.Sequential(nn.Linear(8, 8), _Dropout()), torch.randn(4, 8))
    trials = [calls for calls in dropped.exactness_trials.values() if "dropout_backward" in str(calls[0].target)]
    assert trials
    for call, default in trials:
        made = {}
        (grad, kept, _scale), _ = operands.make(default, made=made, random=True)
        assert 0 < kept.sum() < kept.numel()
        (same_grad, packed, _), _ = operands.make(call, made=made, random=True)
        assert same_grad is grad
        assert torch.equal(packed, torch.ops.monet.nonzero_mask(kept))


class _Dropout(nn.Module):
    def forward(self, x):
        return torch.native_dropout(x, 0.5, True)[0]


def test_an_arena_gives_tensors_one_after_the_other_until_it_is_full():
    arena = operands.Arena(2048, torch.device("cpu"))
    one = arena.new(torch.empty_strided((3, 4), (1, 3), device="meta"))
    two = arena.new(torch.empty(5, dtype=torch.bool, device="meta"))
    assert (one.shape, one.stride(), one.dtype) == ((3, 4), (1, 3), torch.float32)
    assert two.data_ptr() - one.data_ptr() == 512
    with pytest.raises(MemoryError, match="1024 bytes left, not 4000"):
        arena.new(torch.empty(1000, device="meta"))
    arena.clear()
    assert arena.new(torch.empty(7, device="meta")).data_ptr() == one.data_ptr()
