"""The trial run: the script runs up to its first optimizer step, in a process of its own that records the step.

What the trial cannot see or do decides nothing: the launch goes on, and plans in its workers at the first step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import psutil
from rich.console import Console

from monetrun.core import codec
from monetrun.core.errors import CaptureFailed, MonetrunError, NeverTrained, ScriptFailed, UsageError
from monetrun.core.plain import PlainPeaks
from monetrun.core.step import StepRecord
from monetrun.launcher import stdin, trial_end
from monetrun.launcher.allocator import allocator_variables
from monetrun.launcher.libraries import build_ahead
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.process import check_space, outlived_by_none_of
from monetrun.launcher.progress import status
from monetrun.launcher.ranks import Ranks
from monetrun.launcher.report import warn
from monetrun.launcher.trial_environment import trial_environment
from monetrun.runtime import trial_files
from monetrun.runtime.probe import BEGUN, NO_OPTIMIZER, UNCOMPARED, UNSEEN
from monetrun.runtime.settings import TRIAL, Settings, check_hook, why_no_hook

# How often the launcher looks whether the trial has left its record.
_LOOK_SECONDS = 0.1

# A trial that calls no model in training ends so long after it has begun, unless a plan is needed; and where its
# processes have worked for less than this share of a core for so long, and have read and written next to nothing: they
# wait, as a server does, or poll, as a ``TCPStore`` does for its clients (a quarter of a MiB a minute).
_MOST_SECONDS, _WAITING_SECONDS, _WAITING_SHARE, _WAITING_BYTES = 1800.0, 60.0, 0.03, 1 << 20


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial run found.

    Attributes:
        record: the recorded step; None if there is none.
        as_is: why no model of the script can be planned; empty: one can, or that is not known.
    """

    record: StepRecord | None
    as_is: str = ""


PLAIN_FILE = "plain.json"  # in the launch's folder, once the plain run was measured

_HOW_TO_START = "PYTHON_EXEC names the interpreter; with --no-python the script needs a line such as #!/bin/sh"


def run_trial(
    options: LaunchOptions, ranks: Ranks, settings: Settings, folder: Path, console: Console, *, needed: bool = True
) -> Trial:
    """Run the script up to its first optimizer step, as rank 0.

    Args:
        options: of the launch.
        ranks: the workers that the launch will start.
        settings: for the trial's process, which writes its record to ``settings.record_file``.
        folder: for the process's stderr and error file.
        console: where progress is shown.
        needed: False: where the trial finds no step, print a line, and let the workers plan at their first step.

    Returns:
        The recorded step. It is None where no model could be planned (the run itself warns why), and after a trial
        that found no step if that was not ``needed``.

    Raises:
        NeverTrained: the script ended without a training step, or the trial could not see it; also where it failed,
            in a launch with ``--strict``.
        CaptureFailed: no model of it can be planned, and a plan is ``needed`` or ``--strict`` was given.
        ScriptFailed: the script failed; its stderr has been printed.
        MonetrunError: monetrun ended the trial run with this error.
    """
    error_file, stderr_file = folder / "probe_error.json", folder / "probe_stderr.txt"
    environment = trial_environment(options, ranks, settings, error_file) | allocator_variables(ranks.kind, settings)
    build_ahead(ranks.kind)
    unseen: Mapping[str, object] = {} if needed else _unseen(str(folder / PLAIN_FILE))
    code = 0
    if not unseen.get("too_long"):  # else this trial would end as that of the plain step has
        with status(console, "trial run up to the first optimizer step", shown=not options.quiet):
            most_seconds = math.inf if needed else _MOST_SECONDS  # without a plan there is nothing to go on with
            code = run_process(options, environment, stderr_file, settings.record_file, most_seconds)
        unseen = _unseen(settings.record_file)
    if (text := _read(settings.record_file) or _read(settings.record_file + UNCOMPARED)) is not None:
        record = codec.loads(StepRecord, text)
        return Trial(record if record.graphs else None)
    if unseen.get("as_is"):
        if needed or options.strict:
            raise CaptureFailed(str(unseen["reason"]), "without --strict a launch runs it as it is, outside the plan")
        return Trial(None, str(unseen["reason"]))
    own_error = read_own_error(error_file)
    if own_error is not None and (needed or options.strict):
        raise own_error
    if unseen:
        why = f"the trial run cannot see {options.script} train: {unseen['reason']}"
    elif code == 0:
        why = f"{options.script} ended without a training step in its trial run"
    else:
        why = f"{options.script} failed in its trial run: {how_it_failed(code, error_file)}"
    if needed and code != 0 and not unseen:
        sys.stderr.write(stderr_file.read_text(errors="replace"))
        raise ScriptFailed(why, exit_code=code)
    if needed or options.strict:
        raise NeverTrained(why, "monetrun --no-probe plans it while it trains; torchrun runs it without a plan")
    if not options.quiet:
        then = "planning at the first step instead"
        if unseen.get("reason") == NO_OPTIMIZER:
            then = "nothing is planned before one makes a step"
        print(f"monetrun: {why}; {then}", file=sys.stderr, flush=True)
    return Trial(None)


def measure_plain_run(
    options: LaunchOptions, ranks: Ranks, settings: Settings, folder: Path, console: Console
) -> PlainPeaks | None:
    """Run a few steps of the script as it is, as rank 0, and measure what they take of a CUDA device.

    Args:
        options: of the launch.
        ranks: the workers that the launch will start.
        settings: for the trial's process, which writes the peaks to ``settings.record_file``.
        folder: for the process's stderr and error file.
        console: where progress is shown.

    Returns:
        The peaks; None where the script ran out of memory, failed, or trained nothing on the device, and where torch
        does not count what it takes.
    """
    environment = trial_environment(options, ranks, settings, folder / "plain_error.json")
    with status(console, "trial run of the plain step", shown=not options.quiet):
        run_process(options, environment, folder / "plain_stderr.txt", settings.record_file, _MOST_SECONDS)
    text = _read(settings.record_file)
    found = None if text is None else codec.loads(PlainPeaks, text)
    return found if found is not None and found.reserved_bytes else None


def hook_is_missing(options: LaunchOptions) -> bool:
    """Whether workers do not load monetrun's hook, so that nothing is planned; warns of it.

    Raises:
        UsageError: so it is, with ``--strict``.
    """
    if options.strict:
        check_hook()
    why, mend = why_no_hook()
    if why:
        warn(f"nothing is planned: {why}; {mend}")
    return bool(why)


def end_outer_trial() -> None:
    """In a trial run of another launch, end that trial: it sees nothing of a launch that the script starts."""
    if TRIAL in os.environ and (record_file := Settings.from_environment(os.environ).record_file):
        from monetrun.runtime import probe

        probe.leave_unseen("it launches monetrun itself", record_file)


def run_process(
    options: LaunchOptions,
    environment: Mapping[str, str],
    stderr_file: Path,
    record_file: str,
    most_seconds: float = math.inf,
) -> int:
    """Run the script in a process of its own; gives its exit code.

    Once the record is there, or the reason why there is none, all processes that the script has started are ended. They
    are found by their process group, which has this process's terminal no more: it also ends with this process. Those
    in sessions of their own are found by their environment.

    Raises:
        UsageError: the system cannot start the interpreter, or the program.
        StorageFailed: it failed without a word, where the disk is full.
    """
    command = _command(options)
    found = (Path(record_file), Path(record_file + UNSEEN))
    trial_files.begin(record_file)
    with stderr_file.open("wb") as stderr, stdin.lent() as standard_input:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=standard_input,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{command[0]} cannot be started: {error.strerror}", _HOW_TO_START) from error
        try:
            with outlived_by_none_of(process.pid):
                code = _wait(process, found, Path(record_file + BEGUN), most_seconds)
        finally:
            trial_end.end(process, record_file)
            trial_files.remove(record_file)
    if code and not stderr_file.stat().st_size:
        check_space(stderr_file.parent)
    return code


def _wait(process: subprocess.Popen[bytes], found: Sequence[Path], begun: Path, most_seconds: float) -> int:
    """Wait until the process ends, or one of the files is there: then 0.

    Where it does not begin to train (``begun`` is not there), the reason is written to the last of ``found``.
    """
    began = looked = time.monotonic()
    worked, moved = 0.0, 0
    while not any(file.exists() for file in found):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECONDS)
        now, reason, waits = time.monotonic(), "", False
        if now - looked >= _WAITING_SECONDS:
            before, (worked, nbytes) = worked, _work(process.pid)
            moved, more = nbytes, nbytes - moved
            # less than none: a process has ended unseen
            if 0 <= worked - before < _WAITING_SHARE * (now - looked) and 0 <= more < _WAITING_BYTES:
                reason, waits = f"it waits, for {now - looked:.0f} s now", True
            looked = now
        if now - began > most_seconds:
            reason = f"it has called no model in training for {now - began:.0f} s"
        if reason and (waits or not begun.exists()):
            found[-1].write_text(json.dumps({"reason": reason, "too_long": True}))
    return 0


def _work(pid: int) -> tuple[float, int]:
    """Processor time of a process and its children, and the bytes that they have read and written."""
    seconds, nbytes = 0.0, 0
    with contextlib.suppress(psutil.Error):
        first = psutil.Process(pid)
        for one in (first, *first.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                seconds += sum(one.cpu_times()[:4])  # user, system, and those of children that have ended
            with contextlib.suppress(psutil.Error, OSError, AttributeError, RuntimeError, ValueError):  # not told here
                counted = one.io_counters()
                nbytes += counted.read_chars + counted.write_chars
    return seconds, nbytes


def _command(options: LaunchOptions) -> list[str]:
    command = [] if options.torchrun.no_python else [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    command += ["-m"] if options.is_module else []
    # as torchrun does, which gives each worker its local rank
    words = [Template(word).safe_substitute(local_rank="0") for word in options.script_args]
    return [*command, options.script, *words]


def how_it_failed(code: int, error_file: Path) -> str:
    """How a process failed: the signal that killed it, its exception, or its exit code."""
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            memory = ", which the kernel sends when memory runs out" if name == "SIGKILL" else ""
            return f"killed by {name}{memory}"
        return f"killed by signal {-code}"
    message = _read_message(error_file)
    if message is not None:
        return str(message["message"]).partition("\n")[0]
    return f"exit code {code}"


def _unseen(record_file: str) -> Mapping[str, object]:
    """Why a trial run has no record, as ``leave_unseen`` or ``_wait`` have left it (``too_long``: it took too long)."""
    found: Mapping[str, object] = json.loads(_read(record_file + UNSEEN) or "{}")
    return found


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return None


def _read_message(error_file: Path) -> Mapping[str, object] | None:
    """What an uncaught exception has left in the error file."""
    try:
        message = json.loads(error_file.read_text())["message"]
    except (OSError, ValueError, KeyError):
        return None
    return message if isinstance(message, Mapping) else None


def read_own_error(error_file: Path) -> MonetrunError | None:
    """The monetrun error that ended the trial run, if one did."""
    message = _read_message(error_file)
    if message is None or "errorCode" not in message:
        return None
    error = MonetrunError(str(message["message"]).partition(": ")[2])
    error.exit_code = int(str(message["errorCode"]))
    return error
