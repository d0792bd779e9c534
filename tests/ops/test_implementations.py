"""Conformance: every registered implementation, compared with the operator that it replaces, on captured graphs.

A case is a small module whose joint graph has the operators of one family. All its nodes are computed with real
numbers; then every alternative is called with the same numbers and must give what the node gave: bitwise where it is
marked exact; otherwise within a few roundings or, in half precision, at most twice as far from float64 as eager is.
"""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from monetrun.ops import registry
from monetrun.ops.families import layout
from support.captured import CASES, Wave, captured, computed, normalized_conv, pool, strides
from support.convolutions import assert_within_rounding
from support.kernel_cases import DEVICE

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, *HALF)


@pytest.fixture
def offered_everywhere(monkeypatch):
    """The other memory format, which is for GPUs since only they gain by it, is offered on any device."""
    monkeypatch.setattr(layout, "OFFERED_ON", (DEVICE,))


def joint_graph(case, form, dtype):
    return in_float32(case) if (form, dtype) == ("contiguous", torch.float32) else captured_case(case, form, dtype)


@functools.cache
def in_float32(case):
    """Two tests use it."""
    return captured_case(case, "contiguous", torch.float32)


def captured_case(case, form, dtype):
    torch.manual_seed(0)
    module, shape = CASES[case]
    x = torch.randn(shape, dtype=dtype).to(DEVICE)
    if form == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    return captured(copy.deepcopy(module).to(dtype).train(), x)


# nightly: a half and a full precision of which the other two have the same branches
SHORT = (torch.float32, torch.bfloat16)
FORMED = [
    pytest.param(case, form, dtype, id=f"{case}-{form}-{dtype}", marks=() if dtype in SHORT else pytest.mark.nightly)
    for case, (_, shape) in CASES.items()
    for form in ("contiguous", "channels_last")
    if form == "contiguous" or len(shape) == 4
    for dtype in DTYPES
]


@pytest.mark.usefixtures("offered_everywhere")
@pytest.mark.parametrize(("case", "form", "dtype"), FORMED)
def test_an_implementation_gives_what_the_operator_gives(case, form, dtype):
    joint = joint_graph(case, form, dtype)
    torch.manual_seed(0)
    values = computed(joint, dtype)
    for (i, k), call in joint.calls.items():
        node, impl = joint.nodes[i], joint.graph.operators[i].implementations[k]
        copies: dict[fx.Node, object] = {}
        arguments, keywords = fx.map_arg(
            (call.args, call.kwargs), lambda n, copies=copies: copies.setdefault(n, _copied(values[n]))
        )
        result = call.target(*arguments, **keywords)
        standing_for = values[node] if call.only is None else values[node][call.only]
        where = f"{node.target} as {impl.name} ({call.target})"
        for place, (one, other) in enumerate(zip(as_tuple(result), as_tuple(standing_for), strict=True)):
            if other is None:
                continue
            assert (one.shape, one.dtype) == (other.shape, other.dtype), where
            assert strides(one) == strides(other), where
            if impl.exact:
                assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), where
                assert torch.equal(one.isnan(), other.isnan()), where
            elif dtype not in HALF:
                torch.testing.assert_close(one, other, equal_nan=True, msg=lambda m, where=where: f"{where}: {m}")
            elif not close(one, other):
                wide = in_float64(node, values)
                wide = as_tuple(wide if call.only is None else wide[call.only])[place]
                assert_within_rounding(one, other, wide)
        if impl.in_place_of is not None:
            overwritten = [c for n, c in copies.items() if joint.storage.get(n) == impl.in_place_of]
            first = result[0] if isinstance(result, tuple) else result
            assert any(c.data_ptr() == first.data_ptr() for c in overwritten), where


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def close(given, expected):
    """Whether they differ by a few roundings of their dtype.

    Sums of half-precision products may differ by more, by the order in which a processor adds: they are compared with
    float64.
    """
    try:
        torch.testing.assert_close(given, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def in_float64(node, values):
    """What the operator gives for the same operands in float64."""

    def widen(n):
        value = values[n]
        return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value

    arguments, keywords = fx.map_arg((node.args, node.kwargs), widen)
    return node.target(*arguments, **keywords)


def _copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.mark.slow
@pytest.mark.usefixtures("offered_everywhere")
def test_every_registered_operator_is_in_a_case():
    seen = set()
    for case in CASES:
        joint = joint_graph(case, "contiguous", torch.float32)
        seen |= {joint.nodes[i].target for i, _ in joint.calls}
    assert {str(t) for t in registry.registered()} - {str(t) for t in seen} == set()


def test_networks_of_convolutions_batch_norms_and_relus_stay_exact():
    offered = {}
    for name, activation in (("relu", nn.ReLU()), ("silu", nn.SiLU()), ("conv", nn.Conv2d(16, 4, 1))):
        joint = captured(normalized_conv(nn.BatchNorm2d(16), activation), torch.randn(2, 16, 5, 5))
        offered[name] = {i.name for op in joint.graph.operators for i in op.implementations}
    assert "fused:batch-norm" in offered["relu"] - offered["silu"]
    assert "output:batch-norm" in offered["silu"] - offered["relu"] - offered["conv"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mask_takes_a_bit_and_an_index_a_byte_per_element(dtype):
    joint = captured(pool(kernel_size=2).to(dtype), torch.randn((3, 5, 7, 6), dtype=dtype).to(DEVICE))
    sizes = {op.target: joint.graph.tensors[op.outputs[0]].nbytes for op in joint.graph.operators if op.optional}
    assert sizes == {
        "monet.range_mask.default": math.ceil(3 * 5 * 7 * 6 / 8),
        "monet.max_pool2d_index.default": 3 * 5 * 3 * 3,
    }


@pytest.mark.parametrize(("limit", "shown"), [(1.0, True), (0.7, False)])
def test_limits_that_are_rounded_to_the_dtype_are_read_where_eager_reads_them(limit, shown):
    """0.7 in bfloat16 is less: of an output at the limit, the backward would take it that the gradient passes."""
    wave = Wave(lambda x: F.hardtanh(x, -limit, limit), torch.sin)
    joint = captured(wave, torch.randn(3, 5, dtype=torch.bfloat16).to(DEVICE))
    (backward,) = (op for op in joint.graph.operators if "hardtanh_backward" in op.target)
    names = {i.name for i in backward.implementations}
    assert "intermediate:mask" in names
    assert ("output" in names or "output:input" in names) == shown
