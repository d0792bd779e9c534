"""Runs the CUDA kernels on the CPU: the same source, compiled by the C++ compiler, launched on tensors of the CPU.

What runs is all of ``monetrun.ops.cuda`` but the launcher, and the kernels themselves; not the compilers' code for a
device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from monetrun.core import native
from monetrun.ops.cuda import launch

_TYPES = {"O": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "d": ctypes.c_double}
_NAMES = {"O": "void*", "l": "int64_t", "f": "float", "d": "double"}


def _runner(name: str, letters: str, exchanges: bool) -> str:
    """C++ that runs a kernel with the arguments given, as the driver would: by their places."""
    parameters = ", ".join(f"{_NAMES[letter]} p{i}" for i, letter in enumerate(letters))
    passed = ", ".join(f"Any{{p{i}}}" if letter == "O" else f"p{i}" for i, letter in enumerate(letters))
    return (
        f'extern "C" void run_{name}(unsigned blocks, unsigned threads, {parameters}) {{\n'
        f"  auto kernel = [=] {{ monet::{name}({passed}); }};\n"
        "  auto call = [](void* all) { (*static_cast<decltype(kernel)*>(all))(); };\n"
        f"  on_cpu::run(blocks, threads, {'true' if exchanges else 'false'}, call, &kernel);\n}}\n"
    )


def _exchanging() -> set[str]:
    """The kernels in which the lanes of a warp exchange values."""
    text = "".join(path.read_text() for path in native.included(native.source_folder() / launch.SOURCE))
    bodies = re.findall(r'^extern "C" __global__ void (\w+)\((.*?)^}', text, re.MULTILINE | re.DOTALL)
    return {name for name, body in bodies if re.search(r"sum_of_warp|_sync\(", body)}


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    element, number = launch.DTYPES[dtype]
    kernels = launch.signatures()
    source = native.source_folder() / launch.SOURCE
    text = '#include "cuda_on_cpu.hpp"\n' + f'#include "{source}"\n'
    text += (
        "struct Any {\n  void* at;\n  template <class E>\n  operator E*() const { return static_cast<E*>(at); }\n};\n"
    )
    exchanging = _exchanging()
    for name, letters in kernels.items():
        text += _runner(name, letters.replace("A", number), name in exchanging)
    here = Path(__file__).parent
    # products and sums are fused, as on a device
    flags = ["-std=c++20", "-O2", "-march=native", "-ffp-contract=fast", "-w", "-fPIC", "-shared"]
    flags += [f"-DMONET_T={element}", f"-I{here}", f"-I{Path(torch.__file__).parent / 'include'}"]
    cxx = native.compiler()
    parts = [(here / "cuda_on_cpu.hpp").read_text(), text, native.identity(cxx[0]), *flags]

    def make(out: Path) -> None:
        given = out.with_suffix(".cpp")
        given.write_text(text)
        try:
            native.compile_by([*cxx, *flags, str(given), "-o", str(out)])
        finally:
            given.unlink()

    return ctypes.CDLL(str(native.cached(source, ".so", parts, make)))


def _start(name: str, dtype: torch.dtype, device: int, blocks: int, arguments: tuple[Any, ...]) -> None:
    letters = launch.signatures()[name].replace("A", launch.DTYPES[dtype][1])
    run = getattr(_library(dtype), f"run_{name}")
    run.argtypes = [ctypes.c_uint, ctypes.c_uint, *(_TYPES[letter] for letter in letters)]
    run.restype = None
    run(blocks, launch.THREADS, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Within this context the functions of ``monetrun.ops.cuda`` take tensors of the CPU."""
    before = launch._start
    launch._start = _start
    try:
        yield
    finally:
        launch._start = before
