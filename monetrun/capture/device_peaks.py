"""Peaks of the CUDA allocator's counters, which two read and reset: the script and monetrun.

Torch has one peak for all who ask. Each of the two sees here the most since its own last reset, so that a script's
``torch.cuda.max_memory_allocated()`` is what it is under torchrun, and no step is measured too low.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from monetrun.capture import program

OURS, SCRIPT = "ours", "script"
_OTHER = {OURS: SCRIPT, SCRIPT: OURS}
_PEAK = "peak"
_RESERVED = ("reserved_bytes", "segment")

# what ``torch.cuda`` and ``torch.accelerator`` call; a build of torch without CUDA does not have the first
_READ, _RESET = "_cuda_memoryStats", "_cuda_resetPeakMemoryStats"
_NAMES = ((_READ, _RESET), ("_accelerator_getDeviceStats", "_accelerator_resetPeakStats"))
_TORCHS: dict[str, Callable[[int], Any]] = {
    name: getattr(torch._C, name) for names in _NAMES for name in names if hasattr(torch._C, name)
}

# the counters and pools whose peaks cuda_ops/device_peaks.hpp keeps, in its order
_OF_EACH = ("allocation", "segment", "active", "inactive_split")
_OF_BYTES = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_PLACES = [(counter, pool) for counter in (*_OF_EACH, *_OF_BYTES) for pool in ("all", "small_pool", "large_pool")]

# by reader and device: the most before the other's resets, by counter and pool
_before: defaultdict[tuple[str, int], dict[tuple[str, str], int]] = defaultdict(dict)


class Bytes(NamedTuple):
    """Counters of a device; peaks since our last reset.

    Attributes:
        allocated: bytes in tensors.
        peak: the most of them.
        reserved: bytes that torch has from the device.
        reserved_peak: the most of them.
        retries: how often the cache was emptied because an allocation had failed.
    """

    allocated: int
    peak: int
    reserved: int
    reserved_peak: int
    retries: int


def index_of(device: torch.device) -> int:
    """The number of a CUDA device; one without a number is the present one."""
    return torch.cuda.current_device() if device.index is None else device.index


def read(index: int, reader: str = OURS, name: str = _READ) -> dict[str, Any]:
    """All counters of a device by name, as ``torch.cuda.memory_stats_as_nested_dict``; peaks since the reader's reset.

    Args:
        index: of the device.
        reader: ``OURS`` or ``SCRIPT``.
        name: of torch's function.
    """
    stats: dict[str, Any] = _TORCHS[name](index)
    _take_from_native(index)
    for (counter, pool), most in _before[reader, index].items():
        found = stats.get(counter, {}).get(pool)
        if found is not None and found[_PEAK] < most:
            found[_PEAK] = most
    return stats


def reset(index: int, reader: str = OURS, name: str = _RESET) -> None:
    """The reader's peaks start anew from what is held now; the other's stay."""
    native = _native()
    if reader == OURS and native is not None:
        native.reset(index)
    else:
        _take_from_native(index)
        _keep(_OTHER[reader], index, _peaks(_TORCHS[_READ](index)))
        _TORCHS[name](index)
    _before[reader, index].clear()


def bytes_now(index: int) -> Bytes:
    """The counters that a step is measured by; several a step, which ``read`` would make a tenth slower."""
    native = _native()
    if native is None:
        stats = read(index)
        allocated, reserved = (stats[name]["all"] for name in ("allocated_bytes", "reserved_bytes"))
        numbers = (allocated["current"], allocated[_PEAK], reserved["current"], reserved[_PEAK])
        return Bytes(*numbers, stats["num_alloc_retries"])
    found, before = native.read(index), _before.get((OURS, index))
    if not before:
        return found
    allocated, reserved = (before.get((name, "all"), 0) for name in ("allocated_bytes", "reserved_bytes"))
    return found._replace(peak=max(found.peak, allocated), reserved_peak=max(found.reserved_peak, reserved))


@contextlib.contextmanager
def uncounted(index: int) -> Iterator[None]:
    """A context after which no reader's peaks have what was allocated and freed in it; what was reserved counts."""
    before = {reader: _peaks(read(index, reader)) for reader in _OTHER}
    yield
    for reader, kept in before.items():
        after = _peaks(read(index, reader))
        _before[reader, index] = {
            place: after[place] if place[0] in _RESERVED else kept.get(place, 0) for place in after
        }
    _TORCHS[_RESET](index)


class _Native:
    """The functions of ``cuda_ops/device_peaks.hpp``."""

    def __init__(self) -> None:
        library = program.library()
        self._read, self._reset = library.monetrun_device_read, library.monetrun_device_reset
        self._take = library.monetrun_device_take
        self._read.argtypes = self._take.argtypes = ctypes.c_int64, ctypes.c_void_p
        self._reset.argtypes = (ctypes.c_int64,)

    def read(self, index: int) -> Bytes:
        numbers = (ctypes.c_int64 * len(Bytes._fields))()
        if not self._read(index, numbers):
            raise RuntimeError(f"torch knows nothing of what is allocated on cuda:{index}; use it first")
        return Bytes(*numbers)

    def reset(self, index: int) -> None:
        if not self._reset(index):
            raise RuntimeError(f"torch cannot reset the peaks of cuda:{index}; use it first")

    def take(self, index: int) -> list[int]:
        peaks = (ctypes.c_int64 * len(_PLACES))()
        return peaks[: self._take(index, peaks)]


def _native() -> _Native | None:
    """None where nothing has loaded the library."""
    return _made_native() if program.is_loaded() else None


@functools.cache
def _made_native() -> _Native:
    return _Native()


def _take_from_native(index: int) -> None:
    """What our resets have kept for the script lies where it is looked for."""
    native = _native()
    if native is not None:
        _keep(SCRIPT, index, dict(zip(_PLACES, native.take(index), strict=False)))


def _keep(reader: str, index: int, peaks: Mapping[tuple[str, str], int]) -> None:
    before = _before[reader, index]
    for place, most in peaks.items():
        if most > before.get(place, 0):
            before[place] = most


def _peaks(stats: dict[str, Any]) -> dict[tuple[str, str], int]:
    """The peaks of ``stats``, by counter and pool."""
    by_pool = ((counter, pools) for counter, pools in stats.items() if isinstance(pools, dict))
    # private pools, which torch 2.14 lists too, have no peak of their own there
    return {
        (c, pool): v[_PEAK] for c, pools in by_pool for pool, v in pools.items() if isinstance(v, dict) and _PEAK in v
    }


@functools.cache
def keep_apart() -> None:
    """From now on what the script calls gives it its own peaks.

    It stays so in this process: what was reset before the script asks would be lost to it.
    """
    for reads, resets in _NAMES:
        if _READ in _TORCHS and reads in _TORCHS and resets in _TORCHS:
            setattr(torch._C, reads, functools.partial(read, reader=SCRIPT, name=reads))
            setattr(torch._C, resets, functools.partial(reset, reader=SCRIPT, name=resets))
