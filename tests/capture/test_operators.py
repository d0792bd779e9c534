"""Which operators may run again."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from monetrun.capture.operators import _adds_in_any_order

aten = torch.ops.aten


def call(target, *args, dtype=torch.float32, device="cuda"):
    graph = fx.Graph()
    node = graph.call_function(target, args)
    with FakeTensorMode():
        node.meta["val"] = torch.empty(3, dtype=dtype, device=device)
    return node


@pytest.mark.parametrize(
    ("node", "adds"),
    [
        (lambda: call(aten.index_add.default, None, 0, None, None), True),
        (lambda: call(aten.scatter_add.default, None, 0, None, None, device="cpu"), False),
        (lambda: call(aten.scatter_add.default, None, 0, None, None, dtype=torch.int64), False),
        (lambda: call(aten.index_put.default, None, [None], None, True), False),
        (lambda: call(aten.mul.Tensor, None, None), False),
    ],
    ids=["index_add", "on a CPU", "integers", "sorted", "product"],
)
def test_kernels_that_add_with_atomics_are_told(node, adds):
    assert _adds_in_any_order(node()) == adds
