"""What ``monetrun doctor`` says of GPUs and of the kernels for them."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch

from monetrun.commands import doctor_checks
from monetrun.core import cubin, native
from monetrun.runtime.settings import OLDEST_TORCH, why_no_hook
from support.paths import ROOT


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise native.NativeBuildFailed("there is no NVRTC, and no nvcc", "pip install it")

    monkeypatch.setattr(cubin, "compiler", refuse)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_for_cuda_doctor_says_what_that_costs_on_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check = doctor_checks._kernels()
    assert (check.state, check.mend) == ("warning", "pip install it")
    assert check.found == f"there is no NVRTC, and no nvcc: {doctor_checks.WITHOUT_KERNELS}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check = doctor_checks._kernels()
    assert (check.state, check.found) == ("ok", "not used: torch sees no CUDA device")


def test_doctor_names_the_compiler_for_cuda_and_whether_it_has_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cubin, "compiler", lambda: cubin.CudaCompiler("NVRTC 13.2"))
    assert doctor_checks._kernels().found == "for CUDA by NVRTC 13.2, built by the first run on a CUDA device"
    native.cache_folder().mkdir(parents=True)
    (native.cache_folder() / "ops_cuda-0.cubin").touch()
    assert doctor_checks._kernels().found == f"for CUDA by NVRTC 13.2, built in {native.cache_folder()}"


def test_doctor_says_what_calls_the_operators_of_a_planned_step_on_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor_checks._programs().found == "not used: torch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert doctor_checks._programs().found.endswith("built by the first run on a CUDA device")
    native.cache_folder().mkdir(parents=True)
    (native.cache_folder() / "program-0.so").touch()
    assert doctor_checks._programs().found.endswith(f"built in {native.cache_folder()}")
    monkeypatch.setenv("CXX", "/no/such/compiler")
    check = doctor_checks._programs()
    assert (check.state, check.mend) == ("warning", "unset CXX or name a C++ compiler")
    assert check.found.endswith(doctor_checks.WITHOUT_PROGRAMS)


@pytest.mark.parametrize(
    ("vendor", "state", "said"), [("0x8086", "ok", "no NVIDIA GPU"), ("0x10de", "warning", "cannot be found")]
)
def test_without_an_nvidia_board_a_missing_driver_is_no_warning(vendor, state, said, monkeypatch, tmp_path):
    import pynvml

    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    (tmp_path / "0000:00:02.0").mkdir()
    (tmp_path / "0000:00:02.0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(doctor_checks, "_PCI", tmp_path)
    monkeypatch.setattr(doctor_checks, "_NVIDIA_DRIVERS", ())
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    check = doctor_checks._nvml()
    assert check.state == state
    assert said in check.found


@pytest.mark.parametrize(
    ("version", "old"),
    [("2.10.1+cu128", True), ("1.13", True), ("2.11.0", False), ("3.0.0a0+git", False), ("x", False)],
)
def test_a_torch_older_than_is_supported_is_missing_and_plans_nothing(version, old, monkeypatch):
    found = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "torch" else found(name))
    said = (f"torch {version} is older than monetrun supports", "install torch >= 2.11")
    check = doctor_checks._torch()
    assert (check.state, check.mend) == (("missing", said[1]) if old else ("ok", ""))
    if old:
        assert check.found == said[0]
    assert why_no_hook() == (said if old else ("", ""))


def test_the_oldest_torch_is_the_one_that_is_required():
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f'"torch>={oldest}"' in (ROOT / "setup.py").read_text()
    assert f"torch {oldest} or newer" in (ROOT / "README.md").read_text()
