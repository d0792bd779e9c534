"""The CUDA driver's list of devices, read in a short process of its own.

Reading a device's memory needs a CUDA context, which costs hundreds of megabytes: the launcher must never have one.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DRIVER_SECONDS = 60.0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


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
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it starts nothing, and saves a process if there is no driver
    except OSError as failure:
        raise DriverFailed(str(failure)) from failure
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-c", f"from {__name__} import print_devices; print_devices({memory_of})"]
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
        rows: list[dict[str, Any]] = json.loads(done.stdout)["devices"]
    except (ValueError, KeyError, TypeError) as failure:
        raise DriverFailed(f"its process printed {done.stdout[:80]!r}") from failure
    return rows


def print_devices(memory_of: int) -> None:
    """Run in the process that ``list_devices`` starts: print the rows as JSON; on an error exit with its text."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status == _NO_DEVICE and name == "cuInit":  # a result, not an error
            print(json.dumps({"devices": []}))
            sys.exit(0)
        if status != 0:
            text = ctypes.c_char_p()
            cuda.cuGetErrorName(status, ctypes.byref(text))
            sys.exit(f"{name}: {(text.value or b'error').decode()} ({status})")

    call("cuInit", 0)
    count = ctypes.c_int()
    call("cuDeviceGetCount", ctypes.byref(count))
    rows: list[dict[str, Any]] = []
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetUuid_v2", uuid, device)
        row: dict[str, Any] = {"uuid": uuid.raw.hex()}
        if ordinal < memory_of:
            integrated, context = ctypes.c_int(), ctypes.c_void_p()
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            call("cuDeviceGetAttribute", ctypes.byref(integrated), _INTEGRATED, device)
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            call("cuCtxSetCurrent", context)
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
            row |= {"integrated": bool(integrated.value), "free": free.value, "total": total.value}
        rows.append(row)
    print(json.dumps({"devices": rows}))
