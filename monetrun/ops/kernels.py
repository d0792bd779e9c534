"""The native kernels of ``torch.ops.monet``: C++ for the CPU and CUDA, in ``cuda_ops/``.

``load()`` builds them at first use: the CPU's into a library, against torch's stable ABI, CUDA's into device code
(``monetrun.ops.cuda`` launches it). The operators are defined, by references in plain ATen, in
``monetrun.ops.families``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from monetrun.core import native
from monetrun.ops import cuda, definition, registry
from monetrun.ops.cuda import launch
from monetrun.ops.cuda.recorded import Recorded
from monetrun.ops.cuda.recorded import recorded as record


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


def compile_cuda(architectures: Sequence[str]) -> list[Path]:
    """Compile the CUDA kernels for devices such as "sm_80", unless that was done before. None need be present.

    Returns:
        The paths of the device code, one for each architecture and dtype.

    Raises:
        NativeBuildFailed: there is no compiler, or compiling failed.
    """
    return [launch.code(dtype, architecture) for architecture in architectures for dtype in launch.DTYPES]


def _architectures() -> list[str]:
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise native.NativeBuildFailed("torch sees no CUDA device")
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"sm_{major}{minor}" for major, minor in sorted(found)]


def _build(device_type: str) -> Path | None:
    if device_type == "cpu":
        # the cache's key has the processor, so that a library never runs on one without its instructions
        flags = ("-march=native", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast")
        return _compile("ops_cpu.cpp", flags, ("torch_cpu",))
    if device_type == "cuda":
        for architecture in _architectures():  # other dtypes are compiled at their first use
            launch.code(torch.float32, architecture)
        return None
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
    if reason:
        return reason
    try:
        if path is not None:
            torch.ops.load_library(path)
        else:
            launch.check_loading()
            for name, function in cuda.FUNCTIONS.items():
                definition.kernel(name, "CUDA")(function)
    except (OSError, native.NativeBuildFailed) as error:
        return f"the kernels for {device_type} cannot be loaded: {error}"
    return ""


def load(device_type: str = "cpu") -> bool:
    """Define the operators and load their native kernels, which are built if that was not done before.

    Returns:
        Whether native kernels are in use; if not, the references run and ``unavailable_reason()`` says why.
    """
    registry.load()
    return not _loaded(device_type)


def recorded(target: torch._ops.OpOverload, arguments: Sequence[Any], device: torch.device) -> Recorded | None:
    """What a loaded kernel for CUDA does with arguments like these; None where the operator has to be called for that.

    Args:
        target: an operator of the dispatcher.
        arguments: all of its arguments, with any tensors for its own ones: only sizes, strides and dtypes are read.
        device: of its tensors.
    """
    function = cuda.FUNCTIONS.get(target._schema.name.removeprefix("monet::"))
    if device.type != "cuda" or function is None or not _loaded.cache_info().currsize or _loaded("cuda"):
        return None
    return record(function, arguments, device.index)


def unavailable_reason(device_type: str = "cpu") -> str | None:
    """Why there are no native kernels (no compiler, a failed build, ...), or None if there are; builds if need be."""
    return _built(device_type)[1] or (_loaded(device_type) if _loaded.cache_info().currsize else "") or None


def prebuild(device_type: str = "cpu") -> str | None:
    """Build the native kernels, for every dtype, if that was not done before, without loading them.

    Returns:
        None, or why they cannot be built.
    """
    if reason := _built(device_type)[1]:
        return reason
    if device_type == "cuda":
        try:
            compile_cuda(_architectures())
        except native.NativeBuildFailed as error:
            return str(error)
    return None
