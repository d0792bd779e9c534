"""A process sees NVIDIA GPUs that are not there: see README.md beside this file."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import Unavailable, build

__all__ = [
    "Counters",
    "Unavailable",
    "build",
    "counters",
    "environment",
    "parse_counters",
    "reset_counters",
    "unavailable_reason",
]


def unavailable_reason() -> str:
    """Why the stand-in cannot be built here; empty if it can."""
    try:
        build()
    except Unavailable as failure:
        return str(failure)
    return ""


def environment(
    gib: float | Sequence[float] = 16.0,
    devices: int | None = None,
    *,
    others_mib: float | Sequence[float] = 600.0,
    context_mib: float = 300.0,
    names: Sequence[str] = (),
    order: Sequence[int] = (),
    capability: str = "9.0",
    cudnn_workspace_mib: float = 8.0,
    kernel_us: float = 0.0,
    fault_at_launch: int = 0,
    refused: str = "",
    counters: Path | None = None,
    state: Path | None = None,
) -> dict[str, str]:
    """Variables that give a process, and all that it starts, a machine with stand-in GPUs.

    Args:
        gib: memory of each device; one number for all, or one per device.
        devices: how many; as many as ``gib`` has numbers, or 1.
        others_mib: what processes outside this machine's hold of each.
        context_mib: what a process that touches a device holds there beside its allocations.
        names: what the devices are called; "Stand-in GPU" if empty.
        order: CUDA's order of the boards, by NVML's numbers, unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
        capability: the devices' compute capability.
        cudnn_workspace_mib: workspace of every cuDNN plan.
        kernel_us: how long each launch keeps its stream busy.
        fault_at_launch: number of the kernel launch after which the device fails for good; 0: never.
        refused: ``"cuMemCreate"`` or ``"cuMemSetAccess"``, which the driver then does not support; empty: none.
        counters: folder into which each process that used a device writes ``PID.json`` when it ends.
        state: file through which processes see each other's use; a new one if None, removed when this process ends.

    Raises:
        Unavailable: the stand-in cannot be built here.
    """
    folder = build()
    sizes = _row(gib)
    if state is None:
        handle, name = tempfile.mkstemp(prefix="standin-gpu-", suffix=".state")
        os.close(handle)
        state = Path(name)
        atexit.register(_remove, state)
    variables = {
        "LD_PRELOAD": _before(str(folder / "libstandin_runtime.so"), "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _before(str(folder), "LD_LIBRARY_PATH"),
        # a library with CUDA's runtime linked into it would look for a real driver
        "NVCC_APPEND_FLAGS": f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -cudart shared".strip(),
        "STANDIN_GPU_GIB": ",".join(map(str, sizes)),
        "STANDIN_GPUS": str(len(sizes) if devices is None else devices),
        "STANDIN_GPU_OTHERS_MIB": ",".join(map(str, _row(others_mib))),
        "STANDIN_GPU_CONTEXT_MIB": str(context_mib),
        "STANDIN_GPU_NAME": ",".join(names),
        "STANDIN_GPU_ORDER": ",".join(map(str, order)),
        "STANDIN_GPU_SM": capability,
        "STANDIN_GPU_CUDNN_MIB": str(cudnn_workspace_mib),
        "STANDIN_GPU_KERNEL_US": str(kernel_us),
        "STANDIN_GPU_FAULT_AT": str(fault_at_launch),
        "STANDIN_GPU_REFUSED": refused,
        "STANDIN_GPU_COUNTERS": "" if counters is None else str(counters),
        "STANDIN_GPU_STATE": str(state),
    }
    return variables


def _row(value: float | Sequence[float]) -> list[float]:
    return [float(value)] if isinstance(value, (int, float)) else [float(one) for one in value]


def _before(path: str, variable: str) -> str:
    """The path in front of what the variable holds already, once."""
    old = [word for word in os.environ.get(variable, "").split(":") if word and word != path]
    return ":".join([path, *old])


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


@dataclass(frozen=True, slots=True)
class Counters:
    """What this process asked of its devices since its start, or since ``reset_counters``.

    Attributes:
        kernel_launches: kernels that torch, NVRTC or Triton launched.
        library_calls: computing calls of cuBLAS and cuDNN, whose kernels the stand-in does not see.
        mallocs: calls of cudaMalloc, refused ones included.
        frees: calls of cudaFree.
        failed_allocations: requests, of either kind, for which the device had no room.
        physical_creates: cuMemCreate: pages for expandable segments.
        physical_releases: cuMemRelease.
        maps: cuMemMap.
        unmaps: cuMemUnmap.
        synchronizations: calls that make the host wait: device, stream, event, blocking copy.
        memcpys: copies, of any direction.
        memsets: fills.
        event_records: cudaEventRecord.
        stream_waits: cudaStreamWaitEvent.
        cudnn_executions: cuDNN plans that were executed (part of ``library_calls``).
        host_allocations: pinned memory.
        held_bytes: what the process holds of each device, without its context.
        peak_bytes: the most that it held of each.
    """

    kernel_launches: int
    library_calls: int
    mallocs: int
    frees: int
    failed_allocations: int
    physical_creates: int
    physical_releases: int
    maps: int
    unmaps: int
    synchronizations: int
    memcpys: int
    memsets: int
    event_records: int
    stream_waits: int
    cudnn_executions: int
    host_allocations: int
    held_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]


def counters() -> Counters:
    """This process's counters. The process must have been started with ``environment()``'s variables."""
    text = ctypes.create_string_buffer(8192)
    _driver().standin_report(text, len(text))
    return parse_counters(text.value.decode())


def parse_counters(text: str) -> Counters:
    """The counters that a process wrote when it ended."""
    values = json.loads(text)
    return Counters(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def reset_counters() -> None:
    """Count from zero; peaks start from what is held."""
    _driver().standin_reset()


def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "standin_report"):
        raise Unavailable("this process was not started with the stand-in's environment()")
    return library
