"""What is told when memory runs out: who holds what, planned against actual, and torch's snapshot on CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from monetrun.capture.allocator_history import other_allocator
from monetrun.core.budget import format_bytes
from monetrun.core.errors import BudgetExceeded
from monetrun.core.plan import Plan
from monetrun.runtime import holdings
from monetrun.runtime.running_plan import RunningPlan
from monetrun.runtime.settings import KEEPS_LOGS
from monetrun.runtime.traceback_file import ERROR_FILE

# What the two allocators say that they were asked for; on a CPU monetrun's own words (cuda_ops/cpu_allocator.cpp).
_WANTED_ON_CPU = re.compile(r"wanted .*?\((\d+) bytes\), free .*?\((\d+) bytes\)")
_WANTED_ON_CUDA = re.compile(r"Tried to allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def findings(error: BaseException, running: RunningPlan) -> dict[str, Any]:
    """What the launcher is told: ``needed_bytes``, at least (0: unknown), and what is ``held`` by kind."""
    needed = error.smallest_bytes if isinstance(error, BudgetExceeded) else needed_bytes(str(error), running.plan)
    return {"needed_bytes": needed, "held": holdings.holdings(running.device, running.steps.meter.current_bytes())}


def needed_bytes(message: str, plan: Plan) -> int:
    """The least budget with which the allocation would not have failed; 0 where the message does not tell."""
    if found := _WANTED_ON_CPU.search(message):
        return plan.budget_bytes + int(found[1]) - int(found[2])
    if found := _WANTED_ON_CUDA.search(message):
        return plan.budget_bytes + int(float(found[1]) * _UNITS[found[2]])
    return 0


def lines(running: RunningPlan) -> list[str]:
    """What the process holds by kind, beside what the plan has at its peak."""
    plan, meter = running.plan, running.steps.meter
    held = meter.current_bytes()
    now = holdings.holdings(running.device, held)
    of_budget = f"the budget is {format_bytes(plan.budget_bytes)}"
    if plan.pool is not None:
        of_budget = f"it reserves {format_bytes(plan.pool.planned_bytes)}, {of_budget} reserved"
    return [
        f"out of memory: {format_bytes(held)} are held; the planned step allocates"
        f" {format_bytes(plan.planned_peak_bytes)} at its peak, {of_budget}",
        holdings.table(now, plan.ledger, plan.planned_peak_bytes),
    ]


def dump_snapshot(device: torch.device) -> str:
    """Write torch's memory snapshot to the log folder; gives its path, empty where the launch keeps no such folder.

    It has what lies in the allocator's segments, and who asked for it where the script records that.
    """
    if device.type != "cuda" or KEEPS_LOGS not in os.environ or other_allocator(device):
        return ""
    path = Path(os.environ[ERROR_FILE]).parent / "memory_snapshot.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError:  # no space is left
        return ""
    return str(path)


def told(
    error: BaseException, running: RunningPlan, device: torch.device, note: Callable[[str], None]
) -> dict[str, Any]:
    """``findings``; ``note`` is told who holds what, unless the error says it, and where torch's snapshot is."""
    found = findings(error, running)
    for line in () if isinstance(error, BudgetExceeded) else lines(running):
        note(line)
    if path := dump_snapshot(device):
        note(f"torch's memory snapshot is in {path}")
    return found
