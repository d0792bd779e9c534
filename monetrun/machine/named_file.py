"""Files that a user names: tried before the work that makes them, and written whole; ``-`` is stdout."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from monetrun.core.errors import UsageError

STDOUT = "-"
_WRITABLE_HINT = "name a file in a folder that can be written"


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[IO[bytes]]:
    """A stream whose content is the file's once the context has ended; if it raises, a file that is there stays.

    A device, a pipe or a link (``/dev/stdout``) is not replaced, but written in place.

    Raises:
        OSError: the file cannot be written.
    """
    file = Path(path)
    if path == STDOUT:
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif _is_other(file):
        with file.open("wb") as stream:
            yield stream
    else:
        part = file.with_name(f".{file.name}.{secrets.token_hex(8)}")  # of other machines' processes, too
        try:
            with part.open("xb") as stream:
                yield stream
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)


def replace_file(file: Path, text: str) -> None:
    """Write a file whole; see ``writing``.

    Raises:
        OSError: it cannot be written.
    """
    with writing(file) as stream:
        stream.write(text.encode())


def check_file(option: str, path: Path | str) -> None:
    """Check that the file that an option names can be written, before planning, which takes minutes.

    Raises:
        UsageError: it cannot.
    """
    if path == STDOUT:
        return
    folder, name = os.path.split(path)
    if os.path.isdir(path):
        raise UsageError(f"{option} {path}: it is a folder", _WRITABLE_HINT)
    if not name or not os.path.isdir(folder or "."):
        raise UsageError(f"{option} {path or repr('')}: there is no such folder", _WRITABLE_HINT)
    if _is_other(path):
        return
    try:
        with tempfile.TemporaryFile(dir=folder or "."):
            pass
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", _WRITABLE_HINT) from error


@contextlib.contextmanager
def writing_option(option: str, path: Path | str) -> Iterator[IO[bytes]]:
    """As ``writing``, for the file that an option names.

    Raises:
        UsageError: it cannot be written.
    """
    check_file(option, path)
    try:
        with writing(path) as stream:
            yield stream
    except OSError as error:
        if path == STDOUT:
            raise  # as where anything else cannot be printed
        raise UsageError(f"{option} {path}: {error.strerror}", _WRITABLE_HINT) from error


def write_file(option: str, path: str, text: str) -> None:
    """Write a file that an option names.

    Raises:
        UsageError: it cannot be written.
    """
    with writing_option(option, path) as stream:
        stream.write(text.encode())


def _is_other(path: Path | str) -> bool:
    """Whether it is there and no file, but a device, a pipe or a link, which is not to be replaced."""
    return os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path))
