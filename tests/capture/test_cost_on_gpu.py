"""Costs of a network captured on a GPU: on the stand-in, whose kernels compute nothing but keep their stream busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support import standin_gpu
from support.on_stand_in import needs_stand_in, printed_by
from support.paths import ROOT, python_path

KERNEL_US = 200.0


def run(**machine):
    reason = standin_gpu.unavailable_reason()
    if reason:
        pytest.skip(reason)
    environment = {
        **os.environ,
        **standin_gpu.environment(**machine),
        "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
        "CUDA_HOME": "/nonexistent",  # the references run: they are torch's own kernels
    }
    script = ROOT / "tests" / "support" / "scripts" / "cost_on_gpu.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def measured():
    return run(kernel_us=KERNEL_US)


def test_a_batch_norm_is_cudnns_and_dropout_keeps_bytes(measured):
    targets = measured["targets"]
    assert "monet.cudnn_batch_norm.default" in targets
    assert "aten.cudnn_batch_norm_backward.default" in targets
    assert "aten.native_dropout.default" in targets
    assert not [t for t in targets if "native_batch_norm" in t]


def test_the_seconds_are_the_streams(measured):
    """One launch keeps the stream busy for so long; on a busy machine the host may add to it."""
    for target in ("aten.relu.default", "aten.native_dropout.default", "aten.embedding.default"):
        assert 0.99 <= measured["seconds"][target] / (KERNEL_US * 1e-6) <= 4
    assert all(measured["measured"].values())


def test_what_only_a_gpu_can_show_is_not_called_exact_beforehand(measured):
    exact = measured["exact"]
    assert not exact["aten.convolution_backward.default as conv:apart"]
    assert not exact["aten.native_dropout_backward.default as intermediate:mask"]


def test_the_measurement_gives_its_memory_back(measured):
    assert measured["still_held"] == 0
    assert measured["reserved"] <= 64 << 20


def test_a_calls_requests_are_known_in_their_order(measured):
    """Dropout: its mask, a byte per element, comes before its output, which is the first result."""
    elements = 8 * 16 * 32 * 32
    assert measured["requests"]["aten.native_dropout.default"] == [[elements, 4 * elements], [2, 1]]
    assert measured["requests"]["aten.relu.default"] == [[4 * elements], [1]]


def test_the_roofline_is_that_of_the_gpu(measured):
    assert measured["roofline"] == pytest.approx(67e12, rel=0.01)  # an H100's, whose architecture the stand-in has
    assert measured["estimate"] == 5e-6


ANOTHER_LIBRARYS = """
import json, torch
from torch import nn
from monetrun.capture import cost
from monetrun.capture.meter import meter_for
from monetrun.runtime.backend import Backend
from support.captured import Chooser

ran = []

@torch.library.custom_op("shop::weigh", mutates_args=())
def weigh(lengths: torch.Tensor) -> torch.Tensor:
    ran.append("weigh")
    return torch.ones(len(lengths), device=lengths.device)

@torch.library.custom_op("shop::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    ran.append("scale")
    return x.clone()

weigh.register_fake(lambda lengths: torch.ones(len(lengths), device=lengths.device))
scale.register_fake(lambda x: torch.empty_like(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("lengths", torch.ones(4, dtype=torch.int32))

    def forward(self, x):
        return self.linear(scale(x)) * weigh(self.lengths)

device, chooser = torch.device("cuda", 0), Chooser()
x = torch.randn(3, 8, device=device)
torch.compile(Net().to(device), backend=Backend(chooser, "net"))(x)
ran.clear()
known = cost.measure(chooser.joint, {}, meter_for(device), device)
estimated = [str(call.target) for s, (call, _) in chooser.joint.timed.items() if not known[s].measured]
print(json.dumps([sorted(set(ran)), estimated]))
"""


@needs_stand_in
def test_another_librarys_integers_are_not_made_up():
    """Zero lengths: its kernel could write anywhere, or seem to be free."""
    path = f"import sys; sys.path.append({str(ROOT / 'tests')!r})"
    assert printed_by(path + ANOTHER_LIBRARYS) == [["scale"], ["shop.weigh.default"]]


def test_an_error_of_the_device_ends_the_measurement():
    found = run(fault_at_launch=400)
    assert found["sticky"]
    assert "illegal memory access" in found["error"]
