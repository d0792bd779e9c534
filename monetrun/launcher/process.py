"""The launcher's own process during a launch: its environment, signal handlers and temporary files."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from monetrun.core.errors import StorageFailed

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NOT_HANDLED = (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP)  # Python does the first, none can do the others
_FEW_BYTES = 64 << 10
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


class Stopped(int):
    """The exit code of a launch that a signal to the launcher has ended, 128 and the signal's number."""


@contextlib.contextmanager
def restored_environment(added: Mapping[str, str] | None = None) -> Iterator[None]:
    """Add ``added`` to this process's environment, which workers inherit; restore the environment at the end."""
    before = dict(os.environ)
    os.environ.update(added or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def restored_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that torch replaces while the workers run."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def exit_of(number: int) -> SystemExit:
    """With the exit code of the signal with this number."""
    return SystemExit(128 + number)


def _told_exit_of(number: int) -> SystemExit:
    with contextlib.suppress(OSError):  # there is no reader; what writes now may be what is interrupted
        os.write(2, f"monetrun: stopped by {signal.Signals(number).name}\n".encode())
    return exit_of(number)


@contextlib.contextmanager
def exit_on_signals(error: Callable[[int], BaseException] = _told_exit_of, *, named: str = "") -> Iterator[None]:
    """Raise an error on signals that end a process, so that what was begun is cleaned up, as it is on Ctrl-C.

    A signal that is ignored stays so (``nohup``). After the first one, no further one interrupts the cleaning up.

    Args:
        error: gives it, from the signal's number.
        named: further signals, as in ``--signals-to-handle``. Names that cannot be handled are left to torch's warning.
    """

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise error(number)

    found = {number: signal.getsignal(number) for number in {*_ENDING_SIGNALS, *_numbers(named)}}
    before = {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextlib.contextmanager
def outlived_by_none_of(group: int) -> Iterator[None]:
    """Have the processes of a group killed where this process ends within the context, be it by SIGKILL.

    A shell does it that waits for the end of a pipe whose other end only this process has. Where there is none, as in a
    container without a system, they are left.
    """
    try:
        guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _ || kill -s KILL -- "-$0"', str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        yield
        return
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _numbers(names: str) -> Iterator[signal.Signals]:
    """The signals of these names that can be handled here."""
    for name in names.split(","):
        number = getattr(signal, name.strip(), None)
        if isinstance(number, signal.Signals) and number not in _NOT_HANDLED:
            yield number


@contextlib.contextmanager
def full_disks_explained() -> Iterator[None]:
    """Raise ``StorageFailed`` where a file cannot be written for want of space."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise _not_written(error) from error


def temporary_folder(prefix: str) -> Path:
    """A new folder for temporary files, which the caller removes.

    Raises:
        StorageFailed: there is no place for it.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError as error:
        raise _not_written(error) from error


def check_space(folder: Path) -> None:
    """Check that a process whose output goes to files in ``folder`` was able to write its last words there.

    Raises:
        StorageFailed: the disk is full.
    """
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < _FEW_BYTES:
        raise _not_written(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)))


def _not_written(error: OSError) -> StorageFailed:
    where = f"{error.filename}: " if error.filename else ""
    return StorageFailed(
        f"a temporary file cannot be written: {where}{error.strerror}",
        "make room there, or set TMPDIR to a folder on another disk",
    )
