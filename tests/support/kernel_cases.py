"""Tensors and comparisons for the tests of torch.ops.monet's kernels, on the CPU or on MONETRUN_TEST_DEVICE."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monetrun.ops import cuda, definition, kernels, registry
from support import cuda_on_cpu

NAN, INF = math.nan, math.inf
DEVICE = os.environ.get("MONETRUN_TEST_DEVICE", "cpu")  # recipes/gpu_check.py sets it
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IMAGES = [(2, 3, 5, 7), (1, 1, 1, 1), (0, 3, 4, 4), (3, 70, 6, 5), (2, 8, 8, 8)]
LAYOUTS = ["contiguous", "channels-last", "transposed"]

shapes = pytest.mark.parametrize("shape", IMAGES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def laid_out(x, layout):
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return x.contiguous(memory_format=torch.channels_last if layout == "channels-last" else torch.contiguous_format)


def numbers(shape, dtype, layout="contiguous", special=True, seed=0):
    """Random numbers with NaN, infinities, signed zeros and the bounds of ReLU6 among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") * 4
    if special:
        flat = x.view(-1)
        for i, value in enumerate((NAN, INF, -INF, 0.0, -0.0, 6.0, -0.3)):
            flat[i + 3 :: 23] = value
    return laid_out(x.to(DEVICE, dtype), layout)


def assert_same(got, expected):
    """Same dtype, shape, strides (of dimensions longer than 1) and bits; all NaN count as equal."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    pairs = zip(got.shape, got.stride(), expected.stride(), strict=True)
    assert got.numel() == 0 or all(size == 1 or a == b for size, a, b in pairs)
    if got.is_floating_point():
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = got.nan_to_num(7, INF, -INF), expected.nan_to_num(7, INF, -INF)
        assert torch.equal(got.signbit(), expected.signbit())
    assert torch.equal(got, expected)


@contextlib.contextmanager
def operators(kind: str) -> Iterator[Callable[[str], Any]]:
    """Name of an operator to a function: its native kernel, its reference, or its CUDA kernel, run on the CPU."""
    registry.load()
    if kind == "reference":
        yield definition.REFERENCES.__getitem__
    elif kind == "cuda on the CPU":
        if DEVICE != "cpu":
            pytest.skip("the tests run on another device")
        with cuda_on_cpu.running():
            yield lambda name: cuda.FUNCTIONS.get(name) or definition.REFERENCES[name]
    else:
        if not kernels.load(DEVICE):
            pytest.skip(kernels.unavailable_reason(DEVICE))
        yield lambda name: getattr(torch.ops.monet, name).default
