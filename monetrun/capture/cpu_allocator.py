"""Counts what torch allocates on the CPU, to the byte, and limits it.

Counting begins with ``install()``, which a worker calls right after ``import torch``; earlier allocations are not
counted, nor is their release, unless ``count_living()`` is called. The library is built against the installed torch the
first time (about a second) and kept. Without a compiler everything else works, and ``unavailable_reason()`` says what
is missing.

Not counted: ``torch.UntypedStorage(nbytes)`` made in Python, and so ``copy.deepcopy`` of a tensor. Torch takes these
from its default allocator, whichever is installed (2.11 to 2.15). Operators' tensors, ``clone`` and ``torch.load`` are
counted.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from monetrun.core import native
from monetrun.core.errors import MonetrunError

_SOURCE = "cpu_allocator.cpp"
_PREFIX = "monetrun_cpu_allocator_"
_NO_LIMIT = -1
_REFUSALS = {
    1: "the present CPU allocator has no raw deleter, so that it cannot be wrapped; "
    "start without the library that replaced torch's own",
    2: "a CPU allocator of the highest priority is installed; start without the library that installed it",
}


def _flags() -> tuple[str, ...]:
    abi = int(torch.compiled_with_cxx11_abi())
    return ("-std=c++20", "-O2", "-fvisibility=hidden", f"-D_GLIBCXX_USE_CXX11_ABI={abi}")


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if sys.platform != "linux":
        return None, f"CPU memory is counted on Linux only, this is {sys.platform}"
    folder = Path(torch.__file__).parent
    library, reason = native.load(
        _SOURCE,
        _flags(),
        includes=(folder / "include",),
        library_folders=(folder / "lib",),
        libraries=("c10",),
        # another torch in the same folder has the same flags and another interface
        key=f"{torch.__version__} {torch.version.git_version}",
    )
    if library is None:
        return None, reason
    for name in ("allocated_bytes", "peak_bytes", "limit_bytes", "last_refused_bytes", "passing_bytes"):
        function = getattr(library, _PREFIX + name)
        function.argtypes, function.restype = (), ctypes.c_int64
    library.monetrun_cpu_allocator_install.argtypes = ()
    library.monetrun_cpu_allocator_install.restype = ctypes.c_int
    library.monetrun_cpu_allocator_reset_peak.argtypes = ()
    library.monetrun_cpu_allocator_reset_peak.restype = None
    library.monetrun_cpu_allocator_watch.argtypes = ()
    library.monetrun_cpu_allocator_watch.restype = None
    library.monetrun_cpu_allocator_count.argtypes = (ctypes.c_void_p,)
    library.monetrun_cpu_allocator_count.restype = None
    library.monetrun_cpu_allocator_set_limit.argtypes = (ctypes.c_int64,)
    library.monetrun_cpu_allocator_set_limit.restype = None
    return library, ""


@functools.cache
def _installed() -> str:
    """Install the allocator, once; gives why that is impossible, or an empty text."""
    library, reason = _load()
    if library is None:
        return reason
    return _REFUSALS.get(library.monetrun_cpu_allocator_install(), "")


def _library() -> ctypes.CDLL:
    reason = _installed()
    library = _load()[0]
    if library is None or reason:
        raise MonetrunError(f"CPU memory is not counted: {reason}", "check unavailable_reason() first")
    return library


def install() -> bool:
    """Replace the present CPU allocator with the counting one; later calls do nothing.

    Returns:
        Whether it is installed; if not, ``unavailable_reason()`` says why.
    """
    return not _installed()


def living_storages() -> Iterator[torch.UntypedStorage]:
    """Of all tensors on the CPU that Python knows, some more than once. All objects are looked through (0.3 s)."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and type(thing).__module__.startswith("torch"):
            if thing.device.type != "cpu" or thing.layout != torch.strided or thing.is_meta:
                continue
            if not isinstance(thing, torch._subclasses.FakeTensor):
                yield thing.untyped_storage()


@functools.cache
def count_living() -> None:
    """Count from now on what living tensors have allocated before ``install()``, too; later calls do nothing.

    So a model counts that a notebook has made before its first ``monetrun.apply``, and its release is seen. Does
    nothing where CPU memory cannot be counted.
    """
    if install():
        count = _library().monetrun_cpu_allocator_count
        for storage in living_storages():
            count(storage._cdata)


def unavailable_reason() -> str | None:
    """Why CPU memory cannot be counted (no compiler, a failed build, ...), or None; builds the library if needed."""
    return _load()[1] or (_installed() if _installed.cache_info().currsize else "") or None


def prebuild() -> str | None:
    """Build the library if it is missing, without installing it, so that ranks do not wait for the build.

    Returns:
        None, or why it cannot be built.
    """
    return _load()[1] or None


def allocated_bytes() -> int:
    """Bytes allocated by torch on the CPU since ``install()``, less those freed; installs the allocator if needed.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    return int(_library().monetrun_cpu_allocator_allocated_bytes())


def peak_bytes() -> int:
    """The largest value of ``allocated_bytes()`` since ``install()`` or ``reset_peak()``.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    return int(_library().monetrun_cpu_allocator_peak_bytes())


def reset_peak() -> None:
    """Set the peak to what is allocated now.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    _library().monetrun_cpu_allocator_reset_peak()


def set_limit(nbytes: int | None) -> None:
    """Refuse allocations that would bring ``allocated_bytes()`` above ``nbytes``, with ``torch.OutOfMemoryError``.

    None lifts the limit. A limit below what is allocated already refuses every allocation until enough is freed. It
    holds for the thread that sets it: others are refused nothing, and what they have allocated since then (a batch that
    is loaded meanwhile) does not count before the next limit is set. A forked child (a DataLoader's worker) starts
    without a limit.

    Raises:
        ValueError: a negative limit.
        MonetrunError: CPU memory cannot be counted here.
    """
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"a limit is bytes and not negative, got {nbytes}; None lifts it")
    _library().monetrun_cpu_allocator_set_limit(_NO_LIMIT if nbytes is None else nbytes)


def limit_bytes() -> int | None:
    """The limit, or None without one.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    limit = int(_library().monetrun_cpu_allocator_limit_bytes())
    return None if limit == _NO_LIMIT else limit


def last_refused_bytes() -> int | None:
    """The size of the last refused allocation, or None if none was refused.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    return int(_library().monetrun_cpu_allocator_last_refused_bytes()) or None


def watch() -> None:
    """Note from now on what is allocated and freed, for ``passing_bytes``.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    _library().monetrun_cpu_allocator_watch()


def passing_bytes() -> int | None:
    """End the watch. The most that was allocated meanwhile, beyond what was before, without what still is.

    Returns:
        None where nothing was watched.

    Raises:
        MonetrunError: CPU memory cannot be counted here.
    """
    nbytes = int(_library().monetrun_cpu_allocator_passing_bytes())
    return None if nbytes < 0 else nbytes
