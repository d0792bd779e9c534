"""Which operators may run again."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from monetrun.capture.operators import _is_in_any_order

aten = torch.ops.aten


def call(target, *args, dtype=torch.float32, device="cuda", shape=(3,), results=0):
    """With a result of this form, or a tuple of so many."""
    graph = fx.Graph()
    node = graph.call_function(target, args)
    with FakeTensorMode():
        value = torch.empty(shape, dtype=dtype, device=device)
    node.meta["val"] = (value,) * results if results else value
    return node


def loss_of_pixels(reduction, **form):
    return call(aten.nll_loss2d_forward.default, None, None, None, reduction, -100, results=2, **form)


def indices(dtype=torch.int64):
    return call(aten.clone.default, dtype=dtype)


@pytest.mark.parametrize(
    ("node", "adds"),
    [
        (lambda: call(aten.index_add.default, None, 0, None, None), True),
        (lambda: call(aten.scatter_add.default, None, 0, None, None, device="cpu"), False),
        (lambda: call(aten.scatter_add.default, None, 0, None, None, dtype=torch.int64), False),
        (lambda: call(aten.index_put.default, None, [None], None, True), False),
        (lambda: call(aten.index_put.default, None, [None], None, True, device="cpu"), True),
        (lambda: call(aten.index_put.default, None, [indices()], None, device="cpu", dtype=torch.int64), True),
        (lambda: call(aten.index_put.default, None, [None, indices(torch.bool)], None), False),
        (lambda: call(aten.index_copy.default, None, 0, indices(), None, device="cpu"), True),
        (lambda: call(aten.scatter.src, None, 0, indices(), None), True),
        (lambda: call(aten.cumprod.default, None, 0), True),
        (lambda: call(aten.logcumsumexp.default, None, -1), True),
        (lambda: call(aten.logcumsumexp.default, None, 0, device="cpu"), False),
        (lambda: call(aten.cumprod.default, None, 1, shape=(1, 3)), True),
        (lambda: call(aten.cumprod.default, None, 1, shape=(2, 3)), False),
        (lambda: loss_of_pixels(1), True),
        (lambda: loss_of_pixels(0), False),
        (lambda: loss_of_pixels(1, device="cpu"), False),
        (lambda: call(aten.mul.Tensor, None, None), False),
    ],
    ids=[
        *("index_add", "on a CPU", "integers", "sorted", "not sorted", "last one", "mask", "copy", "scatter"),
        *("products", "logarithms", "logarithms on a CPU", "one row", "rows", "loss", "losses", "loss on a CPU"),
        "product",
    ],
)
def test_kernels_that_write_in_any_order_are_told(node, adds):
    assert _is_in_any_order(node()) == adds
