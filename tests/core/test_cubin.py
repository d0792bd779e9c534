"""CUDA kernels are compiled to device code without a GPU, by NVRTC or by nvcc, once for each source."""

from __future__ import annotations

import os
import shutil
import struct
import sys

import pytest

from monetrun.core import cubin, native
from monetrun.core.native import NativeBuildFailed

KERNEL = 'extern "C" __global__ void add(long* to) { *to += NUMBER; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A kernel, and a cache of its own."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "add.cu").write_text('#include "number.cuh"\n' + KERNEL)
    (tmp_path / "sources" / "number.cuh").write_text("#define NUMBER 1\n")
    monkeypatch.setattr(native, "source_folder", lambda: tmp_path / "sources")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cubin.compiler.cache_clear()
    yield tmp_path / "sources"
    cubin.compiler.cache_clear()


def without_nvrtc(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    cubin.compiler.cache_clear()


@pytest.fixture
def nvrtc(source):
    try:
        if cubin.compiler().nvrtc is None:
            pytest.skip("this torch comes without NVRTC")
    except NativeBuildFailed as error:
        pytest.skip(str(error))


def is_for(path, number):
    """Whether the header of a cubin names the device: in its flags' second byte, before CUDA 13 in the first."""
    code = path.read_bytes()
    flags = struct.unpack_from("<I", code, 48)[0]
    return code[:4] == b"\x7fELF" and number in (flags & 0xFF, flags >> 8 & 0xFF)


@pytest.mark.usefixtures("nvrtc")
def test_a_kernel_is_compiled_once_for_an_architecture_and_again_when_what_it_includes_changes(source, monkeypatch):
    first = cubin.build("add.cu", "sm_90")
    assert (first.suffix, b"add" in first.read_bytes(), is_for(first, 90)) == (".cubin", True, True)
    monkeypatch.setattr(cubin, "_compile", lambda *_: pytest.fail("it is compiled again"))
    assert cubin.build("add.cu", "sm_90") == first
    monkeypatch.undo()
    monkeypatch.setattr(native, "source_folder", lambda: source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(source.parent / "cache"))
    other = cubin.build("add.cu", "sm_80")
    assert (other != first, is_for(other, 80)) == (True, True)
    assert cubin.build("add.cu", "sm_90", ("-DMORE=1",)) not in (first, other)
    (source / "number.cuh").write_text("#define NUMBER 2\n")
    assert cubin.build("add.cu", "sm_90") != first
    assert not list((source.parent / "cache").rglob(".build-*"))


@pytest.mark.usefixtures("nvrtc")
def test_for_a_newer_device_than_nvrtc_knows_it_gives_code_that_the_driver_compiles():
    path = cubin.build("add.cu", "sm_990")
    assert path.suffix == ".ptx"
    assert ".visible .entry add(" in path.read_text()


def test_the_code_for_a_device_is_that_of_the_nearest_older_one_of_its_generation():
    known = [75, 80, 86, 90, 100, 120]
    targets = {"sm_86": "sm_86", "sm_89": "sm_86", "sm_90": "sm_90", "sm_121": "sm_120", "sm_130": "compute_120"}
    assert {given: cubin._target(given, known) for given in targets} == targets
    with pytest.raises(NativeBuildFailed, match="compiles for sm_75 and newer, not for sm_70"):
        cubin._target("sm_70", known)


@pytest.mark.usefixtures("nvrtc")
def test_an_error_in_a_kernel_is_reported_in_nvrtcs_words(source):
    (source / "number.cuh").write_text("")
    with pytest.raises(NativeBuildFailed, match='identifier "NUMBER" is undefined'):
        cubin.build("add.cu", "sm_90")
    assert not [path for path in (source.parent / "cache").rglob("*") if path.suffix in (".cubin", ".ptx")]


def test_without_nvrtc_nvcc_compiles_the_same_source(source, monkeypatch):
    compiler = source.parent / "toolkit" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" >"$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(source.parent / "toolkit"))
    without_nvrtc(monkeypatch)
    assert cubin.compiler().name == str(compiler)
    called = cubin.build("add.cu", "sm_80", ("-DMORE=1",)).read_text()
    assert called.startswith(f"-cubin -arch=sm_80 -std=c++17 -DMORE=1 {source / 'add.cu'} -o ")


@pytest.mark.slow
def test_nvcc_compiles_every_kernel(tmp_path, monkeypatch):
    if shutil.which("nvcc") is None:
        pytest.skip("there is no nvcc")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    without_nvrtc(monkeypatch)
    assert is_for(cubin.build("ops_cuda.cu", "sm_90", ("-DMONET_T=Half",)), 90)
    cubin.compiler.cache_clear()


def test_without_both_the_reason_names_them_and_what_to_install(source, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", os.fspath(source))
    without_nvrtc(monkeypatch)
    with pytest.raises(NativeBuildFailed) as caught:
        cubin.compiler()
    assert "there is no NVRTC (" in str(caught.value)
    assert f"no nvcc in CUDA_HOME, {source}" in str(caught.value)
    assert "pip install cuda-bindings" in str(caught.value)
