"""Launches the kernels of ``cuda_ops/ops_cuda.cu``: compiled at the first use of a dtype, loaded once for each device.

Code is loaded and launched by torch, through the CUDA driver: by the launcher that Inductor uses for Triton's kernels.
No second CUDA runtime comes into the process, and a launch costs a few microseconds.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monetrun.core import cubin, native

SOURCE = "ops_cuda.cu"
# the types of elements: a name in the sources, and the launcher's letter of the numbers that are computed with
DTYPES = {
    torch.float32: ("float", "f"),
    torch.float64: ("double", "d"),
    torch.bfloat16: ("BFloat16", "f"),
    torch.float16: ("Half", "f"),
}
WARP = 32
_WARPS = 8
THREADS = WARP * _WARPS
_MOST_BLOCKS = 1 << 16  # fill any device several times over; each kernel's loop does the rest


def code(dtype: torch.dtype, architecture: str) -> Path:
    """The compiled kernels for elements of ``dtype`` on devices such as "sm_80", of which none need be present.

    Raises:
        NativeBuildFailed: there is no compiler, or compiling failed.
    """
    return cubin.build(SOURCE, architecture, (f"-DMONET_T={DTYPES[dtype][0]}",))


@functools.cache
def signatures() -> dict[str, str]:
    """The parameters of each kernel, as its source declares them: O for a pointer, l for an integer, A for a number."""
    found = {}
    for path in native.included(native.source_folder() / SOURCE):
        text = path.read_text(encoding="utf-8")
        for name, parameters in re.findall(r'extern "C" __global__ void (\w+)\(([^)]*)\)', text):
            found[name] = "".join(_letter(parameter) for parameter in parameters.split(","))
    return found


def _letter(parameter: str) -> str:
    return "O" if "*" in parameter else "l" if parameter.split()[0] == "int64_t" else "A"


@functools.cache
def loaded(name: str, dtype: torch.dtype, device: int) -> tuple[int, str]:
    """A kernel's handle and its parameters, in the launcher's letters.

    Raises:
        NativeBuildFailed: it cannot be compiled.
        RuntimeError: there is no kernel for the dtype, or the driver cannot load it.
    """
    if dtype not in DTYPES:
        raise RuntimeError(f"expected float32, float64, bfloat16 or float16, got {dtype}")
    major, minor = torch.cuda.get_device_capability(device)
    path = code(dtype, f"sm_{major}{minor}")
    with torch.cuda.device(device):
        # (function, registers, spills), in torch after 2.11 with the module in front
        *_, handle, _, _ = torch._C._StaticCudaLauncher._load_kernel(str(path), name, 0, device)
    return handle, signatures()[name].replace("A", DTYPES[dtype][1])


def check_loading() -> None:
    """Load a kernel on a device that this process uses already: elsewhere a new context would take memory.

    Raises:
        NativeBuildFailed: it cannot be compiled, or this torch or the driver cannot load it.
    """
    if not hasattr(torch._C, "_StaticCudaLauncher"):
        raise native.NativeBuildFailed(f"torch {torch.__version__} has no launcher for CUDA kernels")
    used = (i for i in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(i))  # type: ignore[attr-defined, unused-ignore]
    try:
        for device in itertools.islice(used, 1):
            loaded("range_mask", torch.float32, device)
    except RuntimeError as error:
        raise native.NativeBuildFailed(str(error)) from error


@dataclass(frozen=True, slots=True)
class Noted:
    """A launch that was asked for with tensors that have no memory; see ``launch``."""

    name: str
    dtype: torch.dtype
    blocks: int
    arguments: tuple[Any, ...]


_noted: ContextVar[list[Noted]] = ContextVar("noted launches")


@contextmanager
def noting() -> Iterator[list[Noted]]:
    """A context in which launches with meta tensors, which have no memory, are noted in the list that it gives."""
    noted: list[Noted] = []
    token = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(token)


def driver() -> int:
    """The address of ``cuLaunchKernel``.

    Raises:
        OSError: there is no driver.
    """
    address = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value
    assert address is not None
    return address


def launch(name: str, like: Tensor, threads: int, *arguments: Any, dtype: torch.dtype | None = None) -> None:
    """Launch a kernel on the current stream of ``like``'s device.

    Args:
        name: the kernel.
        like: a tensor on the device, of the dtype of the kernel's elements.
        dtype: that of the kernel's elements, where it is not ``like``'s.
        threads: how many indices there are; without any, nothing is launched.
        arguments: for a pointer a tensor of the device, or None; numbers, or what ``operands.aligned`` gives.

    Raises:
        RuntimeError: there is no kernel for the dtype, the driver refuses, or a tensor is of another device.
    """
    if threads:
        blocks = min((threads + THREADS - 1) // THREADS, _MOST_BLOCKS)
        if like.is_meta:
            _noted.get().append(Noted(name, dtype or like.dtype, blocks, arguments))
        else:
            _start(name, dtype or like.dtype, like.get_device(), blocks, arguments)


def _address(tensor: Tensor) -> int:
    if not tensor.is_cuda:
        raise RuntimeError(f"expected tensors of a CUDA device, got one of {tensor.device}")
    return tensor.data_ptr()


def _start(name: str, dtype: torch.dtype, device: int, blocks: int, arguments: tuple[Any, ...]) -> None:
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _start(name, dtype, device, blocks, arguments)
    handle, letters = loaded(name, dtype, device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    given = tuple(_address(a) if isinstance(a, Tensor) else a for a in arguments)  # torch would ask the driver
    torch._C._StaticCudaLauncher._launch_kernel(handle, blocks, 1, 1, _WARPS, 0, letters, given, stream)
    return None
