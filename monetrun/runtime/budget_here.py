"""The budget in bytes of a process that plans for itself (``--no-probe``, ``apply``)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from monetrun.capture import device_peaks
from monetrun.capture.meter import Meter
from monetrun.core.budget import AUTO, CUDA_RESERVE_BYTES, SHARE_OF_FREE, is_auto, parse, resolve
from monetrun.core.errors import (
    BudgetExceeded,
    InfeasibleBudget,
    MonetrunError,
    NoPlanInTime,
    PlanningFault,
    UsageError,
)
from monetrun.core.step import StepRecord
from monetrun.machine.device import MemoryInfo, query
from monetrun.runtime.settings import RUN, Settings

_REFUSALS = {kind.exit_code for kind in (UsageError, InfeasibleBudget, NoPlanInTime, BudgetExceeded)}


def budget_here(settings: Settings, device: torch.device, meter: Meter) -> str:
    """The budget of this process, in ``--budget``'s grammar: in bytes, or as a share of the plain peak.

    What this process holds already counts as free.

    Args:
        settings: of the process.
        device: of the models.
        meter: of that device.

    Raises:
        DeviceQueryFailed: the free memory could not be read.
        UsageError: nothing is left on the device.
    """
    budget = parse(settings.budget)
    if settings.budget_bytes:
        return f"{settings.budget_bytes}B"
    if budget.kind not in (AUTO, SHARE_OF_FREE):
        return budget.text
    held = max(meter.current_bytes(), meter.peaks().reserved_now_bytes)
    free = _own_memory(settings, device).free_bytes + held
    return f"{resolve(budget, free, None, CUDA_RESERVE_BYTES if device.type == 'cuda' else 0)}B"


def _own_memory(settings: Settings, device: torch.device) -> MemoryInfo:
    """The memory of this process's device, or its part of it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # which share the machine's memory, or its devices
    if device.type != "cuda":
        return query("cpu", ranks)[0]
    index = device_peaks.index_of(device)
    shared = ranks > torch.cuda.device_count() and not _has_been_given_devices(settings)
    return query("cuda", ranks if shared else index + 1)[index]


def _has_been_given_devices(settings: Settings) -> bool:
    """Whether this process sees others than its launcher: by ``--virtual-local-rank``, or as the script has set it."""
    name, before = "CUDA_VISIBLE_DEVICES", settings.visible_devices
    if not settings.report_folder:  # not monetrun's launcher: what the process was started with
        with contextlib.suppress(OSError):
            entries = Path("/proc/self/environ").read_text(errors="surrogateescape").split("\0")
            start = dict(entry.partition("=")[::2] for entry in entries)
            # a process that has changed its title has overwritten them
            before = start.get(name, "") if "PATH" in start else os.environ.get(name, "")
    return os.environ.get(name, "") != before


@contextlib.contextmanager
def auto_is_no_limit(settings: Settings, alone_in: StepRecord | None = None) -> Iterator[None]:
    """A context in which planning is refused no budget that the user has not stated: torchrun would try.

    ``alone_in``: this rank plans alone, in a step like this. Where modules are sharded, it goes on as the others do.

    Raises:
        PlanningFault: in place of a refusal: models run as they are.
    """
    try:
        yield
    except MonetrunError as error:  # of this rank, or what another one has said
        stated = settings.plan_given or not settings.budget or not is_auto(parse(settings.budget))
        sharded = alone_in is not None and alone_in.sharding is not None
        if settings.mode != RUN or settings.strict or stated or sharded or error.exit_code not in _REFUSALS:
            raise
        fault = PlanningFault(f"what is free has no plan ({error.message.partition(chr(10))[0]})", "as under torchrun")
        fault.of_one_call = alone_in is not None
        raise fault from error
