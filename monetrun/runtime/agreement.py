"""All ranks run one plan, rank 0's, within the smallest of their budgets.

A launch's nodes agree before their workers start (``launcher.nodes``). Here ranks agree that plan as they train, over
the store of their process group.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from monetrun.core import codec
from monetrun.core.errors import MonetrunError, PlanMismatch, own_faults
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.runtime import exchange
from monetrun.runtime.exchange import Refusal

# How much later than another rank one may come to plan. Ranks that train one model have just made a step together; one
# that does not come trains nothing, or something else.
_PATIENCE_SECONDS = 60.0

# No longer than this part of what the group's store waits for, as its collectives do: another rank may stand in one.
_OF_TIMEOUT = 0.25

# Where a rank has waited in vain, ranks that still train together come to plan as near to each other as this.
_AFTER_THAT_SECONDS = 1.0
_IN_VAIN = "monetrun/waited in vain"

_QUIET_SECONDS = 10.0

# Rank 0 is alive, and measures or plans: as long as a process group waits.
_PLANNING_SECONDS = 1800.0

_numbers = itertools.count()  # of agreements: all ranks come to the same ones in the same order


def largest(value: int, record: StepRecord | None = None) -> int:
    """The largest ``value`` of all ranks, in all of them; 0 where one waits in vain for another's.

    ``record``: of this rank's step, see ``_wait_until``.
    """
    if not several_ranks():
        return value
    distributed = torch.distributed
    store, rank = exchange.store_of_ranks(), distributed.get_rank()
    prefix = f"monetrun/largest/{next(_numbers)}"
    exchange.post(store, f"{prefix}/{rank}", str(value))
    keys = [f"{prefix}/{k}" for k in range(distributed.get_world_size())]
    agreed, found = f"{prefix}/agreed", 0
    if store.add(f"{prefix}/came", 1) == len(keys):  # the last one reads for all: of thousands, not each one thousands
        store.delete_key(_IN_VAIN)
        found = max(int(exchange.read(store, key)) for key in keys)
    else:
        _wait_until(store, lambda: exchange.is_posted(store, agreed), record)
    return exchange.first_said(store, agreed, found)  # one that comes late does as those that waited


def plan_in_rank_0(
    make: Callable[[Sequence[str]], Plan],
    budget: str = "",
    record: StepRecord | None = None,
    present: Plan | None = None,
) -> Plan:
    """Call ``make`` in rank 0, with the budgets of all ranks, and give its plan in all of them.

    Ranks may run different schedules: they give the same gradients in the same order. What sharded modules keep is the
    same in all of them.

    Args:
        make: gives the plan; rank 0's is called, and that of a rank which waits in vain for rank 0.
        budget: this rank's.
        record: of this rank's step; where rank 0's plan is not of its graphs (inputs of other shapes), ``make`` is
            called here, too.
        present: what runs, and goes on where rank 0 does not come: it is not waited for as long as for a first plan.

    Raises:
        MonetrunError: in all ranks, what ``make`` raised in rank 0.
    """
    make = own_faults()(make)
    if not several_ranks():
        return make([budget])
    distributed = torch.distributed
    store, rank, size = (
        exchange.store_of_ranks(),
        distributed.get_rank(),
        distributed.get_world_size(),
    )
    prefix = f"monetrun/plan/{next(_numbers)}"
    exchange.post(store, f"{prefix}/budget/{rank}", budget)
    keys = [f"{prefix}/budget/{k}" for k in range(size)]
    if rank:
        # what sharded modules keep is rank 0's choice, which trains with all others
        only_rank_0s = record is not None and record.sharding is not None and present is None
        if not _wait_until(store, lambda: exchange.is_posted(store, keys[0]), record, only_rank_0s):
            return make([budget]) if present is None else present
        plan = _rank_0s(store, prefix, size)
        if record is None or _is_of(record, plan):
            return plan
        return replace(make([budget]), keeps_parameters=plan.keeps_parameters)
    if _wait_until(store, lambda: exchange.are_posted(store, keys), record):
        store.delete_key(_IN_VAIN)
    try:
        plan = make([exchange.read(store, key) for key in keys if exchange.is_posted(store, key)])
    except MonetrunError as error:
        exchange.post(store, f"{prefix}/made", json.dumps({"refusal": codec.to_plain(Refusal.of(error))}))
        exchange.leave_together(store, f"{prefix}/left", size)
        raise
    exchange.post(store, f"{prefix}/made", json.dumps({"plan": codec.to_plain(plan)}))
    return plan


def _wait_until(
    store: Any, others_have_come: Callable[[], bool], record: StepRecord | None, surely: bool = False
) -> bool:
    """Wait for other ranks, and say so; gives whether they have come.

    Args:
        store: of the ranks.
        others_have_come: the condition.
        record: of this rank's step: without DistributedDataParallel and FSDP2 others may train something else.
        surely: they come, though it may take long.
    """
    if surely:
        seconds = _PLANNING_SECONDS
    else:
        alone = record is not None and not record.reductions and record.sharding is None
        patience = min(_QUIET_SECONDS, _PATIENCE_SECONDS) if alone else _PATIENCE_SECONDS
        patience = _AFTER_THAT_SECONDS if store.check([_IN_VAIN]) else patience
        seconds = min(patience, _OF_TIMEOUT * store.timeout.total_seconds())
    if exchange.wait_until(others_have_come, min(_QUIET_SECONDS, seconds)):
        return True
    if seconds > _QUIET_SECONDS:
        if (rank := torch.distributed.get_rank()) < 2:  # all others wait for rank 0 as rank 1 does
            line = f"monetrun (rank {rank}): waiting for the other ranks to plan, {seconds:.0f} s at most"
            print(line, file=sys.stderr, flush=True)
        if exchange.wait_until(others_have_come, seconds - _QUIET_SECONDS):
            return True
    store.set(_IN_VAIN, "")
    return False


def _rank_0s(store: torch.distributed.Store, prefix: str, size: int) -> Plan:
    try:
        found = exchange.wait_until(lambda: exchange.is_posted(store, f"{prefix}/made"), _PLANNING_SECONDS)
        made = json.loads(exchange.read(store, f"{prefix}/made")) if found else {}
    except RuntimeError as error:
        raise PlanMismatch("rank 0 ended before it had a plan", "its own message says why") from error
    if "refusal" in made:
        exchange.leave_together(store, f"{prefix}/left", size)
        raise codec.from_plain(Refusal, made["refusal"]).error()
    if "plan" not in made:
        raise PlanMismatch("rank 0 found no plan in time", "--solver-seconds sets how long it may plan")
    plan: Plan = codec.from_plain(Plan, made["plan"])
    return plan


def _is_of(record: StepRecord, plan: Plan) -> bool:
    """Whether ``plan`` has a schedule for each graph of ``record``."""
    return {graph.fingerprint for graph in record.graphs} <= {graph.fingerprint for graph in plan.graphs}


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def place() -> tuple[int, int]:
    """Rank of the process, and how many train together."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if several_ranks() else (0, 1)
