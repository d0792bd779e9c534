"""CUDA's kernels: compiled for every dtype, and launched as their sources declare them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

from monetrun.core import cubin, native
from monetrun.ops import kernels
from monetrun.ops.cuda import launch
from support.kernel_cases import DTYPES
from support.paths import ROOT

FEW = {("sm_80", torch.bfloat16), ("sm_90", torch.float32)}


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(a, d, marks=[] if (a, d) in FEW else pytest.mark.nightly, id=f"{a}-{d}")
        for a in ("sm_80", "sm_90")
        for d in DTYPES
    ],
)
def test_every_kernel_compiles_without_a_gpu(architecture, dtype):
    try:
        cubin.compiler()
    except native.NativeBuildFailed as error:
        pytest.skip(str(error))
    code = launch.code(dtype, architecture).read_bytes()
    assert len(launch.signatures()) == 17
    for name in launch.signatures():
        assert f".text.{name}".encode() in code


def test_a_kernels_parameters_are_read_from_its_source():
    signatures = launch.signatures()
    assert signatures["range_mask"] == "OOllAA"  # const T*, uint8_t*, two of int64_t, two of A
    assert signatures["affine_invertible"] == "OlOlAAlO"
    declared = sum(p.read_text().count("__global__") for p in native.source_folder().glob("*_cuda.cuh"))
    assert len(signatures) == declared


class Launcher:
    """What torch would be asked to load and launch, on devices 0 and 1 of capability 9.0."""

    def __init__(self):
        self.loaded, self.launched, self.current, self.used = [], [], 0, {1}

    def _load_kernel(self, path, name, shared, device):
        self.loaded.append((path, name, device, self.current))
        return 11, 70 + device, 32, 0

    def _launch_kernel(self, *arguments):
        self.launched.append((self.current, *arguments))

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def launcher(monkeypatch):
    made = Launcher()
    monkeypatch.setattr(torch._C, "_StaticCudaLauncher", made, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 500 + device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda device: device in made.used, raising=False)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch, "code", lambda dtype, architecture: f"{dtype} {architecture}")
    launch.loaded.cache_clear()
    yield made
    launch.loaded.cache_clear()


def test_a_kernel_is_loaded_once_for_a_device_and_launched_on_its_current_stream(launcher):
    for device in (0, 1, 1):
        launch._start("range_mask", torch.bfloat16, device, 3, (1, 2, 3, 4, 5.0, 6.0))
    launch._start("range_mask", torch.float64, 0, 1, ())
    bf16 = "torch.bfloat16 sm_90"
    assert launcher.loaded == [
        (bf16, "range_mask", 0, 0),
        (bf16, "range_mask", 1, 1),
        ("torch.float64 sm_90", "range_mask", 0, 0),
    ]
    one, two, three, four = launcher.launched
    # the current device, the kernel, blocks, warps of a block, shared memory, types, arguments, stream
    assert one == (0, 70, 3, 1, 1, 8, 0, "OOllff", (1, 2, 3, 4, 5.0, 6.0), 500)
    assert two == three == (1, 71, 3, 1, 1, 8, 0, "OOllff", (1, 2, 3, 4, 5.0, 6.0), 501)
    assert four[7:] == ("OOlldd", (), 500)


def test_a_launch_covers_its_indices_with_at_most_65536_blocks_and_nothing_is_launched_for_none(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "_start", lambda name, dtype, device, blocks, arguments: started.append(blocks))
    x = torch.empty(0)
    for threads in (0, 1, 256, 257, 1 << 40):
        launch.launch("nonzero_mask", x, threads)
    assert started == [1, 1, 2, 65536]


def test_an_element_type_without_kernels_is_refused(launcher):
    with pytest.raises(RuntimeError, match=r"expected float32, .* got torch.int32"):
        launch._start("nonzero_mask", torch.int32, 0, 1, ())


def test_loading_is_tried_on_a_device_in_use_and_makes_no_other_context(launcher):
    launch.check_loading()
    assert launcher.loaded == [("torch.float32 sm_90", "range_mask", 1, 1)]
    launcher.used.clear()
    launch.loaded.cache_clear()
    launch.check_loading()
    assert len(launcher.loaded) == 1


def test_a_driver_that_refuses_the_code_is_a_reason(launcher, monkeypatch):
    def refuse(*_):
        raise RuntimeError("CUDA driver error: device kernel image is invalid")

    monkeypatch.setattr(launcher, "_load_kernel", refuse)
    with pytest.raises(native.NativeBuildFailed, match="image is invalid"):
        launch.check_loading()
    monkeypatch.delattr(torch._C, "_StaticCudaLauncher")
    with pytest.raises(native.NativeBuildFailed, match="has no launcher"):
        launch.check_loading()


def test_without_a_device_the_references_run_and_the_reason_is_given():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert not kernels.load("cuda")
    assert kernels.unavailable_reason("cuda") == kernels.prebuild("cuda") == "torch sees no CUDA device"


ON_THE_STANDIN = """
import json, torch
from monetrun.ops import kernels
from support.standin_gpu import counters
loaded = kernels.load("cuda")
launches = []
def count(call):
    before = counters().kernel_launches
    result = call()
    launches.append(counters().kernel_launches - before)
    return result
x = torch.zeros(4, 6, 8, 8, device="cuda")
c, rstd = torch.ones(6, device="cuda"), torch.ones(4, 2, device="cuda")
monet = torch.ops.monet
mask = count(lambda: monet.range_mask(x, 0.0, 6.0))
same = count(lambda: monet.mask_backward_(x, mask, 0.0)) is x
normal = count(lambda: monet.batch_norm_act(x, c, None, c, c, x, 0.0, 6.0))
gradients = count(lambda: monet.channel_norm_output_backward(x, x, rstd, c, c, [True] * 3))
count(lambda: monet.nonzero_mask(x[:0]))
try:
    refused = monet.mask_backward(x, mask.cpu(), 0.0)
except RuntimeError as error:
    refused = str(error)
print(json.dumps([loaded, launches, list(mask.shape), same, list(normal.shape), len(gradients), refused]))
"""


def test_on_a_stand_in_gpu_each_operator_launches_its_own_kernels():
    """No kernel computes anything there; on the CPU the other tests run the kernels themselves."""
    standin = pytest.importorskip("support.standin_gpu", reason="there is no stand-in GPU in the tests")
    if reason := standin.unavailable_reason():
        pytest.skip(reason)
    environment = {**standin.environment(), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_STANDIN],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *given, refused = json.loads(done.stdout.splitlines()[-1])
    assert given == [True, [1, 1, 1, 4, 0], [192], True, [4, 6, 8, 8], 3]
    assert "expected tensors of a CUDA device, got one of cpu" in refused
