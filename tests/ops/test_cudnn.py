"""cuDNN's plans: which are worth a choice, how the package is called, and that it is not called without a GPU.

``Frontend`` stands for the package: it takes what that takes, checks that buffers are as declared, and computes with
ATen. Where the package itself is installed, its plans for a described GPU are listed too, which needs no device.
"""

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from monetrun.ops import cudnn, registry
from monetrun.ops.cudnn import Problem
from monetrun.ops.families import cudnn_convolution
from monetrun.ops.memory_format import memory_format
from support.captured import strides
from support.convolutions import CONVOLUTIONS, assert_within_rounding, operands
from support.kernel_cases import DEVICE

aten = torch.ops.aten
monet = torch.ops.monet
MIB = 1 << 20

# an H100's, as cuDNN itself writes them down
H100 = {
    "deviceName": "NVIDIA H100 80GB HBM3",
    "deviceVer": 900,
    "driverVer": 13000,
    "regsPerBlock": 65536,
    "multiProcessorCount": 132,
    "smCountOrigin": 0,
    "warpSize": 32,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024,
    "oversizedSharedMemoryPerBlock": 0,
    "maxRegistersPerSM": 65536,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "maxCtasPerSM": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxBlockSize": [1024, 1024, 64],
    "pciDeviceId": 0,
    "cudaDeviceId": 0,
    "isTccDriver": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 85_000_000_000,
    "smClockRateKHz": 1980000,
    "memClockRateKHz": 2619000,
    "l2CacheSize": 52428800,
}


class NotSupported(Exception):
    pass


class Declared:
    def __init__(self, dim=None, stride=None):
        self.dim, self.stride = dim, stride

    def set_output(self, value):
        assert value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self


class Frontend:
    """The package, with given plans: (name, workspace in bytes)."""

    cudnnGraphNotSupportedError = NotSupported
    data_type = SimpleNamespace(FLOAT="float", HALF="half", BFLOAT16="bfloat16")
    heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
    numerical_note = SimpleNamespace(NONDETERMINISTIC="n", DOWN_CONVERT_INPUTS="d", TENSOR_CORE="t")

    def __init__(self, *plans):
        self.plans, self.built, self.ran, self.fails, self.deselected = list(plans), [], [], None, None

    def pygraph(self, **where):
        return Graph(self, where)


class Graph:
    def __init__(self, frontend, where):
        self.frontend, self.where = frontend, where
        self.ready, self.built = [], set()

    def tensor(self, name, dim, stride):
        return Declared(dim, stride)

    def _convolution(self, function, *given, padding, stride, dilation):
        self.function, self.given, self.made = function, given, Declared()
        self.window = stride, padding, dilation
        return self.made

    def conv_fprop(self, image, weight, **window):
        return self._convolution("fprop", image, weight, **window)

    def conv_dgrad(self, loss, filter, **window):
        return self._convolution("dgrad", loss, filter, **window)

    def conv_wgrad(self, image, loss, **window):
        return self._convolution("wgrad", image, loss, **window)

    def validate(self):
        self.ready.append("validate")

    def build_operation_graph(self):
        self.ready.append("operations")

    def create_execution_plans(self, modes):
        assert self.ready == ["validate", "operations"]
        if not self.frontend.plans:
            raise NotSupported("no engine")

    def get_execution_plan_count(self):
        return len(self.frontend.plans)

    def get_plan_name_at_index(self, index):
        return self.frontend.plans[index][0]

    def deselect_numeric_notes(self, notes):
        self.frontend.deselected = notes

    def build_plan_at_index(self, index):
        if self.frontend.plans[index][1] is None:
            raise NotSupported("Deselecting execution plan")
        self.built.add(index)
        self.frontend.built.append(self.frontend.plans[index][0])

    def get_workspace_size_plan_at_index(self, index):
        assert index in self.built
        return self.frontend.plans[index][1]

    def execute_plan_at_index(self, buffers, workspace, index, handle):
        name, nbytes = self.frontend.plans[index]
        assert index in self.built
        assert (workspace.numel(), workspace.dtype, handle) == (nbytes, torch.uint8, "handle")
        for declared, buffer in buffers.items():
            assert list(buffer.shape) == declared.dim
            assert strides(buffer) == [s for s, n in zip(declared.stride, declared.dim, strict=True) if n > 1]
        if self.frontend.fails is not None:
            raise self.frontend.fails
        self.frontend.ran.append(name)
        one, other = (buffers[t] for t in self.given)
        result = buffers[self.made]
        rest = (*self.window, False, [0] * (one.dim() - 2))
        if self.function == "fprop":
            result.copy_(aten.convolution(one, other, None, *rest, one.shape[1] // other.shape[1]))
        elif self.function == "dgrad":
            rest = (*rest, result.shape[1] // other.shape[1], [True, False, False])
            result.copy_(aten.convolution_backward(one, torch.empty_like(result), other, None, *rest)[0])
        else:
            rest = (*rest, one.shape[1] // result.shape[1], [False, True, False])
            result.copy_(aten.convolution_backward(other, one, torch.empty_like(result), None, *rest)[1])


@pytest.fixture
def frontend(monkeypatch):
    """The package, beside a device that is the CPU."""
    stand_in = Frontend(("eng1", 4 * MIB), ("eng2_k2=0", 0))
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    monkeypatch.setattr(cudnn, "_handle", lambda device: contextlib.nullcontext("handle"))
    monkeypatch.setattr(cudnn, "_new_handle", lambda device: "handle")
    monkeypatch.setattr(cudnn, "_named", {})
    caches = cudnn._built, cudnn.agrees
    for cached in caches:
        cached.cache_clear()
    cudnn._failed.clear()
    yield stand_in
    for cached in caches:
        cached.cache_clear()
    cudnn._failed.clear()


# ---- which plans


def test_the_front_has_the_plans_with_clearly_less_workspace_than_all_before():
    plans = [("a", 100 * MIB), ("b", 95 * MIB), ("c", 120 * MIB), ("d", 60 * MIB), ("e", 60 * MIB), ("f", 0)]
    assert [name for name, _ in cudnn.front(plans)] == ["a", "d", "f"]
    assert cudnn.front([("a", MIB // 2), ("b", 0)]) == [("a", MIB // 2)]
    assert cudnn.front([]) == []
    falling = [(str(n), (9 - n) * 100 * MIB) for n in range(10)]
    assert [name for name, _ in cudnn.front(falling)] == ["0", "1", "2", "9"]


def test_no_plan_is_built_after_one_with_hardly_a_workspace(frontend):
    frontend.plans = [("eng1", 8 * MIB), ("eng2", MIB - 1), ("eng3", 0)]
    assert [name for name, _ in cudnn.plans_of(PROBLEM, True, handle="handle")] == ["eng1", "eng2"]
    assert frontend.built == ["eng1", "eng2"]


PROBLEM = Problem.of(
    "fprop", [(2, 4, 8, 8), (6, 4, 3, 3), (2, 6, 6, 6)], [(1, 1), (0, 0), (1, 1)], torch.float32, False
)


def test_plans_that_are_refused_or_not_cudnns_are_left_out(frontend):
    frontend.plans = [("eng3", None), ("cute_conv", 0), ("eng4", 8 * MIB), ("eng5", 2 * MIB)]
    assert cudnn.plans_of(PROBLEM, True, handle="handle") == [("eng4", 8 * MIB), ("eng5", 2 * MIB)]
    assert frontend.deselected == ["n", "d"]
    cudnn.plans_of(PROBLEM, False, handle="handle")
    assert frontend.deselected == ["n", "d", "t"]
    frontend.plans = []
    assert cudnn.plans_of(PROBLEM, True, handle="handle") == []


def test_plans_are_looked_for_once_on_a_device_and_not_where_another_process_did(frontend):
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert cudnn.plans_on(PROBLEM, True, one) == ("eng1", "eng2_k2=0")
    frontend.plans = []
    assert cudnn.plans_on(PROBLEM, True, one) == ("eng1", "eng2_k2=0")
    assert cudnn.plans_on(PROBLEM, False, one) == ()
    assert cudnn.plans_on(replace(PROBLEM, channels_last=True), True, one) == ()
    cudnn.tell(other, cudnn.named(one))
    assert cudnn.plans_on(PROBLEM, True, other) == ("eng1", "eng2_k2=0")
    assert len(cudnn.named(other)) == 3


# ---- running one


def forward(last, arguments, plan):
    return cudnn_convolution._convolution_on_cuda(*arguments, last, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [name for name in CONVOLUTIONS if name != "empty"])
def test_every_operation_gives_what_aten_gives(case, last, dtype, frontend):
    x, weight, grad, window = operands(case, dtype, last)
    form = memory_format(x.dim(), last)
    bias = torch.linspace(-1, 1, grad.shape[1]).to(x)
    wide = [t.double() for t in (x, weight, bias, grad)]
    given = forward(last, (x, weight, bias, *window), "eng2_k2=0")
    expected = aten.convolution(x, weight, bias, *window)
    assert_within_rounding(given, expected, aten.convolution(*wide[:3], *window), form)
    arguments = [grad.shape[1]], *window, [False, True, True]
    absent, *given = cudnn_convolution._weight_backward_on_cuda(grad, x, weight, *arguments, last, "eng1")
    assert absent is None
    expected = aten.convolution_backward(grad, x, weight, *arguments)[1:]
    exact = aten.convolution_backward(wide[3], *wide[:2], *arguments)[1:]
    for k, of_format in enumerate((form, torch.contiguous_format)):
        assert_within_rounding(given[k], expected[k], exact[k], of_format)
    assert frontend.ran == ["eng2_k2=0", "eng1"]


def test_a_plan_is_found_by_its_name(frontend):
    x, weight, _, window = operands("2d", torch.float32, False)
    frontend.plans.insert(0, ("eng0", 0))
    forward(False, (x, weight, None, *window), "eng1")
    assert frontend.ran == ["eng1"]


@pytest.mark.parametrize(("plan", "error"), [("eng9", None), ("eng1", NotSupported), ("eng1", RuntimeError)], ids=str)
def test_atens_choice_runs_in_place_of_a_plan_that_fails(plan, error, frontend, caplog):
    x, weight, _, window = operands("2d", torch.float32, False)
    frontend.fails = error and error("bad")
    caplog.set_level(logging.WARNING, "monetrun")
    for _ in range(2):
        given = forward(False, (x, weight, None, *window), plan)
        assert torch.equal(given, aten.convolution(x, weight, None, *window))
    (record,) = caplog.records
    assert f"cuDNN's plan {plan} fails" in record.getMessage()
    assert frontend.ran == []


def test_running_out_of_memory_is_raised(frontend):
    x, weight, _, window = operands("2d", torch.float32, False)
    frontend.fails = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):
        forward(False, (x, weight, None, *window), "eng1")


@pytest.mark.parametrize("operation", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_plans_are_tried_on_a_small_problem_before_any_is_offered(operation, last, frontend, monkeypatch):
    arguments = (operation, 4, torch.float32, last, torch.device("cpu"))
    assert cudnn.agrees(*arguments)
    assert set(frontend.ran) == {"eng1", "eng2_k2=0"} or frontend.ran == ["eng1"]
    cudnn.agrees.cache_clear()
    right = Graph.execute_plan_at_index

    def wrong(self, buffers, *rest):
        right(self, buffers, *rest)
        buffers[self.made].neg_()

    monkeypatch.setattr(Graph, "execute_plan_at_index", wrong)
    assert not cudnn.agrees(*arguments)


# ---- the operators


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_opcheck(case, last):
    x, weight, grad, window = operands(case, torch.float32, last)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    convolution = (x, weight, x.new_zeros((grad.shape[1],)), *window, last, "eng1")
    backward = (grad, x, weight, [grad.shape[1]], *window, [False, True, True], last, "eng1")
    torch.library.opcheck(monet.cudnn_convolution.default, convolution, test_utils=checks)
    torch.library.opcheck(monet.cudnn_convolution_weight_backward.default, backward, test_utils=checks)


# ---- what is offered


def offered(device, case="2d", dtype=torch.float32, last=False):
    """Names and calls of what is offered for a convolution and its two gradients."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        x_size, weight_size, *window = CONVOLUTIONS[case]
        form = memory_format(len(x_size), last)
        x, weight = (
            torch.empty(size, device=device, dtype=dtype, memory_format=form) for size in (x_size, weight_size)
        )
        sizes = aten.convolution(x.to("meta"), weight.to("meta"), None, *window).shape
        y = torch.empty(sizes, device=device, dtype=dtype, memory_format=form)
        nodes = []
        for name, value in (("x", x), ("weight", weight), ("grad", y)):
            nodes.append(graph.placeholder(name))
            nodes[-1].meta["val"] = value
        calls = [graph.call_function(aten.convolution.default, (*nodes[:2], None, *window))]
        calls[0].meta["val"] = y
        for mask, value in (
            ([True, False, False], (x, None, None)),
            ([False, True, True], (None, weight, y.new_empty(sizes[1]))),
        ):
            arguments = (nodes[2], nodes[0], nodes[1], [sizes[1]], *window, mask)
            calls.append(graph.call_function(aten.convolution_backward.default, arguments))
            calls[-1].meta["val"] = value
    graph.output(calls)
    found = registry.alternatives(torch.fx.GraphModule(nn.Module(), graph))
    return [[a for a in found.get(call, ()) if a.name.startswith("conv:cudnn")] for call in calls]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_each_plan_is_offered_for_each_pass(last, frontend, monkeypatch):
    monkeypatch.setattr(cudnn_convolution, "unavailable_reason", lambda: None)
    monkeypatch.setattr(cudnn_convolution, "agrees", lambda *problem: True)
    for case in ("2d", "transposed", "3d"):
        convolution, into, weight = offered("cuda", case, last=last)
        assert [[a.name for a in row] for row in (convolution, into, weight)] == [["conv:cudnn-0", "conv:cudnn-1"]] * 3
        assert [a.call.target for a in (convolution[0], into[0], weight[0])] == [
            monet.cudnn_convolution.default,
            monet.cudnn_convolution.default,
            monet.cudnn_convolution_weight_backward.default,
        ]
        assert [a.call.args[-1] for a in into] == ["eng1", "eng2_k2=0"]
        assert [row[0].call.only for row in (convolution, into, weight)] == [None, 0, None]
        assert not any(a.exact for row in (convolution, into, weight) for a in row)
    assert offered("cuda", dtype=torch.float64) == [[], [], []]
    assert offered("cuda", "empty") == [[], [], []]
    assert offered("cpu") == [[], [], []]
    with torch.backends.cudnn.flags(enabled=False):
        assert offered("cuda", last=last) == [[], [], []]
    monkeypatch.setattr(cudnn_convolution, "agrees", lambda *problem: False)
    assert offered("cuda", last=last) == [[], [], []]


def test_without_a_device_the_package_is_not_imported(tmp_path):
    (tmp_path / "cudnn.py").write_text("raise SystemExit('imported')\n")
    code = (
        "import sys, torch\nfrom monetrun.ops import cudnn, registry\nregistry.load()\n"
        "torch.cuda.is_available = lambda: False\n"
        "print(cudnn.unavailable_reason(), 'cudnn' in sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "torch sees no CUDA device, or has no cuDNN False\n", done.stderr


# ---- the package itself, and a GPU that is described


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="nvidia-cudnn-frontend is not installed")
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", ["fprop", "dgrad", "wgrad"])
def test_cudnn_has_plans_for_every_operation(operation, dtype, last):
    package = importlib.import_module("cudnn")
    described = package.create_device_properties(json.dumps(H100))
    for image, filter, response, *window in (
        [(64, 64, 56, 56), (64, 64, 3, 3), (64, 64, 56, 56), (1, 1), (1, 1), (1, 1)],
        [(64, 32, 28, 28), (64, 8, 3, 3), (64, 64, 12, 12), (2, 2), (0, 0), (2, 2)],
        [(4, 16, 8, 8, 8), (32, 16, 3, 3, 3), (4, 32, 8, 8, 8), (1,) * 3, (1,) * 3, (1,) * 3],
    ):
        problem = Problem.of(operation, (image, filter, response), window, dtype, last)
        plans = cudnn.plans_of(problem, True, device_property=described)
        workspaces = [nbytes for _, nbytes in plans]
        assert 1 <= len(plans) <= cudnn.MOST_PLANS
        assert workspaces == sorted(workspaces, reverse=True)
        assert len({name for name, _ in plans}) == len(plans)
        assert plans == cudnn.plans_of(problem, True, device_property=described)
        if dtype == torch.float32:
            precise = cudnn.Drawn(problem, device_property=described)
            precise.deselect(False)
            usual = cudnn.Drawn(problem, device_property=described)
            usual.deselect(True)
            counts = [sum(d.build(i) is not None for i in range(len(d.names()))) for d in (precise, usual)]
            assert 0 < counts[0] <= counts[1]
    contiguous = Problem.of(
        operation, [(64, 64, 56, 56), (64, 64, 3, 3), (64, 64, 56, 56)], [(1, 1)] * 3, torch.float32, False
    )
    first, *_, least = cudnn.plans_of(contiguous, True, device_property=described)
    assert first[1] > 40 * MIB
    assert least[1] < MIB


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda" or cudnn.unavailable_reason() is not None, reason=cudnn.unavailable_reason() or "on the CPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", [name for name in CONVOLUTIONS if name != "empty"])
def test_each_plan_gives_what_aten_gives_on_this_device(case, last, dtype, caplog):
    x, weight, grad, window = operands(case, dtype, last)
    form, tensor_float = memory_format(x.dim(), last), cudnn.tensor_float_allowed()
    wide = [t.double() for t in (x, weight, grad)]
    arguments = [grad.shape[1]], *window, [False, True, True]
    expected, exact = aten.convolution(x, weight, None, *window), aten.convolution(*wide[:2], None, *window)
    problem = cudnn_convolution.forward_problem(x, weight, last, *window)
    for plan in cudnn.plans_on(problem, tensor_float, x.device):
        given = monet.cudnn_convolution(x, weight, None, *window, last, plan)
        assert_within_rounding(given, expected, exact, form)
        assert torch.equal(given, monet.cudnn_convolution(x, weight, None, *window, last, plan))
    expected = aten.convolution_backward(grad, x, weight, *arguments)[1]
    exact = aten.convolution_backward(wide[2], *wide[:2], *arguments)[1]
    problem = cudnn_convolution.weight_problem(grad, x, weight, last, *window)
    for plan in cudnn.plans_on(problem, tensor_float, x.device):
        given = monet.cudnn_convolution_weight_backward(grad, x, weight, *arguments, last, plan)[1]
        assert_within_rounding(given, expected, exact, form)
    assert caplog.records == []
