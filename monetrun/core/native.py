"""Builds the C++ sources of ``cuda_ops/`` at first use, caches the libraries per user, and loads them.

A library's name has the hash of its sources, flags and compiler, so a change of any of them builds it anew. Processes
that start together build it once: under a file lock, and the finished file is moved into place. CUDA's kernels are
kept in the same way (``core.cubin``). A library is code that runs as this user, so one is loaded only where nobody else
can have written it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import monetrun
from monetrun.core.errors import MonetrunError
from monetrun.core.user_folders import NO_LOCKS_HERE, user_cache

DEFAULT_FLAGS = ("-std=c++17", "-O3", "-march=native", "-Wall")
_BUILD_TIMEOUT_SECONDS = 600.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NativeBuildFailed(MonetrunError):
    """A native library cannot be built: no compiler, no source, no folder to keep it in, or a compiler error."""


def source_folder() -> Path:
    """The folder of the sources: inside the installed package, or beside the package in a checkout.

    Raises:
        NativeBuildFailed: there is neither.
    """
    package = Path(monetrun.__file__).resolve().parent
    for folder in (package / "cuda_ops", package.parent / "cuda_ops"):
        if folder.is_dir():
            return folder
    raise NativeBuildFailed(
        f"the native sources are neither in {package / 'cuda_ops'} nor in {package.parent / 'cuda_ops'}",
        "install monetrun again",
    )


def cache_folder() -> Path:
    """Where built libraries are kept: ``native`` in the user's cache folder.

    Raises:
        NativeBuildFailed: there is no home folder.
    """
    try:
        return user_cache(os.environ) / "native"
    except RuntimeError as error:
        raise NativeBuildFailed(f"there is no folder for libraries: {error}", "set XDG_CACHE_HOME") from error


def compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX``, which may have several words, or the first of g++, c++ and clang++ found.

    Raises:
        NativeBuildFailed: there is none.
    """
    if named := os.environ.get("CXX"):
        words = [named] if shutil.which(named) else _words(named)
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
        raise NativeBuildFailed(f"CXX is {named!r}, which is not an executable", "unset CXX or name a C++ compiler")
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise NativeBuildFailed("there is no C++ compiler (g++, c++ or clang++)", "install g++, or set CXX")


def _words(command: str) -> list[str]:
    """Its words as a shell has them; none where quotes are left open."""
    with contextlib.suppress(ValueError):
        return shlex.split(command)
    return []


def build(
    source: str,
    flags: Sequence[str] = DEFAULT_FLAGS,
    *,
    includes: Sequence[str | Path] = (),
    library_folders: Sequence[str | Path] = (),
    libraries: Sequence[str] = (),
    key: str = "",
) -> Path:
    """Compile ``source`` (a file name in ``source_folder()``) into a shared library, unless that was done before.

    Args:
        source: file name; files of the same folder that it includes with quotes are hashed too.
        flags: compiler flags.
        includes: folders for ``-I``.
        library_folders: folders for ``-L`` and for the run path.
        libraries: names for ``-l``.
        key: anything else that the library depends on, such as the version of the headers.

    Returns:
        The library's path.

    Raises:
        NativeBuildFailed: with the reason, and the last lines of the compiler's output where that failed.
    """
    path = source_folder() / source
    cxx = compiler()
    arguments = [*flags, "-fPIC", "-shared", *(f"-I{folder}" for folder in includes)]
    links = [f"-L{folder}" for folder in library_folders]
    links += [f"-Wl,-rpath,{folder}" for folder in library_folders]
    links += [f"-l{name}" for name in libraries]
    compilers = [identity(found) for word in cxx if (found := shutil.which(word))]  # CXX="ccache g++" has two
    parts = [*compilers, *cxx[1:], *arguments, *links, key]
    if "-march=native" in flags:
        parts.append(processor())
    return cached(path, ".so", parts, lambda out: compile_by([*cxx, *arguments, str(path), *links, "-o", str(out)]))


def cached(source: Path, suffix: str, parts: Iterable[str], make: Callable[[Path], None]) -> Path:
    """A file that is made from ``source`` once, and kept in ``cache_folder()``.

    Args:
        source: the source; its text and that of the files it includes are hashed into the file's name.
        suffix: of the file's name.
        parts: what the file depends on beside its source: flags, the compiler, ...
        make: writes the file to the path it is given.

    Raises:
        NativeBuildFailed: what ``make`` raises; or there is no source, or no folder of this user's to keep the file in.
    """
    digest = hashlib.sha256()
    for part in (*(path.read_bytes() for path in included(source)), *(text.encode() for text in parts)):
        digest.update(part)
        digest.update(b"\0")
    folder = cache_folder()
    kept = folder / f"{source.stem}-{digest.hexdigest()[:24]}{suffix}"
    try:
        _make_private(folder)
        if not _is_private(kept):
            with _locked(folder / f"{source.stem}.lock"):
                if not _is_private(kept):
                    _make(kept, make)
    except OSError as error:
        raise NativeBuildFailed(
            f"{folder} cannot be written: {error.strerror or error}", "set XDG_CACHE_HOME to a writable folder"
        ) from error
    return kept


def load(
    source: str,
    flags: Sequence[str] = DEFAULT_FLAGS,
    *,
    includes: Sequence[str | Path] = (),
    library_folders: Sequence[str | Path] = (),
    libraries: Sequence[str] = (),
    key: str = "",
) -> tuple[ctypes.CDLL | None, str]:
    """Build ``source`` if necessary and load it; the arguments are ``build``'s.

    Returns:
        The library and ``""``, or None and the reason. A second call gives the same result without a new attempt.
    """
    return _load(
        source, tuple(flags), tuple(map(str, includes)), tuple(map(str, library_folders)), tuple(libraries), key
    )


@functools.cache
def _load(
    source: str,
    flags: tuple[str, ...],
    includes: tuple[str, ...],
    library_folders: tuple[str, ...],
    libraries: tuple[str, ...],
    key: str,
) -> tuple[ctypes.CDLL | None, str]:
    try:
        path = build(source, flags, includes=includes, library_folders=library_folders, libraries=libraries, key=key)
        return ctypes.CDLL(str(path)), ""
    except NativeBuildFailed as error:
        return None, str(error)
    except OSError as error:
        return None, f"the library built from {source} cannot be loaded: {error}"


def included(path: Path) -> list[Path]:
    """``path`` and the files beside it that it includes with quotes, themselves or through others.

    Raises:
        NativeBuildFailed: one cannot be read.
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        try:
            text = current.read_bytes()
        except OSError as error:
            raise NativeBuildFailed(f"{current} cannot be read: {error.strerror}", "install monetrun again") from error
        found.add(current)
        names = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
        waiting += [p for name in names if (p := current.parent / name.decode()).is_file()]
    return sorted(found)


def identity(cxx: str) -> str:
    """A compiler's path, size and date: it changes when the compiler does."""
    # not its version: that would take a process of its own at every start
    file = os.path.realpath(cxx)
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime_ns}"


@functools.cache
def processor() -> str:
    """The processor's kind, by what it can do: machines may share a home folder."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


def math_variables() -> dict[str, str]:
    """Those of the environment by which a CPU's math libraries choose their kernels."""
    names = (n for n in os.environ if n == "ATEN_CPU_CAPABILITY" or n.startswith(("ONEDNN_", "DNNL_", "MKL_")))
    return {name: os.environ[name] for name in sorted(names)}


def _make_private(folder: Path) -> None:
    """Make the folder, so that only this user writes into it; of one that is there, take others' permission to write.

    Raises:
        NativeBuildFailed: it is another user's, or others keep their permission.
        OSError: it cannot be made or changed.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise NativeBuildFailed(
            f"{folder} belongs to user {status.st_uid}, this is user {os.geteuid()}: libraries in it are not loaded",
            "set XDG_CACHE_HOME to a folder of yours",
        )
    if status.st_mode & _OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
        if folder.stat().st_mode & _OTHERS_WRITE:
            raise NativeBuildFailed(
                f"others can write into {folder}: libraries in it are not loaded",
                "set XDG_CACHE_HOME to a folder on a file system that has permissions",
            )


def _is_private(file: Path) -> bool:
    """Whether a file is there that this user wrote and nobody else can write."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS_WRITE


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # without a lock several processes may make the file: each puts a whole one in place
            if error.errno not in NO_LOCKS_HERE:
                raise
        yield


def _make(kept: Path, make: Callable[[Path], None]) -> None:
    handle, name = tempfile.mkstemp(dir=kept.parent, prefix=".build-", suffix=kept.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        make(temporary)
        temporary.chmod(0o755)
        temporary.replace(kept)
    finally:
        temporary.unlink(missing_ok=True)


def compile_by(command: list[str]) -> None:
    """Run a compiler.

    Raises:
        NativeBuildFailed: with the last lines of its output; or it took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildFailed(f"{command[0]} took over {_BUILD_TIMEOUT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise NativeBuildFailed(f"compiling failed:\n{tail}", f"try: {shlex.join(command)}")
