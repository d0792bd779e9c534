"""The CUDA driver's list of devices, and whether it maps memory, asked in a short process of its own.

Reading a device's memory needs a CUDA context, which costs hundreds of megabytes: the launcher must never have one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_DRIVER_SECONDS = 60.0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


class DriverFailed(Exception):
    """The CUDA driver could not list its devices; the text says why."""


def list_devices(environ: Mapping[str, str], memory_of: int) -> list[dict[str, Any]]:
    """One row per visible device in CUDA's order.

    Args:
        environ: environment of the process that loads the driver.
        memory_of: number of devices, from the first, whose memory is read.

    Returns:
        Rows with ``"uuid"`` (32 hexadecimal digits); the first ``memory_of`` also with ``"integrated"`` (the board
        shares the host's memory), ``"free"`` and ``"total"`` (bytes).

    Raises:
        DriverFailed: there is no driver, or its process failed, took too long or printed something else.
    """
    rows: list[dict[str, Any]] = _asked(f"print_devices({memory_of})", environ, "devices")
    return rows


def _asked(call: str, environ: Mapping[str, str], name: str) -> Any:
    """What ``call``, of this module, prints under ``name`` in a process of its own, with this environment.

    Raises:
        DriverFailed: as ``list_devices``.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it starts nothing, and saves a process if there is no driver
    except OSError as failure:
        raise DriverFailed(str(failure)) from failure
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-c", f"import {__name__} as driver; driver.{call}"]
    try:
        done = subprocess.run(
            command,
            env={**environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_DRIVER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise DriverFailed(str(failure)) from failure
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise DriverFailed(lines[-1] if lines else f"its process ended with {done.returncode}")
    try:
        return json.loads(done.stdout)[name]
    except (ValueError, KeyError, TypeError) as failure:
        raise DriverFailed(f"its process printed {done.stdout[:80]!r}") from failure


def why_nothing_is_mapped(environ: Mapping[str, str]) -> str:
    """Why memory cannot be mapped page by page on the first visible device; empty where it can.

    Expandable segments need it. It is tried: drivers of virtual machines say that they can, and cannot.

    Raises:
        DriverFailed: as ``list_devices``, or memory has run out: it is not known.
    """
    return str(_asked("print_mapping()", environ, "failed"))


def print_mapping() -> None:
    """Run in the process that ``why_nothing_is_mapped`` starts: print the call that failed, as JSON; else nothing."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, supported = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDeviceGet", ctypes.byref(device), 0)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(supported), _MAPS_MEMORY, device)
    if not supported.value:
        print(json.dumps({"failed": "the device does not support it"}))
        return
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)
    print(json.dumps({"failed": _mapping_failure(cuda, device.value)}))


class _Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = (("location_type", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


def _mapping_failure(cuda: ctypes.CDLL, device: int) -> str:
    """Map one page and undo it; gives the call that failed, and its error."""
    # pinned, shared by a file's number, on a device: as torch asks for them
    properties, access = _Properties(1, 1, 1, device), _Access(1, device, 3)
    size, start, pages = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    nothing = ctypes.c_uint64(0)
    undo: list[tuple[Any, ...]] = []
    calls: tuple[tuple[str, Callable[[], tuple[Any, ...]], str], ...] = (
        ("cuMemGetAllocationGranularity", lambda: (ctypes.byref(size), ctypes.byref(properties), 0), ""),
        (
            "cuMemAddressReserve",
            lambda: (ctypes.byref(start), size, ctypes.c_size_t(0), nothing, nothing),
            "cuMemAddressFree",
        ),
        ("cuMemCreate", lambda: (ctypes.byref(pages), size, ctypes.byref(properties), nothing), "cuMemRelease"),
        ("cuMemMap", lambda: (start, size, ctypes.c_size_t(0), pages, nothing), "cuMemUnmap"),
        ("cuMemSetAccess", lambda: (start, size, ctypes.byref(access), ctypes.c_size_t(1)), ""),
    )
    failed = ""
    for name, arguments, reverse in calls:
        status = getattr(cuda, name)(*arguments())
        if status == _NO_MEMORY:
            sys.exit(f"{name}: memory has run out")
        if status != 0:
            failed = _error(cuda, name, status)
            break
        if reverse:
            undo.append((reverse, pages) if reverse == "cuMemRelease" else (reverse, start, size))
    for name, *given in reversed(undo):
        getattr(cuda, name)(*given)
    return failed


def _call(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(cuda, name)(*arguments)
    if status == _NO_DEVICE and name == "cuInit":  # a result, not an error
        print(json.dumps({"devices": []}))
        sys.exit(0)
    if status != 0:
        sys.exit(_error(cuda, name, status))


def _error(cuda: ctypes.CDLL, name: str, status: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(status, ctypes.byref(text))
    return f"{name}: {(text.value or b'error').decode()} ({status})"


def print_devices(memory_of: int) -> None:
    """Run in the process that ``list_devices`` starts: print the rows as JSON; on an error exit with its text."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _call(cuda, "cuInit", 0)
    count = ctypes.c_int()
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    rows: list[dict[str, Any]] = []
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
        _call(cuda, "cuDeviceGet", ctypes.byref(device), ordinal)
        _call(cuda, "cuDeviceGetUuid_v2", uuid, device)
        row: dict[str, Any] = {"uuid": uuid.raw.hex()}
        if ordinal < memory_of:
            integrated, context = ctypes.c_int(), ctypes.c_void_p()
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            _call(cuda, "cuDeviceGetAttribute", ctypes.byref(integrated), _INTEGRATED, device)
            _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            _call(cuda, "cuCtxSetCurrent", context)
            _call(cuda, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            row |= {"integrated": bool(integrated.value), "free": free.value, "total": total.value}
        rows.append(row)
    print(json.dumps({"devices": rows}))
