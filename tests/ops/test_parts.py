"""Operators computed for some of the images, or channels, at a time."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.capture import cost
from monetrun.capture.meter import meter_for
from monetrun.ops import registry
from monetrun.ops.memory_format import memory_format
from support.captured import captured
from support.convolutions import CONVOLUTIONS, assert_within_rounding, operands
from support.kernel_cases import DEVICE

aten = torch.ops.aten
monet = torch.ops.monet
registry.load()

DTYPES = (torch.float32, torch.bfloat16)
FORMS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# [N, C, ...]
NORMS = {"2d": (5, 19, 4, 3), "one channel": (3, 1, 4, 4), "1d": (7, 9)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_in_parts_gives_what_the_whole_one_gives(case, last, dtype):
    x, weight, grad, window = operands(case, dtype, last)
    images = 2  # at a time
    bias = torch.linspace(-1, 1, grad.shape[1]).to(x)
    wide = [t.double() for t in (x, weight, grad, bias)]
    whole = aten.convolution(x, weight, bias, *window)
    # without instructions for bfloat16 a CPU's result is contiguous
    given_last = last and whole.is_contiguous(memory_format=memory_format(whole.dim(), last))
    y = monet.convolution_in_parts(x, weight, bias, *window, given_last, images)
    assert y.stride() == whole.stride()
    assert_within_rounding(y, whole, aten.convolution(wide[0], wide[1], wide[3], *window))
    arguments = [grad.shape[1]], *window, [False, True, True]
    absent, *given = monet.convolution_weight_backward_in_parts(grad, x, weight, *arguments, images)
    assert absent is None
    expected = aten.convolution_backward(grad, x, weight, *arguments)[1:]
    exact = aten.convolution_backward(wide[2], wide[0], wide[1], *arguments)[1:]
    for one, other, true in zip(given, expected, exact, strict=True):
        assert one.stride() == other.stride() or not one.numel()
        assert_within_rounding(one, other, true)


def norm_operands(shape, form, dtype=torch.float32, affine=True):
    """Gradient, input and the other arguments of native_batch_norm_backward."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for _ in range(2))
    if len(shape) == 4:
        x, grad = (v.contiguous(memory_format=FORMS[form]) for v in (x, grad))
    vectors = torch.linspace(0.5, 2, shape[1], device=DEVICE)
    over = [d for d in range(x.dim()) if d != 1]
    mean, invstd = x.float().mean(over), (x.float().var(over, correction=0) + 1e-5).rsqrt()
    weight = vectors if affine else None
    return grad, (x, weight, None, None, mean, invstd, True, 1e-5, [True, affine, affine])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", NORMS.values(), ids=list(NORMS))
def test_a_batch_norms_backward_in_parts_gives_what_the_whole_one_gives(shape, form, affine, dtype):
    grad, rest = norm_operands(shape, form, dtype, affine)
    expected = aten.native_batch_norm_backward(grad, *rest)
    wide = [v.double() if isinstance(v, torch.Tensor) else v for v in rest]
    exact = aten.native_batch_norm_backward(grad.double(), *wide)
    given = monet.batch_norm_backward_in_parts(grad, *rest, 4)
    over = grad.clone()
    in_place = monet.batch_norm_backward_in_parts_(over, *rest, 4)
    assert in_place[0].data_ptr() == over.data_ptr()
    assert given[0].stride() == in_place[0].stride() == expected[0].stride()
    for one, other, same, true in zip(given, expected, in_place, exact, strict=True):
        assert (one is None) == (other is None) == (same is None)
        if one is not None:
            assert torch.equal(one, same)
            assert_within_rounding(one, other, true)


def calls_in_parts():
    """Every operator of ``parts`` with arguments."""
    for case in ("2d", "empty", "transposed"):
        x, weight, grad, window = operands(case, torch.float32, False)
        for bias in (None, x.new_zeros((grad.shape[1],))):
            yield monet.convolution_in_parts.default, (x, weight, bias, *window, False, 2)
        for mask in ([False, True, True], [False, True, False]):
            arguments = (grad, x, weight, [grad.shape[1]], *window, mask, 2)
            yield monet.convolution_weight_backward_in_parts.default, arguments
    for affine in (True, False):
        grad, rest = norm_operands((4, 6, 5, 3), "channels_last", affine=affine)
        yield monet.batch_norm_backward_in_parts.default, (grad, *rest, 3)
        yield monet.batch_norm_backward_in_parts_.default, (grad, *rest, 3)


def test_opcheck():
    for operator, arguments in calls_in_parts():
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if not operator._schema.is_mutable:  # torch functionalizes no operator that returns what it writes
            checks.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, arguments, test_utils=checks)


class Net(nn.Module):
    """Two large convolutions, of which one is transposed, and a small one."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(64, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.two = nn.ConvTranspose2d(64, 16, 2, stride=2, bias=False)
        self.small = nn.Conv2d(16, 2, 3)

    def forward(self, x):
        return self.small(F.max_pool2d(self.two(torch.sin(self.norm(self.one(torch.sin(x))))), 8))


def offered(batch, form="contiguous"):
    """The joint graph, and (operator, implementation) of what runs in parts."""
    x = torch.randn(batch, 64, 16, 16).to(DEVICE).contiguous(memory_format=FORMS[form])
    joint = captured(Net().to(memory_format=FORMS[form]), x.requires_grad_())
    return joint, [(i, k) for (i, k), call in joint.calls.items() if "in_parts" in str(call.target)]


def test_large_ones_are_offered_in_parts_where_there_are_several():
    joint, found = offered(16)
    names = [(joint.nodes[i].target, str(joint.calls[i, k].target).split(".")[1]) for i, k in found]
    assert sorted(names, key=str) == sorted(
        [(aten.convolution.default, "convolution_in_parts")] * 2
        + [(aten.convolution_backward.default, "convolution_in_parts")] * 2
        + [(aten.convolution_backward.default, "convolution_weight_backward_in_parts")] * 2
        + [(aten.native_batch_norm_backward.default, "batch_norm_backward_in_parts")]
        + [(aten.native_batch_norm_backward.default, "batch_norm_backward_in_parts_")],
        key=str,
    )
    implementations = [joint.graph.operators[i].implementations[k] for i, k in found]
    assert {i.name for i in implementations} == {"conv:parts", "fused:batch-norm-parts"}
    assert not any(i.exact for i in implementations), "no trial has run"
    joint, found = offered(2)
    assert {joint.graph.operators[i].implementations[k].name for i, k in found} == {"fused:batch-norm-parts"}


@pytest.mark.parametrize("form", FORMS)
def test_parts_take_less_memory_and_a_trial_shows_whether_they_are_exact(form):
    joint, found = offered(16, form)
    meter = meter_for(torch.device(DEVICE))
    known = cost.measure(joint, {}, meter, torch.device(DEVICE))
    costs, graph = cost.costs_of(joint, known, "test"), cost.as_tried(joint, known)
    assert cost.as_tried(joint, {}) == joint.graph
    for i, k in found:
        op = graph.operators[i]
        if "weight_backward" in str(joint.calls[i, k].target):
            assert not op.implementations[k].exact
        elif DEVICE == "cpu":
            assert op.implementations[k].exact, (op.name, joint.calls[i, k].target)
        assert costs.seconds[i][k] >= costs.seconds[i][0]
        if "norm" in op.target and meter.exact:
            x = max(joint.graph.tensors[t].nbytes for t in op.inputs)
            assert costs.workspace_bytes[i][k] <= 0.51 * x
        elif DEVICE == "cpu" and meter.exact and form == "contiguous":
            assert costs.workspace_bytes[i][k] <= 0.5 * costs.workspace_bytes[i][0], op.name
    assert {k: v.eagers_bits for k, v in cost.measure(joint, known, meter, torch.device(DEVICE)).items()} == {}


def test_a_trial_sees_one_bit(monkeypatch):
    library = torch.library.Library("monetrun_test_parts", "DEF")
    library.define("sine(Tensor x, bool off) -> Tensor")

    @torch.library.impl(library, "sine", "CompositeExplicitAutograd")
    def sine(x, off):
        y = torch.sin(x)
        if off:
            last = y.view(-1)[-1:]
            last.copy_(last.nextafter(last.new_full((1,), 2.0)))
        return y

    def alternatives(node, joint):
        for off in (False, True):
            call = registry.Call(torch.ops.monetrun_test_parts.sine.default, (node.args[0], off))
            yield registry.Alternative(f"fused:{off}", call, exact=None)

    registry.load()
    monkeypatch.setitem(registry._generators, aten.sin.default, [alternatives])
    joint = captured(Net(), torch.randn(2, 64, 16, 16).to(DEVICE))
    known = cost.measure(joint, {}, meter_for(torch.device(DEVICE)), torch.device(DEVICE))
    tried = {i.name: i.exact for op in cost.as_tried(joint, known).operators for i in op.implementations}
    assert (tried["fused:False"], tried["fused:True"]) == (True, False)


def test_without_memory_for_a_trial_nothing_is_marked_exact(monkeypatch):
    joint, found = offered(2)

    def refuse(*arguments):
        raise torch.OutOfMemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "normal_", refuse)
        known = cost.measure(joint, {}, meter_for(torch.device(DEVICE)), torch.device(DEVICE))
    assert not any(cost.as_tried(joint, known).operators[i].implementations[k].exact for i, k in found)
