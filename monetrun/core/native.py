"""Builds the C++ and CUDA sources of ``cuda_ops/`` at first use, caches the libraries per user, and loads them.

A library's name has the hash of its sources, flags and compiler, so a change of any of them builds it anew. Processes
that start together build it once: under a file lock, and the finished file is moved into place.
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
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import monetrun
from monetrun.core.errors import MonetrunError

DEFAULT_FLAGS = ("-std=c++17", "-O3", "-march=native", "-Wall")
_BUILD_TIMEOUT_SECONDS = 600.0


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
    """Where built libraries are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``monetrun/native``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "monetrun" / "native"


def compiler() -> str:
    """The C++ compiler: ``$CXX``, else the first of g++, c++ and clang++ on the path.

    Raises:
        NativeBuildFailed: there is none.
    """
    if named := os.environ.get("CXX"):
        if found := shutil.which(named):
            return found
        raise NativeBuildFailed(f"CXX is {named!r}, which is not an executable", "unset CXX or name a C++ compiler")
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return found
    raise NativeBuildFailed("there is no C++ compiler (g++, c++ or clang++)", "install g++, or set CXX")


def cuda_compiler() -> str:
    """The CUDA compiler: that of ``$CUDA_HOME``, else nvcc on the path.

    Raises:
        NativeBuildFailed: there is none.
    """
    home = os.environ.get("CUDA_HOME")
    if found := shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc"):
        return found
    raise NativeBuildFailed(
        f"there is no nvcc {f'in CUDA_HOME, {home}' if home else 'on the path'}", "install the CUDA toolkit"
    )


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
        source: file name, .cpp or .cu (for nvcc); files of the same folder that it includes with quotes are hashed too.
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
    cuda = path.suffix == ".cu"
    cxx = cuda_compiler() if cuda else compiler()
    shared = ("-Xcompiler=-fPIC", "-shared") if cuda else ("-fPIC", "-shared")
    arguments = [*flags, *shared, *(f"-I{folder}" for folder in includes)]
    links = [f"-L{folder}" for folder in library_folders]
    links += [f"{'-Xlinker=' if cuda else '-Wl,'}-rpath,{folder}" for folder in library_folders]
    links += [f"-l{name}" for name in libraries]
    digest = hashlib.sha256()
    texts = (_identity(cxx), *arguments, *links, key)
    for part in (*_sources(path), *(text.encode() for text in texts)):
        digest.update(part)
        digest.update(b"\0")
    if "-march=native" in flags:
        digest.update(_processor().encode())
    name = f"{path.stem}-{digest.hexdigest()[:24]}.so"
    folder = cache_folder()
    library = folder / name
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{path.stem}.lock"):
            if not library.exists():
                _compile([cxx, *arguments, str(path), *links], library)
    except OSError as error:
        raise NativeBuildFailed(
            f"{folder} cannot be written: {error.strerror or error}", "set XDG_CACHE_HOME to a writable folder"
        ) from error
    return library


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


def _sources(path: Path) -> list[bytes]:
    """The text of ``path`` and of the files beside it that it includes, each once."""
    texts: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current in texts:
            continue
        try:
            text = current.read_bytes()
        except OSError as error:
            raise NativeBuildFailed(f"{current} cannot be read: {error.strerror}", "install monetrun again") from error
        texts[current] = text
        names = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE)
        waiting += [p for name in names if (p := current.parent / name.decode()).is_file()]
    return [texts[p] for p in sorted(texts)]


def _identity(cxx: str) -> str:
    # not its version: that would take a process of its own at every start
    file = os.path.realpath(cxx)
    status = os.stat(file)
    return f"{file} {status.st_size} {status.st_mtime_ns}"


@functools.cache
def _processor() -> str:
    """The processor, on which ``-march=native`` depends: machines may share a home folder."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    return platform.machine() + platform.processor()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], library: Path) -> None:
    handle, temporary = tempfile.mkstemp(dir=library.parent, prefix=".build-", suffix=".so")
    os.close(handle)
    command = [*command, "-o", temporary]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_SECONDS, check=False)
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-12:])
            raise NativeBuildFailed(f"building {library.stem} failed:\n{tail}", f"try: {shlex.join(command)}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, library)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildFailed(f"building {library.stem} took over {_BUILD_TIMEOUT_SECONDS:.0f} s") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
