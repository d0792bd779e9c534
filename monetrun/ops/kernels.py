"""The native kernels of ``torch.ops.monet``, and whether they give the bits of what they stand for.

The operators are defined in ``definitions``, by references in ATen. Their kernels are in ``cuda_ops/`` (C++ on the CPU,
CUDA), built at first use by ``load()`` against torch's stable ABI.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from monetrun.core import native
from monetrun.ops import definitions as _definitions  # noqa: F401  (defines the operators)
from monetrun.ops import normalization_definitions as _normalization_definitions  # noqa: F401

aten = torch.ops.aten


def _compile(source: str, flags: Sequence[str], libraries: Sequence[str]) -> Path:
    # torch's version is no part of the key: the stable ABI is the same in all of them
    folder = Path(torch.__file__).parent
    return native.build(
        source,
        ("-std=c++20", "-O3", *flags),
        includes=(folder / "include",),
        library_folders=(folder / "lib",),
        libraries=libraries,
    )


def compile_cuda(architectures: Sequence[str]) -> Path:
    """Compile the CUDA kernels for devices such as "sm_80", of which none need be here, unless that was done before.

    Returns:
        The library's path.

    Raises:
        NativeBuildFailed: there is no nvcc, or it refuses the sources.
    """
    targets = [f"-gencode=arch={a.replace('sm_', 'compute_')},code={a}" for a in architectures]
    return _compile("ops_cuda.cu", ("-DUSE_CUDA", *targets), ("torch_cpu", "torch_cuda"))


def _build(device_type: str) -> Path:
    if device_type == "cpu":
        # the cache tells processors apart, so that none runs another's instructions
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
        return f"the kernels for {device_type} can not be loaded: {error}"
    return ""


def load(device_type: str = "cpu") -> bool:
    """Build the native kernels if that was not done before, and use them from here on; again, nothing.

    Returns:
        Whether they are in use; if not, the references serve and ``unavailable_reason()`` says why.
    """
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


@functools.cache
def batch_norm_act_is_exact(dtype: torch.dtype, channels_last: bool, device_type: str = "cpu") -> bool:
    """Whether ``batch_norm_act`` gives the bits of ATen's batch norm in training, followed by add and relu.

    That depends on torch's version and on the instructions that its dispatch picked, so both run here on some numbers,
    whose mean is large against their spread, so that a rounding more or less shows in the 8 bits of bfloat16 as well.
    Parameters of the dtype of ``x``, and of float32, are tried.
    """
    load(device_type)
    generator = torch.Generator().manual_seed(0)

    def draw(dtype: torch.dtype, *shape: int, mean: float = 0) -> Tensor:
        return (torch.randn(shape, generator=generator) * 3 + mean).to(device_type, dtype)

    form = torch.channels_last if channels_last else torch.contiguous_format
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for channels, parameters in ((3, dtype), (40, dtype), (40, wide)):
        x = draw(dtype, 4, channels, 17, 19, mean=60).contiguous(memory_format=form)
        weight, bias = draw(parameters, channels), draw(parameters, channels)
        y, mean, invstd = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        residual = torch.empty_like(x).copy_(draw(dtype, *x.shape))
        for *bounds, expected in ((None, math.nan, math.nan, y), (residual, 0.0, math.nan, torch.relu(y + residual))):
            if not torch.equal(torch.ops.monet.batch_norm_act(x, weight, bias, mean, invstd, *bounds), expected):
                return False
    return True
