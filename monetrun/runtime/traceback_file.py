"""Writes a worker's uncaught exception to a file that the launcher reads.

torchrun's agent gives every worker a path in ``TORCHELASTIC_ERROR_FILE``, and reads that file once the worker has
failed. Torch writes it only for scripts whose main function is decorated with ``@record``. The hook here writes the
same file for any script; Python then prints the traceback as always.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from monetrun.core.errors import BudgetExceeded, MonetrunError, is_out_of_memory

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_GENERATED = "<eval_with_key>"  # the file of code that fx generates
_MARK = "__monetrun_traceback_file__"


def install_excepthook(out_of_memory: Callable[[BaseException], None] | None = None) -> None:
    """Wrap ``sys.excepthook`` so that an uncaught exception is also written to the worker's error file.

    Does nothing outside a worker (``TORCHELASTIC_ERROR_FILE`` unset or empty) and nothing the second time.
    ``SystemExit`` never reaches an excepthook, so that exit codes are unchanged. ``KeyboardInterrupt`` is not written:
    it stops a worker from outside, and is no failure.

    Args:
        out_of_memory: called after an uncaught ``torch.OutOfMemoryError`` or ``BudgetExceeded``; tells who held what.
    """
    previous = sys.excepthook
    if not os.environ.get(ERROR_FILE) or hasattr(previous, _MARK):
        return

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        trace = of_the_script(trace)
        value.__traceback__ = trace
        refusal = None if issubclass(kind, KeyboardInterrupt) else _shared(value)
        if not issubclass(kind, KeyboardInterrupt):
            write(refusal or value, trace)
        if refusal is not None or _is_refusal(value):
            print(f"monetrun: error: {refusal or value}", file=sys.stderr, flush=True)
        else:
            previous(kind, value, trace)
        if out_of_memory is not None and (is_out_of_memory(value) or isinstance(value, BudgetExceeded)):
            out_of_memory(value)

    setattr(hook, _MARK, True)
    sys.excepthook = hook


def of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` as it is under torchrun: without the frames through which monetrun calls modules that run in Python.

    It is left whole where it ends in monetrun or in Dynamo, or goes through a graph's generated code.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    if not frames or _between(files[-1]) or any(file.startswith(_GENERATED) for file in files):
        return frames[0] if frames else None
    found = None
    for frame, file in zip(reversed(frames), reversed(files), strict=True):
        if not _between(file):
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _between(file: str) -> bool:
    """Whether code of this file stands between the script and its own module."""
    return file.startswith(_PACKAGE) or f"{os.sep}torch{os.sep}_dynamo{os.sep}" in file


def write(value: BaseException, trace: TracebackType | None) -> None:
    """Write ``value`` to the error file, in the format of torch's ``ErrorHandler.record_exception``.

    Two keys are added, which torch ignores: ``timestamp_ns``, since whole seconds do not order the failures of two
    ranks, and ``errorCode``, the exit code of monetrun's own errors. If the file cannot be written nothing happens:
    the traceback is on stderr anyway.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    now_ns = time.time_ns()
    message: dict[str, object] = {
        "message": f"{type(value).__name__}: {value}",
        "extraInfo": {
            "py_callstack": f"monetrun: error: {value}"
            if _is_refusal(value)
            else "".join(traceback.format_exception(type(value), value, trace)),
            "timestamp": str(now_ns // 10**9),
            "timestamp_ns": str(now_ns),
        },
    }
    if isinstance(value, MonetrunError):
        message["errorCode"] = value.exit_code
    elif is_out_of_memory(value):
        message["errorCode"] = BudgetExceeded.exit_code
    # atomically: a worker may be killed while it writes, and the agent fails on half a file
    part = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(part) or ".", exist_ok=True)  # the system clears temporary folders after some days
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(part)


def _shared(value: BaseException) -> MonetrunError | None:
    """The refusal of another rank that made this one fail, if there is one; this rank's own goes to the others."""
    from monetrun.runtime import exchange

    if _is_refusal(value) or is_out_of_memory(value):
        error = value if isinstance(value, MonetrunError) else BudgetExceeded(f"out of memory: {value}")
        exchange.post_failure(exchange.Refusal.of(error, os.environ.get("RANK", "")))
        return None
    if not isinstance(value, RuntimeError):  # as torch's collectives raise
        return None
    found = exchange.failure_elsewhere()
    return None if found is None else found.error()


def _is_refusal(value: BaseException) -> bool:
    """Whether monetrun itself ended the script, by one of its rules: the message says all."""
    return isinstance(value, MonetrunError) and value.exit_code != MonetrunError.exit_code
