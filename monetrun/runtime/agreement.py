"""All ranks run one plan: rank 0's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monetrun.core import codec
from monetrun.core.errors import MonetrunError, PlanMismatch
from monetrun.core.plan import Plan


def check_same_plan(plan: Plan, device: torch.device) -> None:
    """Compare this rank's plan with rank 0's, over ``device``, this rank's; nothing to do in a process of its own.

    Raises:
        PlanMismatch: they differ.
    """
    if not several_ranks():
        return
    digests = [plan.digest]
    _broadcast(digests, device)
    if digests[0] != plan.digest:
        raise PlanMismatch(
            f"rank {torch.distributed.get_rank()} has plan {plan.digest}, rank 0 has {digests[0]}",
            "give all nodes the same --plan, or clear their caches (monetrun cache clear)",
        )


def plan_in_rank_0(make: Callable[[], Plan], device: torch.device) -> Plan:
    """Call ``make`` in rank 0, and give its plan in all ranks; ``device``: this rank's, which NCCL needs.

    Raises:
        MonetrunError: in rank 0, what ``make`` raised.
        PlanMismatch: in the others, rank 0 has no plan.
    """
    if not several_ranks():
        return make()
    plans: list[Any] = [None]
    error: MonetrunError | None = None
    if torch.distributed.get_rank() == 0:
        try:
            plans = [codec.dumps(make())]
        except MonetrunError as failure:
            error = failure
    _broadcast(plans, device)
    if error is not None:
        raise error
    if plans[0] is None:
        raise PlanMismatch("rank 0 found no plan", "its own message says why")
    return codec.loads(Plan, plans[0])


def _broadcast(objects: list[Any], device: torch.device) -> None:
    """Replace ``objects`` by rank 0's. NCCL sends over a CUDA device, and has to know which: not always the current."""
    over = device if "gloo" not in torch.distributed.get_backend() else None
    torch.distributed.broadcast_object_list(objects, src=0, device=over)


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
