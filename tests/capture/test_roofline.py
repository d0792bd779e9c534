"""The roofline model's cost of an operator."""

import dataclasses

import pytest
import torch
from torch._subclasses import FakeTensorMode

from monetrun.capture import roofline
from monetrun.core.errors import UsageError
from monetrun.ops import registry

aten = torch.ops.aten
monet = torch.ops.monet
P100 = roofline.DEVICES["p100"]


def call(target, *arguments, model=P100, **keywords):
    return roofline.estimate(target, arguments, keywords, target(*arguments, **keywords), model)


@pytest.fixture(autouse=True)
def _fake():
    with FakeTensorMode():
        yield


def test_elementwise_costs_what_it_reads_and_writes():
    x = torch.empty(1 << 20, 64)
    assert call(aten.relu.default, x) == pytest.approx(2 * x.nbytes / (0.75 * 732e9))
    assert call(aten.add.Tensor, x, torch.empty_like(x)) == pytest.approx(3 * x.nbytes / (0.75 * 732e9))
    broadcast = torch.empty(64).expand(1 << 20, 64)
    assert call(aten.add.Tensor, x, broadcast) == pytest.approx((2 * x.nbytes + 256) / (0.75 * 732e9))
    assert call(aten.zeros_like.default, x) == pytest.approx(x.nbytes / (0.75 * 732e9))


def test_a_small_call_costs_its_launch():
    assert call(aten.relu.default, torch.empty(8)) == P100.launch_seconds == 5e-6


def test_views_are_free():
    x = torch.empty(1024, 1024)
    assert call(aten.t.default, x) == 0.0
    assert call(aten.view.default, x, [-1]) == 0.0
    assert call(aten.split.Tensor, x, 512) == 0.0
    assert call(aten.relu_.default, x) > 0.0


def test_matrix_products_cost_their_flops_at_the_rate_of_their_dtype():
    def seconds(dtype, device):
        a = torch.empty(8192, 8192, dtype=dtype)
        return call(aten.mm.default, a, a, model=roofline.DEVICES[device])

    flops = 2 * 8192**3
    assert seconds(torch.float32, "p100") == pytest.approx(flops / (0.6 * 10.6e12))
    assert seconds(torch.float16, "p100") == pytest.approx(flops / (0.6 * 21.2e12))
    assert seconds(torch.float16, "v100") == pytest.approx(flops / (0.4 * 125e12))
    assert seconds(torch.bfloat16, "v100") == pytest.approx(flops / (0.6 * 15.7e12))  # it has no such units
    assert seconds(torch.float32, "a100") == pytest.approx(flops / (0.6 * 19.5e12))
    bias, a = torch.empty(8192), torch.empty(8192, 8192)
    assert call(aten.addmm.default, bias, a, a) == pytest.approx(flops / (0.6 * 10.6e12))
    batched = torch.empty(8, 2048, 2048)
    assert call(aten.bmm.default, batched, batched) == pytest.approx(8 * 2 * 2048**3 / (0.6 * 10.6e12))


def test_tensor_float_allowed_by_the_newer_name_is_read_too():
    """torch refuses to read the older one then."""
    x = torch.empty(1024, 1024)
    expected = call(aten.mm.default, x, x, model=roofline.DEVICES["h100"])
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert call(aten.mm.default, x, x, model=roofline.DEVICES["h100"]) < expected
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_fp32_matrix_products_use_tensor_cores_where_the_script_allows_it():
    a = torch.empty(8192, 8192)
    torch.set_float32_matmul_precision("high")
    try:
        seconds = call(aten.mm.default, a, a, model=roofline.DEVICES["a100"])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seconds == pytest.approx(2 * 8192**3 / (0.4 * 156e12))


def convolution(kernel, groups=1, stride=1, transposed=False):
    """Flops (multiplications and additions of one direction), and arguments shared by forward and backward."""
    x = torch.empty(32, 256, 56, 56)
    shape = (256, 256 // groups, kernel, kernel)
    weight = torch.empty(shape)
    rest = ([stride, stride], [kernel // 2] * 2, [1, 1], transposed, [0, 0], groups)
    out = aten.convolution.default(x, weight, None, *rest)
    positions = (x if transposed else out).shape[2:].numel()
    return 2 * 32 * positions * weight.numel(), x, weight, out, rest


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("kernel", "groups", "saving"), [(1, 1, 1), (3, 1, 2.25), (5, 1, 1), (5, 4, 1)])
def test_each_gradient_of_a_convolution_costs_as_much_as_its_forward(kernel, groups, saving, transposed):
    flops, x, weight, out, rest = convolution(kernel, groups, transposed=transposed)
    expected = flops / saving / (0.6 * 10.6e12)
    assert call(aten.convolution.default, x, weight, None, *rest) == pytest.approx(expected)
    for mask, times in (([True, False, False], 1), ([False, True, False], 1), ([True, True, True], 2)):
        seconds = call(aten.convolution_backward.default, out, x, weight, [256], *rest, mask)
        assert seconds == pytest.approx(times * expected)


def test_depthwise_convolutions_are_bound_by_memory():
    flops, x, weight, _, rest = convolution(3, groups=256)
    expected = (2 * x.nbytes + weight.nbytes) / (0.75 * 732e9)
    assert call(aten.convolution.default, x, weight, None, *rest) == pytest.approx(expected)
    assert flops / (0.6 * 10.6e12) < expected


def test_convolutions_in_fp32_run_on_tensor_cores_where_there_are_any():
    flops, x, weight, _, rest = convolution(5)
    seconds = call(aten.convolution.default, x, weight, None, *rest, model=roofline.DEVICES["a100"])
    assert seconds == pytest.approx(flops / (0.4 * 156e12))


def test_batch_normalization_reads_its_input_twice():
    x, c = torch.empty(32, 64, 56, 56), torch.empty(64)
    seconds = call(aten.native_batch_norm.default, x, c, c, c, c, True, 0.1, 1e-5)
    assert seconds == pytest.approx(3 * x.nbytes / (0.75 * 732e9), rel=1e-3)


def test_an_operator_of_a_family_costs_what_it_declares():
    registry.load()
    x, grad, c = torch.empty(32, 64, 56, 56), torch.empty(32, 64, 56, 56), torch.empty(64)
    mask, wanted = torch.empty(x.numel() // 8, dtype=torch.uint8), (True, True, True)
    norm = (x, c, None, None, c, c, True, 1e-5, wanted)
    for times, target, *arguments in (
        (2 + 1 / 32, monet.mask_scale.default, x, mask, 2.0),
        (2 * 2 + 1, monet.channel_norm_output_backward.default, grad, x, c, c, c, wanted),
        (4 * 2 + 3, monet.batch_norm_backward_in_parts.default, grad, *norm, 8),
    ):
        assert call(target, *arguments) == pytest.approx(times * x.nbytes / (0.75 * 732e9), rel=1e-3), target
    weight, window = torch.empty(64, 64, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    memory_bound = dataclasses.replace(P100, flops_per_second={"fp32": 1e30})
    seconds = call(monet.convolution_in_parts.default, x, weight, None, *window, False, 8, model=memory_bound)
    assert seconds == pytest.approx((1 + 3) * x.nbytes / (0.75 * 732e9), rel=1e-3)


def test_operands_that_only_give_their_shape_are_not_read():
    x = torch.empty(32, 64, 56, 56)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    y, index = aten.max_pool2d_with_indices.default(x, *window)
    seconds = call(aten.max_pool2d_with_indices_backward.default, y, x, *window, index)
    assert seconds == pytest.approx((x.nbytes + y.nbytes + index.nbytes) / (0.75 * 732e9))


def test_attention_costs_its_flops():
    q = torch.empty(8, 16, 1024, 64)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert call(forward, q, q, q) == pytest.approx(4 * 8 * 16 * 1024 * 1024 * 64 / (0.6 * 10.6e12))


def test_gathers_read_only_the_rows_they_take():
    weight, index = torch.empty(50000, 1024), torch.empty(64, 1024, dtype=torch.int64)
    written = 64 * 1024 * 1024 * 4
    assert call(aten.embedding.default, weight, index) == pytest.approx(
        (written + min(written, weight.nbytes) + index.nbytes) / (0.75 * 732e9)
    )
    few = torch.empty(4, 1024, dtype=torch.int64)
    assert call(aten.embedding.default, weight, few) == pytest.approx(
        (2 * 4 * 1024 * 4096 + few.nbytes) / (0.75 * 732e9)
    )


def test_cost_models_are_named_and_unknown_ones_refused_with_the_list():
    assert roofline.parse("measured") is None
    assert roofline.parse("roofline:h200").memory_bytes == 143771 << 20
    for wrong in ("roofline:p1000", "p100", "roofline", "roofline:measured", ""):
        with pytest.raises(UsageError) as error:
            roofline.parse(wrong)
        assert repr(wrong) in str(error.value)
        assert "measured, roofline:p100, roofline:v100, roofline:a100" in error.value.hint
