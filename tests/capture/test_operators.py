"""Which operators may run again."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from monetrun.capture.operators import _is_in_any_order

aten = torch.ops.aten


def call(target, *args, dtype=torch.float32, device="cuda"):
    graph = fx.Graph()
    node = graph.call_function(target, args)
    with FakeTensorMode():
        node.meta["val"] = torch.empty(3, dtype=dtype, device=device)
    return node


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
        (lambda: call(aten.mul.Tensor, None, None), False),
    ],
    ids=["index_add", "on a CPU", "integers", "sorted", "not sorted", "last one", "mask", "copy", "scatter", "product"],
)
def test_kernels_that_write_in_any_order_are_told(node, adds):
    assert _is_in_any_order(node()) == adds
