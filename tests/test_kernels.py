"""The operators of torch.ops.monet: native kernels against their references and against ATen, to the bit."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch

from monetrun.ops import cpu_allocator, definitions, kernels, normalization_output

aten, monet = torch.ops.aten, torch.ops.monet
NAN, INF = math.nan, math.inf
DEVICE = os.environ.get("MONETRUN_TEST_DEVICE", "cpu")  # recipes/gpu_check.py sets it
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
IMAGES = [(2, 3, 5, 7), (1, 1, 1, 1), (0, 3, 4, 4), (3, 70, 6, 5), (2, 8, 8, 8)]
LAYOUTS = ["contiguous", "channels-last", "transposed"]


@pytest.fixture(autouse=True)
def _on_the_device():
    """Tensors are made there, unless they are drawn from a generator of the CPU."""
    with contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE):
        yield


@pytest.fixture(scope="module", params=["native", "reference"])
def kernel(request):
    """Name of an operator to what is tested: the operator with its native kernel, or its reference."""
    if request.param == "reference":
        return definitions.REFERENCES.__getitem__
    if not kernels.load(DEVICE):
        pytest.skip(kernels.unavailable_reason(DEVICE))
    return lambda name: getattr(monet, name).default


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
    """Same dtype, shape, strides (of dimensions that matter) and bits, any NaN being any other."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    pairs = zip(got.shape, got.stride(), expected.stride(), strict=True)
    assert got.numel() == 0 or all(size == 1 or a == b for size, a, b in pairs)
    if got.is_floating_point():
        assert torch.equal(got.isnan(), expected.isnan())
        got, expected = got.nan_to_num(7, INF, -INF), expected.nan_to_num(7, INF, -INF)
        assert torch.equal(got.signbit(), expected.signbit())
    assert torch.equal(got, expected)


shapes = pytest.mark.parametrize("shape", IMAGES, ids=str)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# --- masks


@dtypes
@layouts
@shapes
def test_a_masked_backward_has_the_bits_of_atens(kernel, shape, layout, dtype):
    x, grad = numbers(shape, dtype, layout), numbers(shape, dtype, layout, seed=1)
    for low in (0.0, 0.3):
        mask = kernel("range_mask")(x, low, NAN)
        assert mask.dtype == torch.uint8
        assert mask.shape == ((x.numel() + 7) // 8,)
        assert_same(kernel("mask_backward")(grad, mask, 0.0), aten.threshold_backward(grad, x, low))
    # where the input is NaN, ATen's next two depend on whether the element is computed in a vector or at its end
    finite = x.nan_to_num(1.0)
    for low, high in [(0.0, 6.0), (-0.3, 0.7)]:
        mask = kernel("range_mask")(finite, low, high)
        assert_same(kernel("mask_backward")(grad, mask, 0.0), aten.hardtanh_backward(grad, finite, low, high))
    mask = kernel("range_mask")(finite, 0.0, NAN)
    expected = aten.leaky_relu_backward(grad, finite, 0.01, False)
    assert_same(kernel("mask_backward")(grad, mask, 0.01), expected)
    over = grad.clone()
    assert kernel("mask_backward_")(over, mask, 0.01).data_ptr() == over.data_ptr()
    assert_same(over, expected)


@dtypes
@layouts
@shapes
def test_a_packed_dropout_mask_has_the_bits_of_a_product(kernel, shape, layout, dtype):
    x = numbers(shape, dtype, layout)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(2), device="cpu")
    noise = laid_out((drawn > 0.3).to(DEVICE, dtype), layout)
    noise.div_(1 - 0.3)
    mask = kernel("nonzero_mask")(noise)
    scale = torch.ones((), dtype=dtype).div_(1 - 0.3).item()
    assert_same(kernel("mask_scale")(x, mask, scale), x * noise)
    for other in (1 / 7, 1.5):  # which the dtype cannot hold, and whose products are often halfway between two values
        assert_same(kernel("mask_scale")(x, mask, other), x * ((noise != 0).to(dtype) * other))
    over = x.clone()
    assert kernel("mask_scale_")(over, mask, scale).data_ptr() == over.data_ptr()
    assert_same(over, x * noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@layouts
@shapes
def test_hardswish_backward_from_output_and_side(kernel, shape, layout, dtype):
    x, grad = numbers(shape, dtype, layout), numbers(shape, dtype, layout, seed=1)
    result, mask = aten.hardswish(x), kernel("range_mask")(x, -1.5, NAN)
    expected = aten.hardswish_backward(grad, x)
    given = kernel("hardswish_output_backward")(grad, result, mask)
    # the slope is off by a rounding of the output over the slope itself
    eps = torch.finfo(dtype).eps
    slope = aten.hardswish_backward(torch.ones_like(x), x.nan_to_num(0.0)).abs()
    allowed = (4 * eps * grad.abs() * (1 + 1 / slope.clamp(min=eps**0.5))).nan_to_num(INF, posinf=INF)
    assert torch.equal(given.isnan(), expected.isnan())
    assert ((given - expected).abs().nan_to_num(0.0) <= allowed).all()
    over = grad.clone()
    assert kernel("hardswish_output_backward_")(over, result, mask).data_ptr() == over.data_ptr()
    assert_same(over, given)


def test_hardswish_backward_from_output_at_its_corners(kernel):
    """The slope goes from 1.5 to 1 at 3, and from -0.5 to 0 at -3, where a gradient that is NaN gives 0 too."""
    x = torch.tensor([3.0, -3.0, -1e30, -INF, INF, NAN, 0.0, -1.5])
    inwards = torch.nextafter(x[:2], torch.zeros(2))
    x = torch.cat((x, inwards, torch.nextafter(x[:2], 2 * x[:2])))
    result, mask = aten.hardswish(x), kernel("range_mask")(x, -1.5, NAN)
    for grad in (torch.ones_like(x), torch.full_like(x, NAN)):
        given = kernel("hardswish_output_backward")(grad, result, mask)
        torch.testing.assert_close(given, aten.hardswish_backward(grad, x), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@layouts
@shapes
def test_softplus_backward_from_output(kernel, shape, layout, dtype):
    x, grad = numbers(shape, dtype, layout), numbers(shape, dtype, layout, seed=1, special=False)
    for beta, threshold in ((1.0, 20.0), (2.5, 20.0), (0.5, 30.0)):
        given = kernel("softplus_output_backward")(grad, aten.softplus(x, beta, threshold), beta, threshold)
        expected = aten.softplus_backward(grad, x, beta, threshold)
        torch.testing.assert_close(given, expected, rtol=max(3e-9, 4 * torch.finfo(dtype).eps), atol=0, equal_nan=True)


def test_a_mask_is_one_bit_for_each_element_the_first_lowest_and_nothing_behind(kernel):
    x = torch.tensor([1.0, -1.0, 2.0, 0.0, NAN, 3.0, -0.0, 1.0, 5.0, -5.0])
    assert kernel("range_mask")(x, 0.0, NAN).tolist() == [0b10110101, 0b01]
    assert kernel("range_mask")(x, 0.0, 3.0).tolist() == [0b10010101, 0b00]
    assert kernel("range_mask")(x, -0.5, NAN).tolist() == [0b11111101, 0b01]
    assert kernel("nonzero_mask")(x).tolist() == [0b10110111, 0b11]


def test_a_mask_is_in_the_order_of_storage(kernel):
    x = torch.tensor([[1.0, -1.0, -1.0], [1.0, 1.0, -1.0]])
    assert kernel("range_mask")(x, 0.0, NAN).tolist() == [0b011001]
    assert kernel("range_mask")(x.t().contiguous().t(), 0.0, NAN).tolist() == [0b001011]


def test_many_elements_are_masked_by_several_threads(kernel):
    x, grad = numbers((3, 100_003), torch.float32), numbers((3, 100_003), torch.float32, seed=1)
    assert_same(
        kernel("mask_backward")(grad, kernel("range_mask")(x, 0.0, NAN), 0.0), aten.threshold_backward(grad, x, 0.0)
    )


def test_what_is_not_dense_or_does_not_fit_is_refused(kernel):
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="dense"):
        kernel("range_mask")(x[:, ::2], 0.0, NAN)
    with pytest.raises(RuntimeError, match=r"3 (contiguous )?bytes for 24 elements, got 2"):
        kernel("mask_backward")(x, torch.zeros(2, dtype=torch.uint8), 0.0)
    with pytest.raises(RuntimeError, match="differ"):
        kernel("batch_norm_act")(x, None, None, torch.zeros(6), torch.ones(6), torch.randn(6, 4).t(), 0.0, NAN)


# --- max pooling

WINDOWS = [
    ((7, 9), [2, 2], [2, 2], [0, 0], [1, 1], False),
    ((7, 9), [3, 3], [2, 2], [1, 1], [1, 1], False),
    ((8, 10), [3, 2], [2, 1], [1, 1], [2, 3], False),
    ((7, 8), [3, 3], [2, 2], [1, 0], [1, 1], True),
    ((6, 6), [2, 2], [], [1, 1], [1, 1], True),
    ((6, 9), [2, 2], [3, 3], [0, 0], [1, 1], True),
    ((5, 5), [5, 5], [1, 1], [2, 2], [1, 1], False),
    ((4, 5), [1, 1], [3, 3], [0, 0], [1, 1], False),
]


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@dtypes
def test_pooling_by_one_byte_has_the_bits_of_atens(kernel, layout, dtype):
    batches = [(2, 5), (1, 1), (2, 33), (0, 3)] + ([(4,)] if layout == "contiguous" else [])
    for images, window, special in itertools.product(batches, WINDOWS, (False, True)):
        size, *place, ceil_mode = window
        x = numbers((*images, *size), dtype, layout, special)
        if not special:
            x = (x / 3).round()  # ties
        elif x.numel():
            x[0] = -INF
            x[-1, ..., :3, :3] = NAN
        y, flat = aten.max_pool2d_with_indices(x, *place, ceil_mode)
        index = kernel("max_pool2d_index")(x, *place, ceil_mode)
        assert index.dtype == torch.uint8
        grad = laid_out(numbers(y.shape, dtype, special=False, seed=3), layout)
        expected = aten.max_pool2d_with_indices_backward(grad, x, *place, ceil_mode, flat)
        assert_same(kernel("max_pool2d_index_backward")(grad, index, list(x.shape), *place), expected)
        assert_same(kernel("max_pool2d_input_backward")(grad, x, *place, ceil_mode), expected)


def test_a_window_that_a_byte_cannot_name_is_refused(kernel):
    with pytest.raises(RuntimeError, match="255"):
        kernel("max_pool2d_index")(torch.randn(1, 1, 16, 16), [16, 16], [1, 1], [0, 0], [1, 1], False)


# --- normalization

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_normal(got, expected, exact):
    if exact:
        return assert_same(got, expected)
    tolerance = TOLERANCE[expected.dtype]
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance * 20, equal_nan=True)


def activated(y, low, high):
    if math.isnan(high):
        return y if math.isnan(low) else torch.relu(y)
    return aten.hardtanh(y, low, high)


def parameter_dtypes(dtype):
    return {dtype, torch.float64 if dtype == torch.float64 else torch.float32}


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@dtypes
def test_batch_norm_from_saved_statistics_has_the_bits_of_the_first_run(kernel, layout, dtype):
    exact = kernel != definitions.REFERENCES.__getitem__ and kernels.batch_norm_act_is_exact(
        dtype, layout != "contiguous", DEVICE
    )
    shapes = [(2, 3, 5, 7), (4, 70, 3, 3), (2, 3, 4, 5, 3), (5, 33, 1, 1), (8, 64, 33, 5), (3, 16), (2, 5, 9)]
    bounds = [(NAN, NAN), (0.0, NAN), (0.0, 6.0), (-0.5, 0.5)]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for shape, with_residual, parameters in itertools.product(shapes, (False, True), parameter_dtypes(dtype)):
        if layout != "contiguous" and len(shape) not in last:
            continue
        form = torch.contiguous_format if layout == "contiguous" else last[len(shape)]
        x = numbers(shape, dtype, special=False).contiguous(memory_format=form)
        residual = numbers(shape, dtype, seed=5).contiguous(memory_format=form) if with_residual else None
        weight, bias = (numbers(shape[1], parameters, special=False, seed=s) for s in (1, 2))
        statistics = torch.zeros_like(weight), torch.ones_like(weight)
        y, mean, invstd, *_ = aten._native_batch_norm_legit_functional(x, weight, bias, *statistics, True, 0.1, 1e-5)
        y = y if residual is None else y + residual
        for low, high in bounds:
            got = kernel("batch_norm_act")(x, weight, bias, mean, invstd, residual, low, high)
            assert_normal(got, activated(y, low, high), exact)


def test_batch_norm_and_relu_treat_nan_infinity_and_zeros_as_torch_does(kernel):
    x = torch.tensor([NAN, INF, -INF, -0.0, 0.0, -1.0, 7.0]).view(1, 1, 7)
    zero, one = torch.zeros(1), torch.ones(1)
    for low, high in [(0.0, NAN), (0.0, 6.0), (-INF, INF)]:
        got = kernel("batch_norm_act")(x, None, -zero, zero, one, torch.full_like(x, -0.0), low, high)
        assert_same(got, activated(x, low, high))


def test_the_native_batch_norm_is_exact_where_torch_uses_fused_multiply_add():
    if not kernels.load() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not an x86-64 processor with AVX2")
    for dtype in DTYPES:
        assert kernels.batch_norm_act_is_exact(dtype, False)
        assert kernels.batch_norm_act_is_exact(dtype, True)


# --- normalization, backward from output


def gradient_errors(kernel, rows, shape, weight, bias, grad=None):
    """Of ATen's and of our gradients of a layer norm: each one's distance from float64's over the latter's norm."""
    x = numbers((rows, *shape), torch.float32, special=False) + 0.5
    grad = numbers(x.shape, torch.float32, special=False, seed=3) if grad is None else grad(x)
    wide = [t.double().requires_grad_() for t in (x, weight, bias)]
    torch.nn.functional.layer_norm(wide[0], shape, *wide[1:]).backward(grad.double())
    y, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, 1e-5)
    eager = aten.native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, [True] * 3)
    given = kernel("layer_norm_output_backward")(grad, y, shape, rstd, weight, bias, [True] * 3)
    return [
        [((g.double() - t.grad).norm() / t.grad.norm()).item() for g, t in zip(gradients, wide, strict=True)]
        for gradients in (eager, given)
    ]


@pytest.mark.parametrize("ratio", [0.0, 1.0, normalization_output.LIMIT])
def test_a_layer_norms_backward_from_its_output_errs_at_most_twice_as_much_as_eagers(kernel, ratio):
    for rows, shape in [(2048, [128]), (300, [7]), (1000, [3, 11]), (64, [768])]:
        weight = numbers(shape, torch.float32, special=False, seed=1).abs().clamp(0.5, 1.5)
        bias = weight * ratio * torch.where(numbers(shape, torch.float32, special=False, seed=2) < 0, -1, 1)
        assert kernel("affine_invertible")(weight, bias, normalization_output.LIMIT)
        for grad in (None, lambda x: x + 0.25 * numbers(x.shape, torch.float32, special=False, seed=3)):
            eager, given = gradient_errors(kernel, rows, shape, weight, bias, grad)
            assert all(g <= 2 * e for e, g in zip(eager, given, strict=True)), (rows, shape, eager, given)


def test_far_behind_the_guards_limit_the_backward_from_output_is_worse_than_that(kernel):
    weight = torch.full((128,), 0.01)
    eager, given = gradient_errors(kernel, 512, [128], weight, weight * 1000)
    assert given[0] > 4 * eager[0]


@dtypes
def test_a_layer_norms_backward_from_its_output_at_every_dtype_and_mask(kernel, dtype):
    for rows, shape in [((5, 3), [7]), ((9,), [4, 16]), ((131,), [33]), ((0,), [8]), ((1,), [1])]:
        grad, x = (numbers((*rows, *shape), dtype, special=False, seed=s) for s in (0, 1))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        ones = numbers(shape, wide, special=False, seed=2).abs() + 0.5, numbers(shape, wide, special=False, seed=4)
        for weight, bias in [ones, (ones[0], None), (None, ones[1]), (None, None)]:
            w, b = (None if v is None else v.to(dtype) for v in (weight, bias))
            y, mean, rstd = aten.native_layer_norm(x, shape, w, b, 1e-5)
            there = [True, w is not None, b is not None]
            expected = aten.native_layer_norm_backward(grad, x, shape, mean, rstd, w, b, there)
            for mask in itertools.product(*([wanted, False] for wanted in there)):
                given = kernel("layer_norm_output_backward")(grad, y, shape, rstd, w, b, list(mask))
                for wanted, g, e in zip(mask, given, expected, strict=True):
                    if not wanted:
                        assert g.numel() == 0
                    elif dtype in (torch.float32, torch.float64) and shape != [1]:  # of one number nothing is left
                        tolerance = 2e-5 if dtype == torch.float32 else 1e-12
                        torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance * 10)
                    else:
                        assert (g.shape, g.dtype) == (e.shape, e.dtype)


def channel_norm(x, groups, weight, bias):
    """Output, mean and rstd of a batch norm (``groups`` None) or a group norm, and its backward given the gradient."""
    if groups is None:
        y, mean, rstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        return (
            y,
            rstd,
            lambda grad, mask: aten.native_batch_norm_backward(
                grad, x, weight, None, None, mean, rstd, True, 1e-5, mask
            ),
        )
    size = x.shape[0], x.shape[1], math.prod(x.shape[2:]), groups
    y, mean, rstd = aten.native_group_norm(x, weight, bias, *size, 1e-5)
    return y, rstd, lambda grad, mask: aten.native_group_norm_backward(grad, x, mean, rstd, weight, *size, mask)


@pytest.mark.parametrize("ratio", [0.0, 1.0, normalization_output.LIMIT_OF_CHANNELS])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_a_channel_norms_backward_from_its_output_errs_at_most_twice_as_much_as_eagers(kernel, layout, ratio):
    for shape, groups in itertools.product([(16, 12, 28, 28), (40, 32, 7, 7), (3, 64, 33, 5)], (None, 1, 4)):
        x = numbers(shape, torch.float32, layout, special=False) + 0.5
        weight = numbers(shape[1:2], torch.float32, special=False, seed=1).abs().clamp(0.5, 1.5)
        bias = weight * ratio * torch.where(numbers(shape[1:2], torch.float32, special=False, seed=2) < 0, -1, 1)
        other = numbers(shape, torch.float32, layout, special=False, seed=3)
        for grad in (other, x + 0.25 * other):
            wide = channel_norm(x.double(), groups, weight.double(), bias.double())[2](grad.double(), [True] * 3)
            y, rstd, backward = channel_norm(x, groups, weight, bias)
            eager = backward(grad, [True] * 3)
            given = kernel("channel_norm_output_backward")(grad, y, rstd, weight, bias, [True] * 3)
            for name, e, g, w in zip(("input", "weight", "bias"), eager, given, wide, strict=True):
                errors = (e - w).norm(), (g - w).norm()
                assert errors[1] <= 2 * errors[0], (shape, groups, name, errors)


CHANNEL_NORMS = [
    ((4, 6, 5, 7), 2),
    ((1, 24, 33, 3), 3),
    ((3, 70, 6, 5), 7),
    ((0, 6, 3, 3), 2),
    ((70, 33, 3, 3), 11),
    ((9, 16, 17), 16),
    ((2, 6, 3, 4, 5), 1),
    ((30, 40), 4),
]


@dtypes
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_a_channel_norms_backward_from_its_output_at_every_dtype_and_mask(kernel, layout, dtype):
    forms = {4: torch.channels_last, 5: torch.channels_last_3d}
    for (shape, groups), of_batch in itertools.product(CHANNEL_NORMS, (False, True)):
        if (layout != "contiguous" and len(shape) not in forms) or (of_batch and shape[0] == 0):
            continue
        form = torch.contiguous_format if layout == "contiguous" else forms[len(shape)]
        grad, x = (numbers(shape, dtype, special=False, seed=s).contiguous(memory_format=form) for s in (0, 1))
        w, b = (numbers(shape[1:2], dtype, special=False, seed=s) for s in (2, 4))
        for weight, bias in [(w.abs() + 0.5, b), (w.abs() + 0.5, None), (None, None)]:
            y, rstd, backward = channel_norm(x, None if of_batch else groups, weight, bias)
            there = [True, weight is not None, bias is not None]
            expected = backward(grad, there)
            for mask in itertools.product(*([wanted, False] for wanted in there)):
                given = kernel("channel_norm_output_backward")(grad, y, rstd, weight, bias, list(mask))
                for wanted, g, e in zip(mask, given, expected, strict=True):
                    if not wanted:
                        assert g.numel() == 0
                        continue
                    assert (g.shape, g.dtype) == (e.shape, e.dtype)
                    if dtype in (torch.float32, torch.float64):
                        tolerance = 2e-5 if dtype == torch.float32 else 1e-12
                        torch.testing.assert_close(g, e, rtol=tolerance, atol=tolerance * 10)
                        assert g.numel() == 0 or g.stride() == e.stride()


def test_statistics_that_do_not_fit_the_channels_are_refused(kernel):
    x = torch.randn(2, 6, 3, 3)
    for rstd in (torch.ones(5), torch.ones(2, 4), torch.ones(3, 2), torch.ones(2, 0)):
        with pytest.raises(RuntimeError, match=r"rstd must be \[6\], or \[2, groups\]"):
            kernel("channel_norm_output_backward")(x, x, rstd, None, None, [True, False, False])
    y = x.transpose(0, 3)
    with pytest.raises(RuntimeError, match="contiguous or channels-last"):
        kernel("channel_norm_output_backward")(y, y, torch.ones(6), None, None, [True, False, False])


def backward_calls(size):
    """From the output, of tensors of some 40 * ``size`` elements."""
    grad, y = (numbers((size, 40), torch.float32, special=False, seed=s).cpu() for s in (0, 1))
    c = torch.ones(40)
    yield monet.layer_norm_output_backward, (grad, y, [40], torch.ones(size), c, None, [True] * 3)
    for layout, rstd in itertools.product(["contiguous", "channels-last"], (c, torch.ones(5, 4))):
        grad, y = (laid_out(t.view(5, 40, size // 50, 10), layout) for t in (grad, y))
        yield monet.channel_norm_output_backward, (grad, y, rstd, c, c, [True] * 3)


def test_sums_are_the_same_for_any_number_of_threads():
    if not kernels.load():
        pytest.skip(kernels.unavailable_reason())
    for operator, arguments in backward_calls(3000):
        before, given = torch.get_num_threads(), []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            given.append(operator(*arguments))
        torch.set_num_threads(before)
        for one, other in zip(*given, strict=True):
            assert_same(one, other)


def test_a_norms_backward_from_its_output_takes_little_beside_its_results():
    if DEVICE != "cpu" or not kernels.load() or not cpu_allocator.install():
        pytest.skip("of the CPU's kernels, with the counting allocator")
    for operator, arguments in backward_calls(8000):
        before = cpu_allocator.allocated_bytes()
        cpu_allocator.reset_peak()
        given = operator(*arguments)
        results = sum(g.untyped_storage().nbytes() for g in given)
        assert cpu_allocator.peak_bytes() - before - results <= 0.03 * given[0].nbytes


@dtypes
def test_an_affine_map_can_be_inverted_unless_a_weight_is_small_against_its_bias(kernel, dtype):
    def asked(weight, bias):
        given = (None if v is None else torch.tensor(v, dtype=dtype) for v in (weight, bias))
        return kernel("affine_invertible")(*given, 8.0).item()

    assert asked([1.0, -0.5, 3.0], [8.0, 4.0, -24.0])
    assert asked([1.0, -0.5], None)
    assert asked(None, [8.0, 0.0])
    assert not asked(None, [8.5, 0.0])
    assert not asked([1.0, 0.5], [0.0, 4.25])
    for weight in (0.0, -0.0, NAN, INF, -INF):
        assert not asked([1.0, weight], [0.0, 0.0])
        assert not asked([1.0, weight], None)
    for bias in (NAN, INF):
        assert not asked([1.0, 1.0], [0.0, bias])
    assert not kernel("affine_invertible")(torch.tensor([1e-40]), None, 8.0)  # rounded to few digits


# --- cross entropy


@pytest.mark.parametrize("reduction", [0, 1, 2])
@dtypes
def test_the_gradient_of_cross_entropy_has_the_bits_of_atens(kernel, reduction, dtype, monkeypatch):
    monkeypatch.setitem(definitions.CHUNK_BYTES, DEVICE, 1000)
    for rows, classes, weighted in [(7, 33, False), (5, 300, True), (1, 2, True), (64, 10, False)]:
        logits = numbers((rows, classes), dtype, special=False)
        logits[0, 0] = INF if rows == 1 else -INF
        target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE)
        target[rows // 2] = -100
        target[0] = 1
        weight = numbers((classes,), dtype, special=False).abs() if weighted else None
        logs = torch.log_softmax(logits, 1)
        loss, total = aten.nll_loss_forward(logs, target, weight, reduction, -100)
        grad_loss = numbers(loss.shape, dtype, special=False, seed=4)
        wide = aten.nll_loss_backward(grad_loss, logs, target, weight, reduction, -100, total)
        expected = aten._log_softmax_backward_data(wide, logs, 1, dtype)
        arguments = target, weight, reduction, -100, total, 1
        assert_same(kernel("log_softmax_nll_backward")(grad_loss, logs, *arguments), expected)
        assert kernel("log_softmax_nll_backward_")(grad_loss, logs, *arguments).data_ptr() == logs.data_ptr()
        assert_same(logs, expected)


# --- the operators as torch sees them


def samples():
    x = torch.randn(2, 3, 6, 6)
    mask, logs = definitions.range_mask(x, 0.0, NAN), torch.log_softmax(torch.randn(5, 7), 1)
    window = [3, 3], [2, 2], [1, 1], [1, 1]
    c = torch.randn(3)
    nll = torch.randint(7, (5,)), None, 1, -100, torch.tensor(5.0), 1
    images = x.contiguous(memory_format=torch.channels_last)
    return {
        "range_mask": (x, 0.0, 6.0),
        "nonzero_mask": (x.transpose(1, 2),),
        "mask_backward": (x, mask, 0.1),
        "mask_backward_": (x.clone(), mask, 0.0),
        "mask_scale": (x, mask, 2.0),
        "mask_scale_": (x.clone(), mask, 2.0),
        "hardswish_output_backward": (x, x, mask),
        "hardswish_output_backward_": (x.clone(), x, mask),
        "softplus_output_backward": (x, x, 1.0, 20.0),
        "max_pool2d_index": (images, *window, False),
        "max_pool2d_index_backward": (
            torch.randn(2, 3, 3, 3),
            definitions.max_pool2d_index(x, *window, False),
            [2, 3, 6, 6],
            *window,
        ),
        "max_pool2d_input_backward": (torch.randn(2, 3, 3, 3), x, *window, False),
        "batch_norm_act": (images, c, None, c, c, images, 0.0, NAN),
        "layer_norm_output_backward": (x, x, [6], torch.ones(2, 3, 6, 1), torch.ones(6), None, [True, True, False]),
        "channel_norm_output_backward": (x, x, torch.ones(3), torch.ones(3), None, [True, True, False]),
        "affine_invertible": (torch.ones(6), None, 8.0),
        "log_softmax_nll_backward": (torch.tensor(1.0), logs, *nll),
        "log_softmax_nll_backward_": (torch.tensor(1.0), logs.clone(), *nll),
    }


def test_every_operator_has_a_sample():
    assert set(samples()) == set(definitions.REFERENCES)


@pytest.mark.parametrize("name", definitions.REFERENCES)
def test_opcheck(name):
    kernels.load(DEVICE)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.endswith("_"):  # torch functionalizes no operator that returns what it writes
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(monet, name).default, samples()[name], test_utils=checks)


def test_without_a_compiler_the_references_serve_and_the_reason_is_told(tmp_path):
    code = (
        "import torch\nfrom monetrun.ops import kernels\n"
        "assert not kernels.load()\nassert 'CXX' in kernels.unavailable_reason()\n"
        "print(torch.ops.monet.range_mask(torch.tensor([1.0, -1.0]), 0.0, 9.0).tolist())"
    )
    environment = {**os.environ, "CXX": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1]"


def test_an_index_that_no_pooling_gave_is_no_write_outside_of_the_plane(kernel):
    """Costs are measured on made-up indices: place 0 of the first windows is in the padding."""
    grad, index = torch.ones(4, 1, 5, 5), torch.zeros(4, 1, 5, 5, dtype=torch.uint8)
    given = kernel("max_pool2d_index_backward")(grad, index, [4, 1, 9, 9], [3, 3], [2, 2], [1, 1], [1, 1])
    # the first row of windows and the corner's neighbour fall outside, and not into the plane before
    assert given.sum((1, 2, 3)).tolist() == [20.0] * 4
