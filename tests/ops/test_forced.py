"""Single implementations, in small models where they are easily wrong: with them, gradients are bitwise eager's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monetrun.core.graph import Costs
from monetrun.core.plan import Schedule, Step
from monetrun.core.simulate import simulate
from monetrun.ops import kernels
from monetrun.runtime.backend import Backend
from support.captured import Chooser

kernels.load("cpu")


class Using(Chooser):
    """Runs operators by the implementations of some names, in place or not, wherever these are offered."""

    def __init__(self, *names, in_place=False):
        self.names, self.in_place = names, in_place

    def choose(self, joint):
        self.joint = joint
        graph = joint.graph
        self.used = []

        def step(op):
            for k, implementation in enumerate(op.implementations[1:], 1):
                named = implementation.name in self.names
                if named and (implementation.in_place_of is not None) == self.in_place:
                    self.used.append((op.target.split(".")[1], implementation.name))
                    return Step(op.id, k)
            return Step(op.id)

        steps = [step(op) for op in graph.operators]
        schedule = Schedule(tuple(steps[: graph.forward_count]), tuple(steps[graph.forward_count :]))
        zeros = [[0] * len(op.implementations) for op in graph.operators]
        simulate(
            graph, Costs("none", tuple(tuple(map(float, row)) for row in zeros), tuple(map(tuple, zeros))), schedule
        )
        return 0, schedule


class Model(nn.Module):
    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x, *self.layers)


def squares(out):
    return out.square().sum()


def differing(make, x, chooser, loss=squares):
    """Which of the loss, x's gradient and the parameters', scheduled by ``chooser``, are not bitwise eager's."""

    def step(compiled):
        torch.manual_seed(0)
        model, given = make(), x.clone().requires_grad_()
        run = model
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(model, backend=Backend(chooser, "case"))
        found = loss(run(given))
        found.backward()
        return {"loss": found, "x": given.grad} | {name: p.grad for name, p in model.named_parameters()}

    expected, given = step(False), step(True)
    return [name for name, value in expected.items() if value is not None and not torch.equal(value, given[name])]


# ---- images of one pixel or channel, whose format only the strides of these dimensions show


def pooled_to_one_pixel():
    def function(x, one, two):
        return two(F.max_pool2d(F.relu(one(x)), 8)).flatten(1)

    model = Model(function, nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 10, 1))
    return model.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("pooling", ["intermediate:index", "output:input"])
def test_pooling_to_one_pixel_gives_a_gradient_of_the_inputs_format(pooling):
    x = torch.randn(16, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    chooser = Using(pooling, "intermediate:mask")
    assert differing(pooled_to_one_pixel, x, chooser) == []
    assert {name for _, name in chooser.used} == {pooling, "intermediate:mask"}


def head_of_one_channel(outside):
    def function(x, one, two, target):
        out = two(F.relu(one(x)))
        return out if outside == "permute" else difference(out, target)

    def difference(out, target):
        out = out.permute(0, 2, 3, 1)
        return out if outside == "loss" else (out - target).square().mean()

    torch.manual_seed(1)
    target = torch.randn(4, 8, 8, 1)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)

    def loss(out):
        if outside == "nothing":
            return out
        out = out.permute(0, 2, 3, 1) if outside == "permute" else out
        return (out - target).square().mean()

    return Model(lambda x, *layers: function(x, *layers, target), *layers), loss


@pytest.mark.parametrize("outside", ["permute", "loss", "nothing"])
def test_a_head_of_one_channel_whose_gradient_is_channels_last_gives_eagers(outside):
    """Eager takes the format of the convolution's input; a convolution of the gradient alone takes the gradient's."""
    chooser = Using("conv:apart", "intermediate:mask")
    loss = head_of_one_channel(outside)[1]
    assert differing(lambda: head_of_one_channel(outside)[0], torch.randn(4, 3, 8, 8), chooser, loss) == []
    assert ("threshold_backward", "intermediate:mask") in chooser.used


# ---- rectifiers


@pytest.mark.parametrize("name", ["output", "output:input", "intermediate:mask"])
@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.hardtanh(h, -1, 1) * F.relu6(h),  # limits that are defaults are not in the traced call
        lambda h: F.hardtanh(F.hardtanh(h, -4.0, 4.0), -1.0, 7.0),
        lambda h: F.relu6(F.relu6(h)),
        lambda h: F.leaky_relu(h) * F.leaky_relu(h, 0.2),
        lambda h: F.leaky_relu(F.leaky_relu(h, -0.5), 0.1),
    ],
    ids=["two limits", "limits within limits", "twice", "two slopes", "falling slope before"],
)
def test_a_rectifiers_backward_reads_its_own_ends(function, name):
    chooser = Using(name)
    assert differing(lambda: Model(lambda x: function(8 * torch.sin(x))), torch.randn(50, 7), chooser) == []
    assert chooser.used or name == "output:input"


# ---- in place


def less_its_copys_column(x):
    h = x.sin()
    copy = h.clone()
    return (h - copy[:, :1]).cos()


def and_its_copy_transposed(x):
    h = x.sin()
    return (h + h.clone().t()).cos()


@pytest.mark.parametrize("function", [less_its_copys_column, and_its_copy_transposed], ids=["a column", "transposed"])
def test_a_copy_is_not_written_over_while_a_view_of_it_is_read(function):
    assert differing(lambda: Model(function), torch.randn(6, 6), Using("output:copy", in_place=True)) == []


def test_a_copy_that_is_itself_the_other_operand_is_written_over():
    def doubled(x):
        h = x.sin()
        return (h + h.clone()).cos()

    chooser = Using("output:copy", in_place=True)
    assert differing(lambda: Model(doubled), torch.randn(6, 6), chooser) == []
    assert chooser.used == [("add", "output:copy")]


class Scaled(nn.Module):
    def __init__(self, dtype, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(16, 16).to(dtype)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x):
        return self.function(self.scale, self.linear(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", [torch.mul, torch.add], ids=["product", "sum"])
def test_a_product_with_one_wider_number_is_not_turned_round(dtype, function):
    chooser = Using("in-place", in_place=True)
    assert differing(lambda: Scaled(dtype, function), torch.randn(64, 16).to(dtype), chooser) == []


# ---- gradients of outputs


@pytest.mark.parametrize(
    ("function", "loss"),
    [
        (lambda x, one, two: F.relu(one(x)).view(-1), torch.sum),
        (lambda x, one, two: F.relu(one(x).view(-1)), lambda out: out.expand(3, 16).t().square().sum()),
        (
            lambda x, one, two: (F.relu(one(x)).view(-1), F.relu(two(x)).squeeze(1)),
            lambda outs: F.cross_entropy(torch.stack(outs, 1), torch.arange(16) % 2),
        ),
    ],
    ids=["expanded", "from a sum", "columns"],
)
def test_gradients_of_vectors_arrive_with_gaps(function, loss):
    chooser = Using("intermediate:mask")
    make = lambda: Model(function, nn.Linear(4, 1), nn.Linear(4, 1))  # noqa: E731
    assert differing(make, torch.randn(16, 4), chooser, loss) == []
    assert {name for _, name in chooser.used} == {"intermediate:mask"}


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_the_gradient_of_each_rows_cross_entropy_arrives_expanded(reduction):
    def function(x, linear):
        return F.cross_entropy(linear(x), torch.arange(16) % 9, reduction=reduction)

    chooser = Using("fused:cross-entropy")
    assert differing(lambda: Model(function, nn.Linear(4, 9)), torch.randn(16, 4), chooser, torch.sum) == []
    assert chooser.used == [("_log_softmax_backward_data", "fused:cross-entropy")]


# ---- what kernels do not take


@pytest.mark.parametrize("name", ["conv:apart", "conv:parts"])
@pytest.mark.parametrize("padding", [0, 1])
def test_a_transposed_convolutions_gradient_where_its_output_is_padded_beyond_the_stride(name, padding):
    """Of a convolution of the gradient one more window would begin in that padding."""
    transposed = lambda: nn.ConvTranspose2d(4, 4, 3, stride=1, dilation=2, output_padding=padding)  # noqa: E731
    make = lambda: Model(lambda x, one, two: two(one(x)), nn.Conv2d(4, 4, 1), transposed())  # noqa: E731
    chooser = Using(name)
    found = differing(make, torch.randn(32, 4, 6, 6), chooser)
    assert [n for n in found if n == "x" or name == "conv:apart"] == []  # parts add up weights' gradients otherwise
    backward = [used for used in chooser.used if used[0] == "convolution_backward"]
    of_inputs = len(backward) - (2 if name == "conv:parts" else 0)
    assert of_inputs == (1 if padding else 2)


@pytest.mark.parametrize(
    ("norm", "after", "name"),
    [
        (nn.BatchNorm2d, F.relu, "fused:batch-norm"),
        (nn.BatchNorm2d, F.silu, "output:batch-norm"),
        (lambda channels: nn.GroupNorm(2, channels), F.silu, "output:group-norm"),
    ],
    ids=["batch norm and relu", "batch norm", "group norm"],
)
@pytest.mark.parametrize("columns", [1, 2])
def test_weights_of_norms_that_are_columns_are_left_to_atens_kernels(norm, after, name, columns):
    def make():
        layers = nn.Conv2d(3, 6, 3), norm(6)
        layers[1].weight = nn.Parameter((1 + torch.rand(6, columns))[:, 0])
        return Model(lambda x, one, two: after(two(one(x))), *layers)

    chooser = Using(name)
    found = differing(make, torch.randn(4, 3, 6, 6), chooser)
    assert bool(chooser.used) == (columns == 1)
    assert not found or (columns == 1 and name != "fused:batch-norm")
