"""The trial run: the script runs up to its first optimizer step, in a process of its own that records the step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from monetrun.core import codec
from monetrun.core.errors import MonetrunError, NeverTrained, ScriptFailed
from monetrun.core.plain import PlainPeaks
from monetrun.core.step import StepRecord
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.progress import status
from monetrun.launcher.ranks import Ranks
from monetrun.runtime.settings import PREFIX, PROBED, Settings


def run_trial(
    options: LaunchOptions, ranks: Ranks, settings: Settings, folder: Path, console: Console
) -> StepRecord | None:
    """Run the script up to its first optimizer step, as rank 0.

    Args:
        options: of the launch.
        ranks: the workers that the launch will start.
        settings: for the trial's process, which writes its record to ``settings.record_file``.
        folder: for the process's stderr and error file.
        console: where progress is shown.

    Returns:
        The recorded step; None if no graph was captured, or if the trial of a launch of several ranks failed (rank 0
        then plans at its first step).

    Raises:
        NeverTrained: the script ended without a training step.
        ScriptFailed: the script failed; its stderr has been printed.
        MonetrunError: monetrun ended the trial run with this error.
    """
    error_file, stderr_file = folder / "probe_error.json", folder / "probe_stderr.txt"
    shown = not options.quiet
    with status(console, "trial run up to the first optimizer step", shown=shown):
        environment = {**_environment(ranks, settings, error_file), **allocator_variables(ranks.kind)}
        code = _run(options, environment, stderr_file)
    if code == PROBED:
        record = codec.loads(StepRecord, Path(settings.record_file).read_text())
        return record if record.graphs else None
    if code == 0:
        raise NeverTrained(
            f"{options.script} ended without a training step, so there is nothing to plan",
            "monetrun plans scripts that call backward() and an optimizer's step(); run others with torchrun",
        )
    if (error := _read_own_error(error_file)) is not None:
        raise error
    output = stderr_file.read_text(errors="replace")
    if ranks.world_size > 1:
        if shown:
            print(output.rstrip(), file=sys.stderr)
            warning = "monetrun: warning: the trial run failed; planning at the first step instead (--no-probe)"
            print(warning, file=sys.stderr, flush=True)
        return None
    sys.stderr.write(output)
    raise ScriptFailed(f"{options.script} failed in its trial run", exit_code=code)


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
        The peaks; None where the script ran out of memory, failed, or trained nothing on the device.
    """
    environment = _environment(ranks, settings, folder / "plain_error.json")
    with status(console, "trial run of the plain step", shown=not options.quiet):
        _run(options, environment, folder / "plain_stderr.txt")
    try:
        return codec.loads(PlainPeaks, Path(settings.record_file).read_text())
    except FileNotFoundError:
        return None


def _run(options: LaunchOptions, environment: Mapping[str, str], stderr_file: Path) -> int:
    """Run the script in a process of its own; gives its exit code."""
    with stderr_file.open("wb") as stderr:
        return subprocess.run(
            _command(options),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=False,
        ).returncode


def _command(options: LaunchOptions) -> list[str]:
    command = [] if options.torchrun.no_python else [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    command += ["-m"] if options.is_module else []
    return [*command, options.script, *options.script_args]


def _environment(ranks: Ranks, settings: Settings, error_file: Path) -> dict[str, str]:
    """What torchrun would give to rank 0, and monetrun's settings."""
    environment = {
        **os.environ,
        **settings.to_environment(),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "WORLD_SIZE": str(ranks.world_size),
        "LOCAL_WORLD_SIZE": str(ranks.local),
        "ROLE_WORLD_SIZE": str(ranks.world_size),
        "GROUP_WORLD_SIZE": str(ranks.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "monetrun-probe",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }
    if ranks.local > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


def allocator_variables(kind: str) -> dict[str, str]:
    """The variables that configure torch's allocator, unless the user has configured it.

    On CUDA they make its segments expandable, which keeps reserved memory close to allocated memory.
    """
    if kind != "cuda" or "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", PREFIX + "OWN_ALLOCATOR": "1"}


def _read_own_error(path: Path) -> MonetrunError | None:
    """The monetrun error that ended the trial run, if one did."""
    try:
        message = json.loads(path.read_text())["message"]
    except (OSError, ValueError, KeyError):
        return None
    if not isinstance(message, Mapping) or "errorCode" not in message:
        return None
    text = str(message["message"]).partition(": ")[2]
    error = MonetrunError(text)
    error.exit_code = int(message["errorCode"])
    return error
