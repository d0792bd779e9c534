"""Dispatches on the first word of a ``monetrun`` command line, and prints errors.

A command's name runs that command; anything else is a launch, with torchrun's grammar. Errors are raised everywhere
else and printed here, once, with the exit code that they carry.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import click

from monetrun import __version__
from monetrun.commands import SUMMARIES
from monetrun.core.errors import REPORT_IT, MonetrunError, StorageFailed, UsageError
from monetrun.core.imports import without_collection
from monetrun.core.log_lines import print_warnings
from monetrun.launcher.parser import help_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (``sys.argv[1:]`` by default) and return the exit code; print errors."""
    words = list(sys.argv[1:] if argv is None else argv)
    print_warnings()
    with _Outcome() as outcome:
        outcome.exit_code = _dispatch(words)
        print(end="", flush=True)  # here it is known whether stdout has a reader yet
    return outcome.exit_code


def console() -> None:
    """The ``monetrun`` command, as a process of its own."""
    if sys.stderr is not None:
        sys.stderr = _Messages(sys.stderr)  # type: ignore[assignment]
    if sys.stdout is not None:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # what it cannot encode, as on stderr
        sys.stdout = _Results(sys.stdout)  # type: ignore[assignment]
    exit_code = main()
    gc.freeze()  # at its end Python looks for garbage several times: half a second for all that torch's import made
    sys.exit(exit_code)


class _Stream:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Results(_Stream):
    """A stream for results: where the disk is full, the command ends with that as its reason."""

    @property
    def buffer(self) -> _Results:
        """For bytes."""
        return _Results(self._stream.buffer)

    def write(self, content: Any) -> int:
        """As of the stream.

        Raises:
            StorageFailed: it cannot be written.
            BrokenPipeError: its reader has gone.
        """
        with _told_as_storage():
            return int(self._stream.write(content))

    def flush(self) -> None:
        """As ``write``."""
        with _told_as_storage():
            self._stream.flush()


@contextlib.contextmanager
def _told_as_storage() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        from monetrun.launcher.report import leave_stdout  # imported here, so that help is fast

        leave_stdout()
        hint = "make room on its disk, or send it elsewhere"
        raise StorageFailed(f"stdout cannot be written: {error.strerror}", hint) from error


class _Messages(_Stream):
    """A stream for messages whose reader may go away, or whose disk may be full: what is being done goes on without."""

    def write(self, text: str) -> int:
        """As of the stream."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of the stream."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(help_text(SUMMARIES), end="")
        return 0
    if first == "--version":
        print(f"monetrun {__version__}")
        return 0
    if first in SUMMARIES:
        return _run(first, words[1:])
    return _run("run", words)


def _run(command: str, words: list[str]) -> int:
    # Imported here, so that each command line imports only what its command needs.
    with without_collection():
        module = importlib.import_module(f"monetrun.commands.{command}")
    exit_code: int = module.run(words)
    return exit_code


class _Outcome:
    """Turns an error into a message and an exit code."""

    exit_code = 0

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, (SystemExit, type(None))):
            return False
        if isinstance(error, MonetrunError):
            self.exit_code = error.exit_code
            print(f"monetrun: error: {error}", file=sys.stderr)
        elif isinstance(error, click.ClickException):
            self.exit_code = UsageError.exit_code
            context = error.ctx if isinstance(error, click.UsageError) else None
            hint = f"\n  {context.command_path} --help" if context else ""
            print(f"monetrun: error: {error.format_message()}{hint}", file=sys.stderr)
        elif isinstance(error, (KeyboardInterrupt, click.Abort)):
            self.exit_code = 128 + signal.SIGINT
            print("monetrun: stopped by SIGINT", file=sys.stderr)
        elif isinstance(error, BrokenPipeError):
            from monetrun.launcher.report import leave_stdout  # imported here, so that help is fast

            leave_stdout()
            self.exit_code = 128 + signal.SIGPIPE
        else:
            self.exit_code = MonetrunError.exit_code
            traceback.print_exception(kind, error, trace)
            print(f"monetrun: error: this is a fault of monetrun itself: {REPORT_IT}", file=sys.stderr)
        return True
