"""How much memory each local rank may use: from NVML for CUDA devices, from psutil and the cgroup for CPUs.

NVML numbers boards in PCI order. CUDA by default puts the fastest first, and ``CUDA_VISIBLE_DEVICES`` has CUDA's
numbers. So this module identifies devices by UUID. ``driver`` lists the devices where the two orders can differ (unlike
boards, MIG) and where NVML cannot read the memory (boards that share the host's).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pynvml

from monetrun.core.errors import DeviceQueryFailed
from monetrun.machine.cgroup import BYTES_HINT, CGROUP_ROOT, PROC, cgroup_limit
from monetrun.machine.driver import DriverFailed, list_devices
from monetrun.machine.store import key


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The memory of one local rank's device.

    Attributes:
        device: ``"cuda:1"`` (CUDA's own number within what is visible) or ``"cpu"``.
        uuid: ``"GPU-..."`` or ``"MIG-..."``, empty for a CPU.
        total_bytes: the device's memory, of the smaller of memory and cgroup limit on a CPU; a rank's part of it, where
            several ranks share the device.
        free_bytes: what this rank can still allocate there.
        source: where the figures are from (``"nvml"``, ``"cuda driver"``, ``"psutil"``, ``"cgroup v1"``, ``"cgroup
            v2"``).
        note: how the device was found, or why this is not the usual source.
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
    """Read the memory of every local rank's device: the CPU, or the ``i``-th visible CUDA device.

    Ranks that are more than the visible devices begin with the first one again; those on one device share its memory.

    Args:
        kind: ``"cuda"`` or ``"cpu"``.
        local_world_size: ranks on this machine.
        environ: has ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``; ``os.environ`` if None.
        proc: the proc file system.
        cgroup_root: where the cgroup hierarchies are mounted.

    Raises:
        DeviceQueryFailed: no CUDA device is visible, or neither NVML nor the driver can be read.
    """
    if local_world_size < 1:
        raise ValueError(f"local_world_size is {local_world_size}, it must be at least 1")
    if kind == "cpu":
        return (cpu_memory(local_world_size, proc=proc, cgroup_root=cgroup_root),) * local_world_size
    if kind == "cuda":
        return _shared(_cuda_memory(local_world_size, os.environ if environ is None else environ), local_world_size)
    raise ValueError(f"device kind is {kind!r}, it must be 'cuda' or 'cpu'")


def smallest(infos: tuple[MemoryInfo, ...]) -> MemoryInfo:
    """The rank with the least free memory, which limits a budget for all ranks."""
    return min(infos, key=lambda info: info.free_bytes)


def default_kind(environ: Mapping[str, str] | None = None) -> str:
    """``"cuda"`` if a CUDA device is visible to this machine's ranks, else ``"cpu"``."""
    environ = os.environ if environ is None else environ
    if parse_visible(environ.get("CUDA_VISIBLE_DEVICES")) == ():
        return "cpu"
    try:
        with _nvml():
            return "cuda" if _find_visible(environ).uuids else "cpu"
    except pynvml.NVMLError:
        pass
    try:
        return "cuda" if list_devices(environ, 0) else "cpu"
    except DriverFailed:
        return "cpu"


def driver_key(environ: Mapping[str, str]) -> str:
    """A key of the CUDA driver and of the devices that it shows: what it can do stays as it is for one."""
    try:
        with _nvml():
            found: list[str] = [str(pynvml.nvmlSystemGetDriverVersion()), *_find_visible(environ).uuids]
    except (pynvml.NVMLError, DeviceQueryFailed) as failure:
        found = [str(failure), environ.get("CUDA_VISIBLE_DEVICES", "")]
    return key("driver", os.uname().release, os.uname().nodename, found)


def driver_and_boards(environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """The version of NVIDIA's driver, and the names of the visible boards; empty where there are none."""
    try:
        with _nvml():
            uuids = _find_visible(environ).uuids
            names = {uuid: board.name for board in _boards() for uuid in (board.uuid, *board.mig_uuids)}
            return str(pynvml.nvmlSystemGetDriverVersion()), [names.get(uuid, uuid) for uuid in uuids]
    except (pynvml.NVMLError, DeviceQueryFailed):
        return "", []


# ---- CUDA: which devices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Board:
    """One GPU as NVML lists it: its UUID, those of its MIG devices if it is in MIG mode, or what is wrong."""

    uuid: str
    name: str
    pci: tuple[int, int, int]
    mig: bool
    mig_uuids: tuple[str, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Visible:
    """The UUIDs of the visible devices in CUDA's order, and how that order was found."""

    uuids: tuple[str, ...]
    how: str


def parse_visible(text: str | None) -> tuple[int | str, ...] | None:
    """``CUDA_VISIBLE_DEVICES`` as torch reads it: None for all, else numbers or UUID prefixes in order.

    The list ends at the first entry that is negative, empty or of another form than the first (so ``""``, ``"-1"`` and
    ``"none"`` hide every device). A repeated entry hides every device.
    """
    if text is None:
        return None
    prefix = text[:4] if text.startswith(("GPU-", "MIG-")) else ""
    entries: list[int | str] = []
    for word in text.split(","):
        entry: int | str
        if prefix:
            if not word.startswith(prefix):
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


def _find_visible(environ: Mapping[str, str]) -> _Visible:
    """Find the visible devices in CUDA's order, with NVML, which the caller has initialized.

    Raises:
        NVMLError: NVML cannot list the boards.
    """
    visible = parse_visible(environ.get("CUDA_VISIBLE_DEVICES"))
    if visible == ():
        return _Visible((), "CUDA_VISIBLE_DEVICES hides every device")
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
        return _Visible(_select(visible, boards), order + lost)
    try:
        rows = list_devices(environ, 0)
    except DriverFailed as failure:
        how = f"{order}; CUDA's order could not be read ({failure}) and may differ: {doubt}{lost}"
        return _Visible(_select(visible, boards), how)
    known = {_hex(uuid): uuid for board in boards for uuid in (board.uuid, *board.mig_uuids)}
    # A MIG device that its parent does not list (no permission in a container) can still be read by its UUID.
    uuids = tuple(known.get(row["uuid"], f"MIG-{_dashed(row['uuid'])}") for row in rows)
    return _Visible(uuids, f"in the CUDA driver's order: {doubt}{lost}")


def _select(visible: tuple[int | str, ...] | None, boards: list[_Board]) -> tuple[str, ...]:
    # A board in MIG mode is not a CUDA device; CUDA shows its first instance instead.
    usable = [board.mig_uuids[0] if board.mig_uuids else board.uuid for board in boards]
    if visible is None:
        return tuple(usable)
    selected: list[str] = []
    for entry in visible:
        if isinstance(entry, int):
            matches = usable[entry : entry + 1]
        elif entry.upper().startswith("MIG-"):
            # A MIG device named in full need not be listed, which its parent may refuse.
            listed = [uuid for board in boards for uuid in board.mig_uuids if uuid.lower().startswith(entry.lower())]
            matches = listed or [entry]
        else:
            pairs = zip(boards, usable, strict=True)
            matches = [uuid for board, uuid in pairs if board.uuid.lower().startswith(entry.lower())]
        if len(matches) != 1:  # none, or an ambiguous prefix: CUDA shows only the devices before it
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
            continue  # another container's board, which CUDA does not count either
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
        return ()  # a container that has instances only may not query their parent
    for slot in range(slots):
        with contextlib.suppress(pynvml.NVMLError):  # an empty slot is "not found"
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)))
    return tuple(uuids)


def _hex(uuid: str) -> str:
    return uuid.partition("-")[2].replace("-", "").lower()


def _dashed(digits: str) -> str:
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# ---- CUDA: how much --------------------------------------------------------------------------------------------------


def _shared(infos: tuple[MemoryInfo, ...], ranks: int) -> tuple[MemoryInfo, ...]:
    """Of each rank, where the visible devices are fewer than ranks."""
    if len(infos) == ranks:
        return infos
    parts = []
    for i, info in enumerate(infos):
        sharers = len(range(i, ranks, len(infos)))
        note = f"{info.note}; divided by {sharers} local ranks" if sharers > 1 else info.note
        total_bytes, free_bytes = info.total_bytes // sharers, info.free_bytes // sharers
        parts.append(replace(info, total_bytes=total_bytes, free_bytes=free_bytes, note=note))
    return tuple(parts[rank % len(parts)] for rank in range(ranks))


def _cuda_memory(most: int, environ: Mapping[str, str]) -> tuple[MemoryInfo, ...]:
    """Of the visible devices, the first ``most``."""
    try:
        with _nvml():
            found = _find_visible(environ)
            _check_visible(len(found.uuids), environ, found.how)
            return tuple(_nvml_memory(i, uuid, found.how) for i, uuid in enumerate(found.uuids[:most]))
    except (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_ResetRequired) as failure:
        raise DeviceQueryFailed(
            f"NVML: {failure}", "Reset the board (nvidia-smi --gpu-reset) or restart the machine."
        ) from failure
    except (pynvml.NVMLError, _ImpossibleMemory) as failure:
        reason = f"NVML: {failure}"
    try:
        rows = list_devices(environ, most)
    except DriverFailed as failure:
        raise DeviceQueryFailed(
            f"the free memory of the CUDA devices could not be read. {reason}. CUDA driver: {failure}.", BYTES_HINT
        ) from failure
    _check_visible(len(rows), environ, reason)
    prefix = "MIG" if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") else "GPU"
    return tuple(_driver_memory(i, row, prefix, reason) for i, row in enumerate(rows[:most]))


def _check_visible(visible: int, environ: Mapping[str, str], how: str) -> None:
    if not visible:
        value = environ.get("CUDA_VISIBLE_DEVICES")
        setting = "is not set" if value is None else f"is {value!r}"
        raise DeviceQueryFailed(
            f"no CUDA device is visible (CUDA_VISIBLE_DEVICES {setting}; {how})", "make one visible"
        )


class _ImpossibleMemory(Exception):
    """NVML succeeded with impossible numbers."""


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
        raise _ImpossibleMemory(f"{uuid} has {memory.free} bytes free of {memory.total}, which is impossible")
    return MemoryInfo(f"cuda:{ordinal}", uuid, memory.total, memory.free, "nvml", how)


def _driver_memory(ordinal: int, row: dict[str, Any], prefix: str, reason: str) -> MemoryInfo:
    total_bytes, free_bytes, note = row["total"], row["free"], reason
    if row["integrated"]:
        # The board shares the host's memory, and CUDA does not count the page cache, which the kernel can drop.
        free_bytes = max(free_bytes, min(total_bytes, psutil.virtual_memory().available))
        note = f"{reason}; the board shares the host's memory"
    return MemoryInfo(
        f"cuda:{ordinal}", f"{prefix}-{_dashed(row['uuid'])}", total_bytes, free_bytes, "cuda driver", note
    )


# ---- CPU -------------------------------------------------------------------------------------------------------------


def cpu_memory(local_world_size: int = 1, *, proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> MemoryInfo:
    """One rank's share of the host's memory: the smaller of psutil's available memory and the cgroup's headroom.

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
