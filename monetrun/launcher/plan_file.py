"""A plan as a file: ``monetrun plan`` writes it, ``monetrun --plan`` and ``monetrun explain`` read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from monetrun.core import codec
from monetrun.core.errors import PlanMismatch, UsageError
from monetrun.core.plan import Plan, parse_plan

_MOST_BYTES = 256 << 20  # the plan of a network of 1,823 operators has 0.2 MiB


def read_plan(path: str) -> Plan:
    """Read a plan.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanMismatch: it is not a plan that this version reads.
    """
    try:
        with open(path, "rb") as file:  # a FIFO too, as the shell's <(...) gives
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has over {_MOST_BYTES >> 20} MiB")
        return parse_plan(content.decode())
    except OSError as error:
        raise UsageError(f"the plan {path}: {error.strerror}", "monetrun plan SCRIPT writes one") from error
    except ValueError as error:
        why = "it is not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else error
        message = f"{path} is not a plan that this monetrun reads: {why}"
        raise PlanMismatch(message, "monetrun plan SCRIPT writes one") from error


def write_plan(plan: Plan, path: str) -> None:
    """Write a plan to ``path`` in one step: the file is either the new one or as before.

    Raises:
        UsageError: it cannot be written.
    """
    part = Path(f"{path}.{os.getpid()}")
    try:
        part.write_text(codec.dumps(plan) + "\n")
        part.replace(path)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}", "name a file in a folder that can be written") from error
