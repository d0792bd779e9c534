"""Costs of operators that are hard to measure."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from monetrun.capture import cost, cost_store, roofline
from monetrun.capture.meter import NoMeter, meter_for
from monetrun.capture.timer import HostTimer
from monetrun.core import native
from monetrun.machine.store import Store
from monetrun.ops import cudnn, kernels
from support.captured import captured
from support.kernel_cases import DEVICE

NORMS = {
    "batch": nn.BatchNorm2d(8),
    "batch, plain": nn.BatchNorm2d(8, affine=False),
    "batch, without running statistics": nn.BatchNorm2d(8, track_running_stats=False),
    "batch, evaluated": nn.BatchNorm2d(8).eval(),
    "layer": nn.LayerNorm(6),
    "group": nn.GroupNorm(2, 8),
}


class Narrow(nn.Module):
    """A norm of 16 bits whose parameters have 32, as under autocast."""

    def __init__(self, norm):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.norm = norm

    def forward(self, x):
        return torch.tanh(self.norm((x * self.scale).bfloat16()))


def measured(joint):
    return cost.measure(joint, {}, meter_for(torch.device(DEVICE)), torch.device(DEVICE))


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_a_norm_with_wider_parameters_is_captured_with_the_dtypes_that_it_gives(norm):
    joint = captured(Narrow(NORMS[norm]), torch.randn(4, 8, 5, 6).to(DEVICE))
    assert all(c.measured for c in measured(joint).values())

    class Real(fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                assert (n.name, result.dtype) == (n.name, n.meta["val"].dtype)
            return result

    forms = [n.meta["val"] for n in joint.module.graph.find_nodes(op="placeholder")]
    inputs = [torch.ones(v.shape, dtype=v.dtype, device=DEVICE) for v in forms]
    with torch.no_grad():
        Real(joint.module).run(*inputs)


def refuse_tanh(monkeypatch, error):
    original = cost._memory

    def refuse(call, *arguments):
        if call.target is torch.ops.aten.tanh.default:
            raise error
        return original(call, *arguments)

    monkeypatch.setattr(cost, "_memory", refuse)


@pytest.mark.parametrize("error", [RuntimeError("not alone"), AssertionError("lengths"), ZeroDivisionError()])
def test_a_call_that_fails_alone_is_estimated_with_its_results_as_workspace(monkeypatch, error):
    joint = captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8).to(DEVICE))
    refuse_tanh(monkeypatch, error)
    known = measured(joint)
    (tanh,) = (s for s, (call, _) in joint.timed.items() if call.target is torch.ops.aten.tanh.default)
    assert {s for s, c in known.items() if not c.measured} == {s for s, c in known.items() if c.failed} == {tanh}
    assert known[tanh].workspace_bytes == 4 * 8 * 4
    assert known[tanh].seconds > 0


@pytest.fixture
def tanh():
    return captured(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8).to(DEVICE))


class BrokenMeter(NoMeter):
    def synchronize(self):
        raise torch.AcceleratorError(ILLEGAL)


ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_an_error_of_the_device_itself_ends_the_run_with_its_message(monkeypatch, tanh):
    refuse_tanh(monkeypatch, torch.AcceleratorError(ILLEGAL))
    timer = HostTimer(NoMeter())
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        cost.measure(tanh, {}, BrokenMeter(), torch.device(DEVICE), timer)


def test_a_call_without_memory_is_estimated_by_the_devices_own_roofline(monkeypatch, tanh):
    refuse_tanh(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."))
    slow = replace(roofline.DEVICES["cpu"], launch_seconds=7.0)
    monkeypatch.setattr(cost.data_sheet, "present", lambda device: slow)
    known = cost.measure(tanh, {}, BrokenMeter(), torch.device(DEVICE), HostTimer(NoMeter()))
    assert [c.seconds for c in known.values() if not c.measured] == [7.0]


class Properties:
    multi_processor_count = 132


SETTINGS = [
    (torch, "get_float32_matmul_precision", lambda: "high"),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cudnn, "deterministic", True),
    (torch.backends.cudnn, "version", lambda: 90000),
    (torch, "are_deterministic_algorithms_enabled", lambda: True),
    (torch.cuda, "get_device_name", lambda device: "another"),
    (Properties, "multi_processor_count", 66),
]


VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_LAUNCH_BLOCKING": "1",  # the host then waits for each kernel, between the events around it, too
}


def test_costs_on_cuda_are_kept_apart_for_all_that_decides_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    device = torch.device("cuda", 0)
    keys = {cost_store._key(device)}
    for owner, name, value in SETTINGS:
        with monkeypatch.context() as changed:
            changed.setattr(owner, name, value)
            keys.add(cost_store._key(device))
    for name, value in VARIABLES.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            keys.add(cost_store._key(device))
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        keys.add(cost_store._key(device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert len(keys) == 1 + len(SETTINGS) + len(VARIABLES) + 1


def test_costs_on_a_cpu_are_kept_apart_for_what_decides_its_kernels(monkeypatch):
    device = torch.device("cpu")
    before = cost_store._key(device)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert cost_store._key(device) == before
    keys = {before}
    for change in (
        lambda: monkeypatch.setattr(torch.backends.mkldnn, "enabled", False),
        lambda: monkeypatch.setattr(native, "processor", lambda: "another"),
        lambda: monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda: monkeypatch.setattr(kernels, "unavailable_reason", lambda: "there is no compiler"),
    ):
        change()
        keys.add(cost_store._key(device))
    assert len(keys) == 5


def test_only_what_was_measured_now_is_added_to_the_store(tmp_path, tanh):
    store, device, meter = Store(tmp_path), torch.device(DEVICE), meter_for(torch.device(DEVICE))
    known = cost_store.measure([tanh], {"measured elsewhere": cost.OperatorCost(1.0, 0)}, meter, device, store)
    assert known.keys() == {"measured elsewhere", *tanh.timed}
    assert cost_store.load(store, device).keys() == set(tanh.timed)


def test_what_was_estimated_for_lack_of_memory_is_measured_once_there_is_some(tmp_path, tanh, monkeypatch):
    store, device, meter = Store(tmp_path), torch.device(DEVICE), meter_for(torch.device(DEVICE))
    with monkeypatch.context() as short:
        refuse_tanh(short, torch.OutOfMemoryError("out of memory"))
        estimated = cost_store.measure([tanh], {}, meter, device, store)
    assert [c.failed for c in estimated.values() if not c.measured] == [False]
    found = cost_store.measure([tanh], cost_store.load(store, device), meter, device, store)
    assert all(c.measured for c in found.values())
    assert cost_store.load(store, device).keys() == set(tanh.timed)


def test_an_implementation_that_fails_when_it_is_tried_is_not_used(tanh):
    known = measured(tanh)
    op = next(op for op, row in zip(tanh.graph.operators, tanh.signatures, strict=True) if len(row) > 1)
    default, other, *_ = tanh.signatures[op.id]
    tried = {**known, other: replace(known[other], failed=True)}
    assert [i.usable for i in cost.as_tried(tanh, tried).operators[op.id].implementations][:2] == [True, False]
    tried[default] = replace(known[default], failed=True)  # made-up operands are the reason
    assert cost.as_tried(tanh, tried).operators[op.id].implementations[1].usable


def test_an_autocast_around_the_measurement_changes_nothing(tanh):
    with torch.autocast(DEVICE, torch.bfloat16):
        known = measured(tanh)
    (signature,) = (s for s, (call, _) in tanh.timed.items() if call.target is torch.ops.aten.addmm.default)
    assert known[signature].workspace_bytes == measured(tanh)[signature].workspace_bytes


def test_another_process_is_told_which_plans_cudnn_has(tmp_path, tanh, monkeypatch):
    monkeypatch.setattr(cost_store, "_has_plans", lambda device: True)
    monkeypatch.setattr(cost_store, "_plans_key", lambda device: "device")
    found = {"a convolution": cudnn.PlanNames(("eng1", "eng2_k2=0")), "another": cudnn.PlanNames(())}
    store, device = Store(tmp_path), torch.device(DEVICE)
    monkeypatch.setattr(cudnn, "_named", {device: found})
    cost_store.measure([tanh], {}, meter_for(device), device, store)
    monkeypatch.setattr(cudnn, "_named", {})
    cost_store.load(Store(tmp_path), device)
    assert cudnn.named(device) == found


@pytest.mark.parametrize(
    ("exact", "seconds", "measured", "least"),
    [
        (False, 0.99, True, 1.0),  # noise: nothing is gained by results that differ
        (False, 0.95, True, 0.0),
        (False, 1.2, True, 1.0),
        (True, 0.99, True, 0.0),
        (False, 0.99, False, 0.0),  # a model has no noise
    ],
)
def test_what_differs_by_rounding_counts_as_faster_only_where_it_clearly_is(exact, seconds, measured, least):
    op = SimpleNamespace(id=0, implementations=[SimpleNamespace(exact=True), SimpleNamespace(exact=exact)])
    costs = [cost.OperatorCost(1.0, 0), cost.OperatorCost(seconds, 0, measured=measured)]
    joint = SimpleNamespace(no_faster_than_default=frozenset())
    assert cost._least_seconds(joint, op, 1, costs) == least


def test_an_assertion_on_values_is_never_tried_on_others(monkeypatch):
    """On CUDA one that fails ends all that the process does there; a one-hot encoding asserts what it is given."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x):
            torch._assert_async((x > 0).all())
            return (self.linear(x) * nn.functional.one_hot(x[:, 0].long(), 4)).square()

    tried, memory = [], cost._memory
    monkeypatch.setattr(cost, "_memory", lambda call, *args: tried.append(str(call.target)) or memory(call, *args))
    joint = captured(Routed(), torch.ones(3, 6))
    assert any("assert_async" in str(op.target) for op in joint.graph.operators)
    device = torch.device(DEVICE)
    found = cost.measure(joint, {}, meter_for(device), device)
    assert found.keys() == joint.timed.keys()
    assert tried
    assert not any("assert_async" in target for target in tried)


def test_costs_measured_on_a_busy_machine_say_so_in_later_launches_too(tmp_path):
    joint, cpu = captured(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)), torch.device("cpu")
    store = Store(tmp_path)
    busy = SimpleNamespace(share=lambda: 0.6)
    found = cost_store.measure([joint], {}, meter_for(cpu), cpu, store, busy)
    assert cost.others_share([joint], found) == 0.6
    kept = cost_store.load(store, cpu)
    later = cost_store.measure([joint], kept, meter_for(cpu), cpu, store, SimpleNamespace(share=lambda: 0.9))
    assert cost.others_share([joint], later) == 0.6  # nothing was measured


def test_a_share_of_others_that_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match=r"others that took 1\.5"):
        cost.OperatorCost(1.0, 0, others_share=1.5).check()
