"""The operators of torch.ops.monet: native kernels and references, compared bitwise with ATen."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monetrun.core.native import included, source_folder
from monetrun.ops import cuda, definition, kernels, registry
from monetrun.ops.cuda import pooling
from monetrun.ops.families import cross_entropy
from support.kernel_cases import DEVICE, INF, NAN, assert_same, dtypes, laid_out, layouts, numbers, operators, shapes

aten, monet = torch.ops.aten, torch.ops.monet
pytestmark = pytest.mark.usefixtures("on_the_device")
registry.load()

# operators that are checked beside the other tests of their families
CHECKED_ELSEWHERE = {
    "convolution_by",
    "convolution_weight_backward_by",
    "convolution_in_parts",
    "convolution_weight_backward_in_parts",
    "batch_norm_backward_in_parts",
    "batch_norm_backward_in_parts_",
    "cudnn_convolution",
    "cudnn_convolution_weight_backward",
}


@pytest.fixture(scope="module", params=["native", "reference", "cuda on the CPU"])
def kernel(request):
    """As in the other files, and with CUDA's kernels run on the CPU."""
    with operators(request.param) as found:
        yield found


# --- masks


@dtypes
@layouts
@shapes
def test_a_masked_backward_is_bitwise_identical_to_atens(kernel, shape, layout, dtype):
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
def test_scaling_by_a_packed_mask_is_bitwise_identical_to_a_product(kernel, shape, layout, dtype):
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


@dtypes
@layouts
@shapes
def test_the_backward_of_a_dropout_of_bytes_rounds_once(kernel, shape, layout, dtype):
    grad = numbers(shape, dtype, layout)
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(2), device="cpu")
    kept = laid_out((drawn > 0.3).to(DEVICE), layout)
    mask = kernel("nonzero_mask")(kept)
    assert torch.equal(mask, kernel("nonzero_mask")(kept.to(torch.float32)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for scale in (2.0, 1 / 0.7):
        expected = (grad.to(wide) * (kept.to(wide) * scale)).to(dtype)
        assert_same(kernel("dropout_backward")(grad, mask, scale), expected)
        if DEVICE != "cpu":
            assert_same(expected, aten.native_dropout_backward(grad, kept, scale))
    over = grad.clone()
    assert kernel("dropout_backward_")(over, mask, scale).data_ptr() == over.data_ptr()
    assert_same(over, expected)


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


def test_a_mask_has_one_bit_per_element_lowest_first_and_zeros_behind_the_last(kernel):
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
    ((5, 4), [5, 4], [], [0, 0], [1, 1], False),  # one pixel, whose format is both
    ((4, 5), [1, 1], [3, 3], [0, 0], [1, 1], False),
]


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@dtypes
def test_pooling_by_one_byte_is_bitwise_identical_to_atens(kernel, layout, dtype, request):
    # ATen adds gradients up in float32 on CUDA, and on the CPU in their own dtype
    added_in = torch.promote_types(dtype, torch.float32) if "cuda on the CPU" in request.node.name else dtype
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
        wide = grad.to(added_in), x.to(added_in)
        expected = aten.max_pool2d_with_indices_backward(*wide, *place, ceil_mode, flat).to(dtype)
        form = layout == "channels-last"
        assert_same(kernel("max_pool2d_index_backward")(grad, index, list(x.shape), *place, form), expected)
        assert_same(kernel("max_pool2d_input_backward")(grad, x, *place, ceil_mode), expected)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
@example(1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**30 + 1, 2**31 - 1)
@example(3, 2**31 - 2)
def test_the_kernels_divide_by_multiplying(divisor, number):
    factor, shift = divmod(pooling._divider(divisor), 1 << 8)
    assert factor < 1 << 32
    high = number * factor >> 32
    assert high + number < 1 << 32
    assert (high + number) >> shift == number // divisor


def test_a_window_that_a_byte_cannot_name_is_refused(kernel):
    with pytest.raises(RuntimeError, match="255"):
        kernel("max_pool2d_index")(torch.randn(1, 1, 16, 16), [16, 16], [1, 1], [0, 0], [1, 1], False)


# --- cross entropy


@pytest.mark.parametrize("reduction", [0, 1, 2])
@dtypes
def test_the_gradient_of_cross_entropy_is_bitwise_identical_to_atens(kernel, reduction, dtype, monkeypatch):
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, DEVICE, 1000)
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
    mask, logs = monet.range_mask(x, 0.0, NAN), torch.log_softmax(torch.randn(5, 7), 1)
    window = [3, 3], [2, 2], [1, 1], [1, 1]
    c = torch.randn(3)
    nll = torch.randint(7, (5,)), None, 1, -100, torch.tensor(5.0), 1
    images = x.contiguous(memory_format=torch.channels_last)
    return {
        "add_output_gradient": (x.transpose(1, 2).contiguous().transpose(1, 2), torch.randn(6, 36), True, False),
        "range_mask": (x, 0.0, 6.0),
        "nonzero_mask": (x.transpose(1, 2),),
        "mask_backward": (x, mask, 0.1),
        "mask_backward_": (x.clone(), mask, 0.0),
        "mask_scale": (x, mask, 2.0),
        "mask_scale_": (x.clone(), mask, 2.0),
        "dropout_backward": (x, mask, 2.0),
        "dropout_backward_": (x.clone(), mask, 2.0),
        "cudnn_batch_norm": (images, c, c, c.clone(), c.abs(), 0.1, 1e-5, 16),
        "cudnn_batch_norm_again": (x, c, None, 1e-5, 16),
        "cudnn_batch_norm_inference": (images, c, c, c, c.abs(), 1e-5),
        "hardswish_output_backward": (x, x, mask),
        "hardswish_output_backward_": (x.clone(), x, mask),
        "softplus_output_backward": (x, x, 1.0, 20.0),
        "max_pool2d_index": (images, *window, False),
        "max_pool2d_index_backward": (
            torch.randn(2, 3, 3, 3),
            monet.max_pool2d_index(x, *window, False),
            [2, 3, 6, 6],
            *window,
            False,
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
    assert samples().keys() | CHECKED_ELSEWHERE == definition.REFERENCES.keys()
    assert samples().keys().isdisjoint(CHECKED_ELSEWHERE)


@pytest.mark.parametrize("name", sorted(definition.REFERENCES.keys() - CHECKED_ELSEWHERE))
def test_opcheck(name):
    kernels.load(DEVICE)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not name.endswith("_"):  # torch functionalizes no operator that returns what it writes
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(monet, name).default, samples()[name], test_utils=checks)


@pytest.mark.parametrize(("source", "suffix"), [("ops_cpu.cpp", "_cpu.hpp"), ("ops_cuda.cu", ".cuh")])
def test_every_kernel_file_is_compiled(source, suffix):
    """A file that nothing includes would leave its operators to their references, silently."""
    files = set(source_folder().glob(f"*{suffix}"))
    assert files - set(included(source_folder() / source)) == set()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kernel_is_registered(device):
    cpu = {name for file in included(source_folder() / "ops_cpu.cpp") for name in registered_kernels(file)}
    names = cpu if device == "cpu" else cuda.FUNCTIONS.keys()
    assert {"range_mask", "hardswish_output_backward"} < names <= definition.REFERENCES.keys()
    if device == DEVICE and kernels.load(device):
        key = device.upper()
        assert [n for n in names if not torch._C._dispatch_has_kernel_for_dispatch_key(f"monet::{n}", key)] == []


def registered_kernels(path):
    return re.findall(r"^MONET_KERNEL\((\w+)\);", path.read_text(), re.MULTILINE)


def test_without_a_compiler_the_references_run_and_the_reason_is_given(tmp_path):
    code = (
        "import torch\nfrom monetrun.ops import kernels\n"
        "assert not kernels.load()\nassert 'CXX' in kernels.unavailable_reason()\n"
        "print(torch.ops.monet.range_mask(torch.tensor([1.0, -1.0]), 0.0, 9.0).tolist())"
    )
    environment = {**os.environ, "CXX": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1]"


def test_a_made_up_index_writes_nothing_outside_of_its_plane(kernel):
    """Costs are measured on made-up indices: place 0 of the first windows is in the padding."""
    grad, index = torch.ones(4, 1, 5, 5), torch.zeros(4, 1, 5, 5, dtype=torch.uint8)
    given = kernel("max_pool2d_index_backward")(grad, index, [4, 1, 9, 9], [3, 3], [2, 2], [1, 1], [1, 1], False)
    # the first row of windows falls outside, not into the plane before; the first column too, or into the row before
    assert given.sum((1, 2, 3)).tolist() in ([16.0] * 4, [20.0] * 4)
