"""The launcher's own process during a launch: its environment and signal handlers are restored afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import NoReturn


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


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise ``SystemExit`` on SIGTERM, so that what was begun is cleaned up, as it is on Ctrl-C."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
