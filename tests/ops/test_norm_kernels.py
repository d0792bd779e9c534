"""The normalizations of torch.ops.monet: from saved statistics bitwise, backward from the output within rounding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from monetrun.capture import cpu_allocator
from monetrun.ops import definition, kernels
from monetrun.ops.families import normalization, normalization_output
from support.kernel_cases import DEVICE, DTYPES, INF, NAN, assert_same, dtypes, laid_out, numbers, operators

aten, monet = torch.ops.aten, torch.ops.monet
pytestmark = pytest.mark.usefixtures("on_the_device")


@pytest.fixture(scope="module", params=["native", "reference", "cuda on the CPU"])
def kernel(request):
    """As in the other files, and with CUDA's kernels run on the CPU."""
    with operators(request.param) as found:
        yield found


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
def test_batch_norm_from_saved_statistics_is_bitwise_identical_to_the_first_run(kernel, layout, dtype):
    exact = kernel != definition.REFERENCES.__getitem__ and normalization.batch_norm_act_is_exact(
        dtype, layout != "contiguous", torch.device(DEVICE)
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
        assert normalization.batch_norm_act_is_exact(dtype, False)
        assert normalization.batch_norm_act_is_exact(dtype, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_fused_batch_norm_is_called_exact_only_where_it_gives_the_bits_of_every_channel(dtype):
    if not normalization.batch_norm_act_is_exact(dtype, True, parameters=dtype):
        assert dtype == torch.float16  # of which ATen rounds the shift otherwise, in one channel of a hundred
        return
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = (torch.randn(8, 64, 3, 3, generator=generator) * 100 + 50).to(dtype, memory_format=torch.channels_last)
        weight, bias = (torch.randn(64, generator=generator).to(dtype) for _ in range(2))
        y, mean, invstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        found = torch.ops.monet.batch_norm_act(x, weight, bias, mean, invstd, None, math.nan, math.nan)
        assert torch.equal(found, y)


# --- backward from output


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


def test_far_beyond_the_guards_limit_the_backward_from_output_errs_four_times_as_much(kernel):
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
@pytest.mark.parametrize("layout", ["contiguous", pytest.param("channels-last", marks=pytest.mark.slow)])
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
