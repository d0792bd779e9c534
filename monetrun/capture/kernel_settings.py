"""The settings of a process that decide which kernels its operators run: costs hold for one choice of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from monetrun.core import native
from monetrun.ops import kernels

_Settings = tuple[tuple[str, Callable[[], Any]], ...]  # (name, how to read it)

_OF_ALL: _Settings = (
    ("float32 matmul precision", lambda: torch.get_float32_matmul_precision()),
    ("fp32_precision", lambda: torch.backends.fp32_precision),  # type: ignore[attr-defined]
    ("deterministic algorithms", lambda: torch.are_deterministic_algorithms_enabled()),
    ("deterministic algorithms, only warn", lambda: torch.is_deterministic_algorithms_warn_only_enabled()),
    # not torch.utils.deterministic: scripts set that, meaning torch.backends.cudnn's, and torchrun trains them
    ("fill uninitialized memory", lambda: import_module("torch.utils.deterministic").fill_uninitialized_memory),
)

_OF_CUDA: _Settings = (
    ("matmul.fp32_precision", lambda: torch.backends.cuda.matmul.fp32_precision),
    ("matmul.allow_tf32", lambda: torch.backends.cuda.matmul.allow_tf32),
    ("matmul.fp16_reduction", lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
    ("matmul.bf16_reduction", lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
    ("matmul.fp16_accumulation", lambda: torch.backends.cuda.matmul.allow_fp16_accumulation),
    ("blas", lambda: torch.backends.cuda.preferred_blas_library()),
    ("cudnn.enabled", lambda: torch.backends.cudnn.enabled),
    ("cudnn.benchmark", lambda: torch.backends.cudnn.benchmark),
    ("cudnn.benchmark_limit", lambda: torch.backends.cudnn.benchmark_limit),
    ("cudnn.deterministic", lambda: torch.backends.cudnn.deterministic),
    ("cudnn.allow_tf32", lambda: torch.backends.cudnn.allow_tf32),
    ("cudnn.fp32_precision", lambda: torch.backends.cudnn.fp32_precision),
    ("cudnn.conv.fp32_precision", lambda: torch.backends.cudnn.conv.fp32_precision),  # type: ignore[attr-defined]
)

_OF_CPU: _Settings = (
    ("capability", lambda: torch.backends.cpu.get_cpu_capability()),  # less where the user has set it so
    ("mkldnn.enabled", lambda: torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
    ("mkldnn.deterministic", lambda: torch.backends.mkldnn.deterministic),  # type: ignore[attr-defined]
    ("mkldnn.matmul.fp32_precision", lambda: torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
    ("mkldnn.conv.fp32_precision", lambda: torch.backends.mkldnn.conv.fp32_precision),  # type: ignore[attr-defined]
    ("mkldnn.rnn.fp32_precision", lambda: torch.backends.mkldnn.rnn.fp32_precision),  # type: ignore[attr-defined]
    ("monetrun's kernels", lambda: kernels.unavailable_reason() or ""),
)

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_CUDNN_V8_API_DISABLED",
)


def of_cuda() -> dict[str, str]:
    """What decides CUDA kernels now, by name."""
    settings = {name: _read(value) for name, value in (*_OF_ALL, *_OF_CUDA)}
    return {**settings, **{name: os.environ.get(name, "") for name in _VARIABLES}}


def of_cpu() -> dict[str, str]:
    """What decides a CPU's kernels now, by name."""
    settings = {name: _read(value) for name, value in (*_OF_ALL, *_OF_CPU)}
    return {**settings, "processor": native.processor(), **native.math_variables()}


def _read(value: Callable[[], Any]) -> str:
    try:
        return str(value())
    except RuntimeError:  # torch refuses to read an older name once the script has set a newer one
        return "set by another name"
