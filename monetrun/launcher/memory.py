"""What ``--budget`` comes to in bytes, on this machine's devices or on the one that a cost model describes."""

from __future__ import annotations

from dataclasses import replace

from monetrun.core.budget import (
    AUTO,
    BYTES,
    CPU_RESERVE_BYTES,
    CUDA_RESERVE_BYTES,
    SHARE_OF_FREE,
    SHARE_OF_PLAIN,
    Budget,
    format_bytes,
    resolve,
)
from monetrun.core.errors import DeviceQueryFailed, InfeasibleBudget, UsageError
from monetrun.core.plain import PlainPeaks
from monetrun.core.step import StepRecord
from monetrun.launcher.ranks import Ranks
from monetrun.machine.device import query, smallest

# A budget that depends on the free memory is rounded down to a multiple of this, so that the next launch finds the
# same plan in the cache.
_GRAIN_BYTES = 32 << 20

# Beside what a trial of a few steps in one process takes of a GPU: kernels that are loaded later, and what NCCL takes
# for several ranks, which a trial does not have (it grows with the communicators).
_LATER_BYTES = 192 << 20
_COMMUNICATION_BYTES = 768 << 20


class NothingLeft(UsageError):
    """Of a device's free memory nothing is left for tensors: ``auto`` and percentages are no budget there."""

    exit_code = InfeasibleBudget.exit_code  # and not that of a wrong option: it may change


def modelled_bytes(cost_model: str) -> int:
    """Memory of the device that a cost model describes; 0 for ``"measured"``.

    Raises:
        UsageError: there is no such cost model.
    """
    if cost_model == "measured":
        return 0
    from monetrun.capture import roofline  # here, since it imports torch

    model = roofline.parse(cost_model)
    return 0 if model is None else model.memory_bytes


def where_recorded(ranks: Ranks, record: StepRecord | None) -> Ranks:
    """``ranks`` on the device of the recorded step: a script may train on the CPU of a machine with GPUs."""
    return replace(ranks, kind="cpu") if record is not None and record.device == "cpu" else ranks


def budget_bytes(budget: Budget, ranks: Ranks, modelled_bytes: int, plain: PlainPeaks | None = None) -> int | None:
    """A budget in bytes per device, before the step is known; None if it is a share of the plain peak.

    Args:
        budget: parsed.
        ranks: whose devices' free memory counts.
        modelled_bytes: free memory of a modelled device, which replaces that of ``ranks``; 0 for none.
        plain: of the plain run on CUDA, where known: which device it uses, and what it takes beside the allocator.

    Raises:
        DeviceQueryFailed: the free memory could not be read.
        NothingLeft: of it.
    """
    if budget.kind == BYTES:
        return int(budget.value)
    if budget.kind not in (AUTO, SHARE_OF_FREE):
        return None
    free = modelled_bytes or _free_bytes(ranks, plain)
    try:
        nbytes = resolve(budget, free, None, _reserve_bytes(ranks, plain))
    except UsageError as error:
        raise NothingLeft(error.message, error.hint) from error
    return max(1, nbytes // _GRAIN_BYTES * _GRAIN_BYTES)


def _free_bytes(ranks: Ranks, plain: PlainPeaks | None) -> int:
    """Of the rank with the least; of the device that a script of one rank has chosen."""
    if plain is not None and ranks.local == 1:
        return query(ranks.kind, plain.device + 1)[plain.device].free_bytes
    return smallest(query(ranks.kind, ranks.local)).free_bytes


def _reserve_bytes(ranks: Ranks, plain: PlainPeaks | None) -> int:
    """What a rank takes of its device beside the allocator: as measured, with room for what comes later."""
    if ranks.kind == "cpu":
        return CPU_RESERVE_BYTES
    if plain is None or not plain.outside_bytes:
        return CUDA_RESERVE_BYTES
    return plain.outside_bytes + (_LATER_BYTES if ranks.world_size == 1 else _COMMUNICATION_BYTES)


def given_bytes(budget: Budget) -> int:
    """The budget if it was given in bytes, else 0."""
    return int(budget.value) if budget.kind == BYTES else 0


def more_than_there_is(budget: Budget, ranks: Ranks) -> str:
    """A warning where a budget is more than the plain run takes, or in bytes than a rank's device has; else nothing."""
    if budget.kind == SHARE_OF_PLAIN and budget.value > 1:
        more = f"the budget {budget.text} is more than the plain run takes"
        return f"{more}: it bounds nothing in a step like the recorded one"
    try:
        info = smallest(query(ranks.kind, ranks.local)) if budget.kind == BYTES else None
    except DeviceQueryFailed:
        return ""
    if info is None or budget.value <= info.total_bytes:
        return ""
    has = f"the {format_bytes(info.total_bytes)} that a rank has on {info.device}"
    return f"the budget {budget.text} is more than {has}: it bounds nothing"
