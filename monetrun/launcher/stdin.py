"""Standard input for a trial run: it reads what the workers will read, and takes nothing from them.

Nor is anything taken that the trial does not read: the rest of a shell's ``while read`` loop, or of a script that is
piped into a shell, comes after the launch.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import shutil
import socket
import stat
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from typing import IO

_BLOCK_BYTES = 1 << 16
_STDIN = 0
_LOOK_SECONDS = 0.05  # how often it is looked whether a trial has begun to read
_NOT_BLOCKING = 2  # SPLICE_F_NONBLOCK of Linux


@contextlib.contextmanager
def lent() -> Iterator[int]:
    """A file descriptor from which a trial run reads this process's standard input.

    At the end standard input has again what was read, so that workers and further trial runs get all of it. A terminal
    is not lent, since its user would have to answer twice: a trial that reads it finds it empty.
    """
    try:
        kind = os.fstat(_STDIN).st_mode
    except OSError:  # closed
        kind = 0
    if stat.S_ISREG(kind):
        with _opened_again() as file:
            yield file
    elif (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)) and os.name == "posix":
        with _relayed() as file:
            yield file
    else:
        with open(os.devnull, "rb") as empty:
            yield empty.fileno()


@contextlib.contextmanager
def _opened_again() -> Iterator[int]:
    """The same file at the same place, with a position of its own where the system can give it one."""
    place = os.lseek(_STDIN, 0, os.SEEK_CUR)
    try:
        file = os.open(f"/proc/self/fd/{_STDIN}", os.O_RDONLY)
    except OSError:  # no such folder, or the file may not be opened any more
        file = os.dup(_STDIN)
    try:
        os.lseek(file, place, os.SEEK_SET)
        yield file
    finally:
        os.close(file)
        os.lseek(_STDIN, place, os.SEEK_SET)


@contextlib.contextmanager
def _relayed() -> Iterator[int]:
    """A pipe to which a thread copies what arrives; it keeps a copy, which then comes first on standard input."""
    out, into = os.pipe()
    wake, waker = os.pipe()
    kept = tempfile.TemporaryFile()  # noqa: SIM115 - it outlives this function
    relay = threading.Thread(target=_copy, args=(into, wake, kept), daemon=True)
    relay.start()
    try:
        yield out
    finally:
        os.close(out)  # a relay that waits until the trial reads more ends with this
        os.write(waker, b"x")
        relay.join()
        os.close(wake)
        os.close(waker)
        if kept.tell():
            _put_back(kept)
        else:
            kept.close()


def _copy(into: int, wake: int, kept: IO[bytes]) -> None:
    """Copy standard input to ``into`` and ``kept`` until it ends or ``wake`` can be read; from its first reader on."""
    os.set_blocking(into, False)
    waiting = b""
    try:
        if not _first_block_is_read(into, wake, kept):
            return
        while True:
            source, sink = ([], [into]) if waiting else ([_STDIN], [])
            readable, _, _ = select.select([wake, *source], sink, [])
            if wake in readable:
                return
            if not waiting:
                waiting = os.read(_STDIN, _BLOCK_BYTES)
                if not waiting:
                    return
                kept.write(waiting)
            with contextlib.suppress(BlockingIOError):
                waiting = waiting[os.write(into, waiting) :]
    except BrokenPipeError:  # the trial has ended
        return
    finally:
        os.close(into)


def _first_block_is_read(into: int, wake: int, kept: IO[bytes]) -> bool:
    """Show the first block in ``into``, and take it from standard input once somebody has read of it there.

    False where standard input ends, or ``wake`` can be read, before that.
    """
    readable, _, _ = select.select([wake, _STDIN], [], [])
    if wake in readable:
        return False
    try:
        shown = _show(into)
    except OSError:  # not allowed here
        return True
    while shown:
        if _unread(into) < shown:
            break
        if select.select([wake], [], [], _LOOK_SECONDS)[0]:
            return False
    while shown and _STDIN in select.select([wake, _STDIN], [], [])[0]:
        if not (block := os.read(_STDIN, shown)):  # somebody else has taken it
            break
        kept.write(block)
        shown -= len(block)
    return kept.tell() > 0


def _show(into: int) -> int:
    """Write what can be read of standard input into a pipe, and leave it there; gives its bytes.

    Raises:
        OSError: the system cannot.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "tee")
    if stat.S_ISSOCK(os.fstat(_STDIN).st_mode):
        with socket.socket(fileno=os.dup(_STDIN)) as connection:
            return os.write(into, block) if (block := connection.recv(_BLOCK_BYTES, socket.MSG_PEEK)) else 0
    found = int(ctypes.CDLL(None, use_errno=True).tee(_STDIN, into, ctypes.c_size_t(_BLOCK_BYTES), _NOT_BLOCKING))
    if found < 0:
        raise OSError(ctypes.get_errno(), "tee")
    return found


def _unread(pipe: int) -> int:
    """How many bytes nobody has read of a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


def _put_back(kept: IO[bytes]) -> None:
    """Make standard input give ``kept``, and then what it had left."""
    rest = os.dup(_STDIN)
    out, into = os.pipe()
    os.dup2(out, _STDIN)
    os.close(out)

    def feed() -> None:
        with kept, os.fdopen(rest, "rb", buffering=0) as source, os.fdopen(into, "wb", buffering=0) as sink:
            kept.seek(0)
            with contextlib.suppress(BrokenPipeError):
                shutil.copyfileobj(kept, sink)
                shutil.copyfileobj(source, sink)

    threading.Thread(target=feed, daemon=True).start()
