"""The native kernels of ``torch.ops.monet``: C++ for the CPU and CUDA, in ``cuda_ops/``.

``load()`` builds them at first use, against torch's stable ABI. The operators are defined, by references in plain ATen,
in ``monetrun.ops.families``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from monetrun.core import native
from monetrun.ops import registry


def _compile(source: str, flags: Sequence[str], libraries: Sequence[str]) -> Path:
    # the cache's key leaves out torch's version: the stable ABI is the same in all versions
    folder = Path(torch.__file__).parent
    return native.build(
        source,
        ("-std=c++20", "-O3", *flags),
        includes=(folder / "include",),
        library_folders=(folder / "lib",),
        libraries=libraries,
    )


def compile_cuda(architectures: Sequence[str]) -> Path:
    """Compile the CUDA kernels for devices such as "sm_80", unless that was done before. None need be present.

    Returns:
        The library's path.

    Raises:
        NativeBuildFailed: there is no nvcc, or compiling failed.
    """
    targets = [f"-gencode=arch={a.replace('sm_', 'compute_')},code={a}" for a in architectures]
    return _compile("ops_cuda.cu", ("-DUSE_CUDA", *targets), ("torch_cpu", "torch_cuda"))


def _build(device_type: str) -> Path:
    if device_type == "cpu":
        # the cache's key has the processor, so that a library never runs on one without its instructions
        flags = ("-march=native", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast")
        return _compile("ops_cpu.cpp", flags, ("torch_cpu",))
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise native.NativeBuildFailed("torch sees no CUDA device")
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        return compile_cuda([f"sm_{major}{minor}" for major, minor in sorted(found)])
    raise native.NativeBuildFailed(f"there are no native kernels for {device_type}")


@functools.cache
def _built(device_type: str) -> tuple[Path | None, str]:
    try:
        return _build(device_type), ""
    except native.NativeBuildFailed as error:
        return None, str(error)


@functools.cache
def _loaded(device_type: str) -> str:
    path, reason = _built(device_type)
    if path is None:
        return reason
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"the kernels for {device_type} cannot be loaded: {error}"
    return ""


def load(device_type: str = "cpu") -> bool:
    """Define the operators and load their native kernels, which are built if that was not done before.

    Returns:
        Whether native kernels are in use; if not, the references run and ``unavailable_reason()`` says why.
    """
    registry.load()
    return not _loaded(device_type)


def unavailable_reason(device_type: str = "cpu") -> str | None:
    """Why there are no native kernels (no compiler, a failed build, ...), or None if there are; builds if need be."""
    return _built(device_type)[1] or (_loaded(device_type) if _loaded.cache_info().currsize else "") or None


def prebuild(device_type: str = "cpu") -> str | None:
    """Build the native kernels if that was not done before, without loading them.

    Returns:
        None, or why they cannot be built.
    """
    return _built(device_type)[1] or None
