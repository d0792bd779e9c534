"""Operands that are made up to time a call: their indices, their memory, and that nothing keeps them."""

from __future__ import annotations

import gc
import importlib.util
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from monetrun.capture import cost, integer_operands, operands
from monetrun.capture.meter import meter_for
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
        found.setdefault(str(call.target), set()).update(integer_operands.index_bounds(call).values())
        arguments, keywords = operands.make(call, spread_indices=True)
        assert integer_operands.may_be_made_up(call, "cuda")
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
    assert integer_operands.index_bounds(Call(aten.index.Tensor, (x, [mask, index]))) == {index: 4}
    assert integer_operands.index_bounds(Call(aten.index.Tensor, (x, [None, index]))) == {index: 3}


def call(target, *arguments, **keywords):
    """A call whose tensors are nodes."""
    graph = torch.fx.Graph()

    def node(value):
        made = graph.placeholder(f"x{len(graph.nodes)}")
        made.meta["val"] = value
        return made

    return Call(target, *tree_map_only(torch.Tensor, node, (arguments, keywords)))


def integers(*shape, dtype=torch.int64):
    return torch.empty(shape, dtype=dtype)


def made(of):
    arguments, keywords = operands.make(of)
    return [x for x in tree_leaves((arguments, keywords)) if isinstance(x, torch.Tensor) and not x.is_floating_point()]


def pivots():
    return integers(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.linalg_lu_solve.default, (torch.empty(2, 4, 4), pivots(), torch.empty(2, 4, 3))),
        (aten.linalg_ldl_solve.default, (torch.empty(2, 4, 4), pivots(), torch.empty(2, 4, 3))),
        (aten.lu_unpack.default, (torch.empty(2, 4, 6), pivots())),
    ],
)
def test_made_up_pivots_count_from_one(target, arguments):
    """A kernel exchanges the rows that they name, and does not check them: 0 names the memory before the block."""
    of = call(target, *arguments)
    assert [x.tolist() for x in made(of)] == [[[1, 2, 3, 4]] * 2]
    assert all(integer_operands.may_be_made_up(of, device) for device in ("cpu", "cuda"))


def test_made_up_repeats_add_up_to_the_size_that_is_given():
    """On CUDA an assertion says so, after which nothing runs on the device any more."""
    of = call(aten.repeat_interleave.Tensor, integers(7), output_size=24)
    (repeats,) = made(of)
    assert repeats.sum() == 24
    assert repeats.max() - repeats.min() <= 1
    assert integer_operands.may_be_made_up(of, "cuda")
    unknown = call(aten.repeat_interleave.Tensor, integers(7))
    assert not any(integer_operands.may_be_made_up(unknown, device) for device in ("cpu", "cuda"))


def matrices(*shapes):
    return [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]


def ends(count):
    return integers(count, dtype=torch.int32)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (((100, 32), (4, 32, 48)), [16, 48, 64, 100]),  # groups of rows
        (((4, 24, 32), (32, 100)), [16, 48, 64, 100]),  # of columns
        (((24, 100), (100, 48)), [16, 48, 64, 100]),  # of terms
    ],
)
def test_made_up_groups_are_about_as_large_as_each_other(shapes, expected):
    """With zeros all are empty, and the dearest operator of a mixture of experts seemed to be free."""
    of = call(aten._grouped_mm.default, *matrices(*shapes), ends(4))
    assert [x.tolist() for x in made(of)] == [expected]
    assert all(integer_operands.may_be_made_up(of, device) for device in ("cpu", "cuda"))


rows_of_heads, heads_of_one = torch.empty(50, 2, 8), torch.empty(1, 50, 2, 8)
seed = torch.empty(2, dtype=torch.uint64)
RAGGED = {
    "flash": lambda starts: call(
        aten._flash_attention_forward.default, *[rows_of_heads] * 3, starts, starts, 20, 20, 0.0, False, False
    ),
    "flash, backward": lambda starts: call(
        aten._flash_attention_backward.default,
        *([rows_of_heads] * 5 + [torch.empty(2, 50), starts, starts, 20, 20, 0.0, False, seed, seed]),
    ),
    "efficient": lambda starts: call(
        aten._efficient_attention_forward.default, *[heads_of_one] * 3, None, starts, starts, 20, 20, 0.0, 0
    ),
    "efficient, backward": lambda starts: call(
        aten._efficient_attention_backward.default,
        *([heads_of_one] * 4 + [None, heads_of_one, starts, starts, 20, 20, torch.empty(1, 2, 50), 0.0]),
        *(torch.empty(()), torch.empty(()), 0, False),
    ),
}
if importlib.util.find_spec("torch.nn.attention.varlen"):
    importlib.import_module("torch.nn.attention.varlen")
    RAGGED["varlen"] = lambda starts: call(
        torch.ops.torch_attn._varlen_attn.default, *[rows_of_heads] * 3, starts, starts, 20, 20
    )


@pytest.mark.parametrize("make", RAGGED.values(), ids=RAGGED)
def test_made_up_sequences_are_about_as_long_as_each_other(make):
    one = ends(4)
    of = make(one)
    assert [x.tolist() for x in made(of) if x.dtype == torch.int32] == [[0, 16, 33, 50]] * 2
    assert integer_operands.may_be_made_up(of, "cuda")
    of = make(ends(3))  # none is longer than the longest
    assert [x.tolist() for x in made(of) if x.dtype == torch.int32] == [[0, 20, 40]] * 2


def test_sequences_of_unknown_length_are_not_made_up():
    used = integers(3, dtype=torch.int32)
    given = [*[rows_of_heads] * 3, ends(4), ends(4), 20, 20, 0.0, False, False]
    assert not integer_operands.may_be_made_up(
        call(aten._flash_attention_forward.default, *given, seqused_k=used), "cuda"
    )


def test_made_up_bags_are_of_the_same_size():
    of = call(aten._embedding_bag.default, torch.empty(9, 4), integers(12), integers(4))
    assert made(of)[1].tolist() == [0, 3, 6, 9]
    of = call(aten._embedding_bag.default, torch.empty(9, 4), integers(12), integers(4), include_last_offset=True)
    assert made(of)[1].tolist() == [0, 4, 8, 12]
    given = (torch.empty(4, 5), integers(12), integers(12), integers(4), integers(4), 9, False, 0, None)
    of = call(aten._embedding_bag_dense_backward.default, *given)
    _, bag, sizes, _ = made(of)
    assert bag.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sizes.tolist() == [3, 3, 3, 3]
    assert integer_operands.may_be_made_up(of, "cuda")


x, rows, pair, one = torch.empty(4, 6), integers(4), integers(4, 6), integers(1)
image, places = torch.empty(2, 3, 8, 8), integers(2, 3, 4, 4)
attention = [torch.empty(2, 3, 8, 16)] * 4
ON_CUDA = {
    "indices": call(aten.index.Tensor, x, [rows, None]),
    "indices into integers": call(aten.gather.default, pair, 1, pair),
    "an embedding": call(aten.embedding.default, x, rows),
    "scattered integers": call(aten.scatter.src, pair, 1, pair, pair),
    "classes": call(aten.nll_loss_forward.default, x, rows, None, 1, -100),
    "labels": call(aten._ctc_loss.default, torch.empty(9, 2, 5), integers(2, 3), [9, 9], [3, 3]),
    "a max pooling's places": call(
        aten.max_pool2d_with_indices_backward.default,
        *(places.float(), image, [2, 2], [2, 2], [0, 0], [1, 1], False, places),
    ),
    "an unpooling's places": call(aten.max_unpool2d.default, places.float(), places, [8, 8]),
    "a counter's new value": call(aten.copy_.default, one, one),
    "sums": call(aten.cumsum.default, pair, 1),
    "comparisons": call(aten.eq.Tensor, pair, pair),
    "masks of integers": call(aten.masked_fill.Scalar, pair, pair > 0, 0),
    "bytes": call(aten.index.Tensor, x, [torch.empty(4, dtype=torch.uint8)]),
    "seeds": call(
        aten._scaled_dot_product_flash_attention_backward.default,
        *(*attention, attention[0], torch.empty(2, 3, 8), None, None, 8, 8, 0.0, False, one[0], one[0]),
    ),
}
NOT_ON_CUDA = {
    "lengths": call(aten.segment_reduce.default, x, "sum", lengths=rows),
    "lengths beside labels": call(aten._ctc_loss.Tensor, torch.empty(9, 2, 5), integers(2, 3), one, one),
    "offsets": call(aten._jagged_to_padded_dense_forward.default, x, [rows], [4]),
    "another library's": call(torch.ops.quantized.embedding_bag_byte_prepack.default, pair),
}


@pytest.mark.parametrize("of", ON_CUDA.values(), ids=ON_CUDA)
def test_integers_that_are_indices_or_values_are_made_up_on_cuda(of):
    assert integer_operands.may_be_made_up(of, "cuda")
    assert integer_operands.zeros_are_valid(of.target, made(of), "cuda")


@pytest.mark.parametrize("of", NOT_ON_CUDA.values(), ids=NOT_ON_CUDA)
def test_other_integers_are_not_made_up_on_cuda(of):
    assert not integer_operands.may_be_made_up(of, "cuda")
    assert integer_operands.may_be_made_up(of, "cpu")  # whose kernels check them


def test_what_must_not_run_is_estimated_and_not_called(monkeypatch):
    joint = captured(Indices(), torch.randn(4, 6))
    refused = []

    def refuse(of, device_type):
        return str(of.target) != "aten.gather.default" or refused.append(of) is not None

    monkeypatch.setattr(integer_operands, "may_be_made_up", refuse)
    known = cost.measure(joint, {}, meter_for(torch.device("cpu")), torch.device("cpu"))
    gathered = {s for s, (of, _) in joint.timed.items() if of in refused}
    assert {s for s, c in known.items() if not c.measured} == gathered != set()
    assert not any(known[s].failed for s in gathered)


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
