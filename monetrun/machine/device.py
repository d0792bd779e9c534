"""How much memory each local rank may use: NVML for CUDA devices, psutil and the cgroup for CPUs.

NVML numbers boards in PCI order; CUDA by default puts the fastest first, and ``CUDA_VISIBLE_DEVICES`` speaks of CUDA's
order. So devices are known by UUID here. Where the two orders can differ (unlike boards, MIG), and where NVML cannot
read the memory (boards that share the host's), the CUDA driver itself is asked, in a short process of its own: a CUDA
context costs hundreds of megabytes and must never come to life in the launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from monetrun.core.errors import DeviceQueryFailed
from monetrun.machine.cgroup import BYTES_HINT, CGROUP_ROOT, PROC, cgroup_limit

_DRIVER_SECONDS = 60.0
_INTEGRATED = 18  # CU_DEVICE_ATTRIBUTE_INTEGRATED


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """What one local rank finds on its device.

    Attributes:
        device: ``"cuda:1"`` (CUDA's own number within what is visible) or ``"cpu"``.
        uuid: ``"GPU-..."`` or ``"MIG-..."``, empty for a CPU.
        total_bytes: the device's memory; on a CPU this rank's share of the smaller of memory and cgroup limit.
        free_bytes: what this rank can still allocate there; on a CPU its share of it.
        source: who said so (``"nvml"``, ``"cuda driver"``, ``"psutil"``, ``"cgroup v1"``, ``"cgroup v2"``).
        note: how the device was found, or why it was not the usual source; for the ledger and ``doctor``.
    """

    device: str
    uuid: str
    total_bytes: int
    free_bytes: int
    source: str
    note: str = ""


def query(
    kind: str,
    local_world_size: int = 1,
    *,
    environ: Mapping[str, str] | None = None,
    proc: Path = PROC,
    cgroup_root: Path = CGROUP_ROOT,
) -> tuple[MemoryInfo, ...]:
    """Read the memory of every local rank's device; rank ``i`` has the ``i``-th visible CUDA device, or the CPU.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        local_world_size: ranks on this machine.
        environ: where ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are looked up; ``os.environ`` when None.
        proc: the proc file system.
        cgroup_root: where the cgroup hierarchies are mounted.

    Raises:
        DeviceQueryFailed: there are fewer visible devices than ranks, or neither NVML nor the driver could tell.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size is {local_world_size}, it must be at least 1")
    if kind == "cpu":
        return (cpu_memory(local_world_size, proc=proc, cgroup_root=cgroup_root),) * local_world_size
    if kind == "cuda":
        return _cuda_memory(local_world_size, os.environ if environ is None else environ)
    raise ValueError(f"device kind is {kind!r}, it must be 'cuda' or 'cpu'")


def smallest(infos: tuple[MemoryInfo, ...]) -> MemoryInfo:
    """The rank with the least free memory, on which a budget for all of them stands."""
    return min(infos, key=lambda info: info.free_bytes)


def default_kind(environ: Mapping[str, str] | None = None) -> str:
    """``"cuda"`` when a CUDA device is visible to this machine's ranks, else ``"cpu"``."""
    environ = os.environ if environ is None else environ
    if parse_visible(environ.get("CUDA_VISIBLE_DEVICES")) == ():
        return "cpu"
    try:
        with _nvml():
            return "cuda" if _find(environ).uuids else "cpu"
    except pynvml.NVMLError:
        pass
    try:
        return "cuda" if _ask_driver(environ, 0) else "cpu"
    except _DriverFailed:
        return "cpu"


# ---- CUDA: which devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Board:
    """One GPU as NVML lists it: its own UUID, those of its MIG devices when it is in MIG mode, or what is wrong."""

    uuid: str
    name: str
    pci: tuple[int, int, int]
    mig: bool
    mig_uuids: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """The UUIDs of the visible devices in CUDA's order, and how that order is known."""

    uuids: tuple[str, ...]
    how: str


def parse_visible(text: str | None) -> tuple[int | str, ...] | None:
    """``CUDA_VISIBLE_DEVICES`` as torch reads it: None for all, else numbers or UUID prefixes in order.

    The list ends at the first entry that is negative, empty or of another sort than the first (so ``""``, ``"-1"`` and
    ``"none"`` hide every device); a repeated entry hides every device.
    """
    if text is None:
        return None
    sort = text[:4] if text.startswith(("GPU-", "MIG-")) else ""
    entries: list[int | str] = []
    for word in text.split(","):
        entry: int | str
        if sort:
            if not word.startswith(sort):
                break
            entry = word.strip()
        else:
            digits = re.match(r"\s*\+?(\d+)", word, re.ASCII)  # as strtoul reads it: "1gpu" is 1
            if digits is None:
                break
            entry = int(digits[1])
        if entry in entries:
            return ()
        entries.append(entry)
    return tuple(entries)


def _find(environ: Mapping[str, str]) -> _Found:
    """Visible devices in CUDA's order. NVML is initialized; raises ``NVMLError`` when it cannot list the boards."""
    visible = parse_visible(environ.get("CUDA_VISIBLE_DEVICES"))
    if visible == ():
        return _Found((), "CUDA_VISIBLE_DEVICES hides every device")
    listed = sorted(_boards(), key=lambda board: board.pci)
    boards = [board for board in listed if not board.failure]
    lost = "".join(f"; {board.failure}" for board in listed if board.failure)
    by_number = visible is None or isinstance(visible[0], int)
    doubt = ""
    if any(board.mig for board in boards):
        doubt = "a board is in MIG mode, and CUDA may show one of its instances only"
    elif by_number and lost:
        doubt = "a board does not answer"
    elif by_number and len({board.name for board in boards}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        doubt = "the boards are not alike and CUDA_DEVICE_ORDER is not PCI_BUS_ID"
    order = "in PCI order" if by_number else "by UUID"
    if not doubt:
        return _Found(_select(visible, boards), order + lost)
    try:
        rows = _ask_driver(environ, 0)
    except _DriverFailed as failure:
        how = f"{order}, CUDA's own could not be asked ({failure}) and may differ: {doubt}{lost}"
        return _Found(_select(visible, boards), how)
    known = {_hex(uuid): uuid for board in boards for uuid in (board.uuid, *board.mig_uuids)}
    # A MIG device that the parent would not list (no permission in a container) is still reached by its UUID.
    uuids = tuple(known.get(row["uuid"], f"MIG-{_dashed(row['uuid'])}") for row in rows)
    return _Found(uuids, f"in the CUDA driver's order: {doubt}{lost}")


def _select(visible: tuple[int | str, ...] | None, boards: list[_Board]) -> tuple[str, ...]:
    # In MIG mode a board is no CUDA device; its first instance stands for it.
    usable = [board.mig_uuids[0] if board.mig_uuids else board.uuid for board in boards]
    if visible is None:
        return tuple(usable)
    selected: list[str] = []
    for entry in visible:
        if isinstance(entry, int):
            matches = usable[entry : entry + 1]
        elif entry.upper().startswith("MIG-"):
            # A MIG device named in full needs no listing, which its parent may refuse.
            listed = [uuid for board in boards for uuid in board.mig_uuids if uuid.lower().startswith(entry.lower())]
            matches = listed or [entry]
        else:
            pairs = zip(boards, usable, strict=True)
            matches = [uuid for board, uuid in pairs if board.uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:  # none, or an ambiguous prefix: CUDA shows only what came before it
            break
        selected.append(matches[0])
    return tuple(selected)


def _boards() -> Iterator[_Board]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            name = pynvml.nvmlDeviceGetName(handle)
            pci = pynvml.nvmlDeviceGetPciInfo(handle)
        except pynvml.NVMLError_NoPermission:
            continue  # another container's board: CUDA does not count it either
        except pynvml.NVMLError as failure:
            yield _Board("", "", (1 << 32, index, 0), False, (), f"board {index}: {failure}")
            continue
        mig = _in_mig_mode(handle)
        yield _Board(uuid, name, (pci.domain, pci.bus, pci.device), mig, _mig_uuids(handle) if mig else ())


def _in_mig_mode(handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:
        return False  # most boards: not supported


def _mig_uuids(handle: Any) -> tuple[str, ...]:
    uuids = []
    try:
        slots = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return ()  # a container that was given instances may not ask their parent
    for slot in range(slots):
        with contextlib.suppress(pynvml.NVMLError):  # an empty slot is "not found"
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
    return tuple(uuids)


def _hex(uuid: str) -> str:
    return uuid.partition("-")[2].replace("-", "").lower()


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# ---- CUDA: how much --------------------------------------------------------------------------------------------------


def _cuda_memory(local_world_size: int, environ: Mapping[str, str]) -> tuple[MemoryInfo, ...]:
    try:
        with _nvml():
            found = _find(environ)
            _enough(len(found.uuids), local_world_size, environ, found.how)
            return tuple(_nvml_memory(i, uuid, found.how) for i, uuid in enumerate(found.uuids[:local_world_size]))
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as failure:
        raise DeviceQueryFailed(
            f"NVML: {failure}", "Reset the board (nvidia-smi --gpu-reset) or restart the machine."
        ) from failure
    except (pynvml.NVMLError, _WrongAnswer) as failure:
        reason = f"NVML: {failure}"
    try:
        rows = _ask_driver(environ, local_world_size)
    except _DriverFailed as failure:
        raise DeviceQueryFailed(
            f"the free memory of the CUDA devices could not be read. {reason}. CUDA driver: {failure}.", BYTES_HINT
        ) from failure
    _enough(len(rows), local_world_size, environ, reason)
    sort = "MIG" if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") else "GPU"
    return tuple(_driver_memory(i, row, sort, reason) for i, row in enumerate(rows[:local_world_size]))


def _enough(visible: int, ranks: int, environ: Mapping[str, str], how: str) -> None:
    if visible < ranks:
        value = environ.get("CUDA_VISIBLE_DEVICES")
        setting = "is not set" if value is None else f"is {value!r}"
        raise DeviceQueryFailed(
            f"{ranks} local ranks need as many CUDA devices, {visible} visible (CUDA_VISIBLE_DEVICES {setting}; {how})",
            "Lower --nproc-per-node, or make more devices visible.",
        )


class _WrongAnswer(Exception):
    """NVML succeeded with numbers that cannot be."""


@contextlib.contextmanager
def _nvml() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _nvml_memory(ordinal: int, uuid: str, how: str) -> MemoryInfo:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch) as failure:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510
        how = f"{how}; first version of the memory query: {failure}"
    if memory.total == 0 or memory.free > memory.total:
        raise _WrongAnswer(f"{uuid} has {memory.free} bytes free of {memory.total}, which cannot be")
    return MemoryInfo(f"cuda:{ordinal}", uuid, memory.total, memory.free, "nvml", how)


# ---- CUDA: the driver, in a process of its own -----------------------------------------------------------------------


class _DriverFailed(Exception):
    """The CUDA driver could not be asked; the text says why."""


def _driver_memory(ordinal: int, row: dict[str, Any], sort: str, reason: str) -> MemoryInfo:
    total_bytes, free_bytes, note = row["total"], row["free"], reason
    if row["integrated"]:
        # The board shares the host's memory, and CUDA does not count the page cache that the kernel would give up.
        free_bytes = max(free_bytes, min(total_bytes, psutil.virtual_memory().available))
        note = f"{reason}; the board shares the host's memory"
    return MemoryInfo(f"cuda:{ordinal}", f"{sort}-{_dashed(row['uuid'])}", total_bytes, free_bytes, "cuda driver", note)


def _ask_driver(environ: Mapping[str, str], memory_of: int) -> list[dict[str, Any]]:
    """One row per visible device in CUDA's order, with the memory of the first ``memory_of`` of them.

    Raises:
        _DriverFailed: no driver, no answer in time, or an answer that is none.
    """
    try:
        ctypes.CDLL("libcuda.so.1")  # loading it starts nothing, and where there is none a process is saved
    except OSError as failure:
        raise _DriverFailed(str(failure)) from failure
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (package, environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-c", f"from monetrun.machine.device import _tell_devices; _tell_devices({memory_of})"]
    try:
        answer = subprocess.run(
            command,
            env={**environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_DRIVER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise _DriverFailed(str(failure)) from failure
    if answer.returncode != 0:
        lines = answer.stderr.strip().splitlines()
        raise _DriverFailed(lines[-1] if lines else f"its process ended with {answer.returncode}")
    try:
        rows: list[dict[str, Any]] = json.loads(answer.stdout)["devices"]
    except (ValueError, KeyError, TypeError) as failure:
        raise _DriverFailed(f"its process answered {answer.stdout[:80]!r}") from failure
    return rows


def _tell_devices(memory_of: int) -> None:
    """The other side of ``_ask_driver``: print the devices as JSON, or say on stderr why not and exit with 1."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        status = getattr(cuda, name)(*arguments)
        if status == 100 and name == "cuInit":  # CUDA_ERROR_NO_DEVICE: an answer, not a failure
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


# ---- CPU -------------------------------------------------------------------------------------------------------------


def cpu_memory(local_world_size: int = 1, *, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> MemoryInfo:
    """One rank's share of the host's memory: the smaller of what psutil calls available and the cgroup's headroom.

    Args and raises: as ``query``.
    """
    host = psutil.virtual_memory()
    total_bytes, free_bytes, source, note = host.total, host.available, "psutil", ""
    limit = cgroup_limit(proc=proc, cgroup_root=cgroup_root)
    if limit is not None:
        total_bytes = min(total_bytes, limit.limit_bytes)
        if limit.headroom_bytes < free_bytes:
            free_bytes, source, note = (
                limit.headroom_bytes,
                f"cgroup v{limit.version}",
                f"{limit.file} is {limit.limit_bytes}",
            )
    if local_world_size > 1:
        note = f"{note}; " * bool(note) + f"divided by {local_world_size} local ranks"
    return MemoryInfo("cpu", "", total_bytes // local_world_size, free_bytes // local_world_size, source, note)
