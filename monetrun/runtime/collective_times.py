"""The seconds of collectives that gather and reduce sharded modules: seen in the first planned steps, then weighed.

A trial run has torch's fake process group, which passes nothing on. So the first plan does not know what an all-gather
costs. The ranks see it as they train; where modules that keep more or fewer of their parameters make the step faster,
they plan again, once. The launcher keeps the seconds for later launches.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from monetrun.core.budget import format_bytes
from monetrun.core.clocks import sharded_clocks
from monetrun.core.errors import MonetrunError
from monetrun.core.event import GATHER, REDUCE
from monetrun.core.keeping import as_planned, keeping
from monetrun.core.plan import Plan
from monetrun.core.sharding import CollectiveSeconds, seconds_known
from monetrun.core.step import StepRecord
from monetrun.core.step_changes import with_collectives
from monetrun.planning import kept_parameters, planner
from monetrun.runtime import agreement, collectives
from monetrun.runtime.moved_memory import options_within_a_step
from monetrun.runtime.settings import Settings

# Another plan has to make the step faster by this share: it is compiled anew.
_LEAST_GAIN = 0.02

# What a rank says that has not heard which plan rank 0 has chosen: all keep theirs.
_NOT_KNOWN = 2

_log = logging.getLogger("monetrun")


class CollectiveTimes:
    """Times the collectives on tensors of ``device`` until it is ended, if the seconds could change the choice.

    One takes as long as it takes the last rank to begin it, and then the transfer: the shortest of all is the nearest
    to the transfer alone. On CUDA nothing waits for it before the end.

    Args:
        device: of the models.
        record: of the planned step.

    Attributes:
        wanted: not ended yet.
    """

    def __init__(self, device: torch.device, record: StepRecord | None) -> None:
        self._device = device
        self._found: dict[tuple[str, int], list[Callable[[], float]]] = {}
        self._undo = contextlib.ExitStack()
        sharding = None if record is None or not agreement.several_ranks() else record.sharding
        self.wanted = sharding is not None and bool(sharding.choices) and not seconds_known(sharding)
        if self.wanted:
            collectives.patch(self._undo, self._timing)

    def close(self) -> None:
        """Time no more."""
        self.wanted = False
        self._undo.close()

    def end(self) -> CollectiveSeconds:
        """Time no more; gives the shortest of each kind and size of this rank."""
        self.close()
        return tuple((kind, n, min(s() for s in found)) for (kind, n), found in self._found.items())

    def _timing(self, run: Callable[..., Any], kind: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            tensor = whole(args, kwargs)
            if kwargs.get("async_op") or tensor is None or tensor.device.type != self._device.type:
                return run(*args, **kwargs)
            key = kind, tensor.nbytes
            del tensor
            ended = _clock(self._device)
            result = run(*args, **kwargs)
            self._found.setdefault(key, []).append(ended())
            return result

        return timed


def _clock(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts a clock; what is returned stops it, and gives what reads it."""
    if device.type != "cuda":
        start = time.perf_counter()

        def stop() -> Callable[[], float]:
            seconds = time.perf_counter() - start
            return lambda: seconds

        return stop
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()

    def stop_event() -> Callable[[], float]:
        ended.record()

        def read() -> float:
            ended.synchronize()
            return begun.elapsed_time(ended) / 1e3

        return read

    return stop_event


def weighed(record: StepRecord, plan: Plan, settings: Settings, found: CollectiveSeconds) -> tuple[StepRecord, Plan]:
    """Plan again, in rank 0 for all, where that makes the step faster with what the collectives take.

    All ranks come here after the same step.

    Args:
        record: of the planned step.
        plan: that runs.
        settings: of the process.
        found: in this rank.

    Returns:
        The record, in rank 0 with the seconds of all ranks, and the plan that runs from now on.
    """
    known = record

    def make(by_rank: Sequence[str]) -> Plan:
        nonlocal known
        if len(by_rank) < agreement.place()[1]:
            return plan
        each = [(kind, nbytes, seconds) for rank in by_rank for kind, nbytes, seconds in json.loads(rank)]
        known = with_collectives(record, each)
        return _faster(known, plan, settings)

    try:
        chosen = agreement.plan_in_rank_0(make, json.dumps(found), record, present=plan)
    except MonetrunError as failure:  # the same in all ranks, whose plan runs on
        _log.warning("the plan is not weighed against the collectives' times: %s", failure.message)
        agreement.largest(_NOT_KNOWN)
        return record, plan
    rank = agreement.place()[0]
    vote = int(chosen != plan) if rank == 0 else _NOT_KNOWN if chosen is plan else 0
    if agreement.largest(vote) != 1:
        return known, plan  # also where this rank's is another one than rank 0's: it planned again, alone
    return known, chosen if rank == 0 else with_own_schedules(record, plan, chosen, settings)


def with_own_schedules(record: StepRecord, plan: Plan, chosen: Plan, settings: Settings) -> Plan:
    """``chosen``; planned again where it is this rank's ``plan``, of graphs of its own, with other parameters kept."""
    kept = chosen.keeps_parameters
    if chosen != replace(plan, keeps_parameters=kept) or kept == plan.keeps_parameters:
        return chosen
    starts, options = [tuple(g.schedule for g in plan.graphs)], options_within_a_step(settings)
    try:
        own = as_planned(record, kept)
        return planner.plan_step(own, plan.budget_bytes, settings.algorithm, options, starts=starts)
    except MonetrunError:
        return chosen  # each forward finds out whether there is room for it


def known(record: StepRecord | None) -> CollectiveSeconds:
    """The seconds of the collectives in a record, for the launcher; empty where there are none."""
    sharding = None if record is None else record.sharding
    if sharding is None or not seconds_known(sharding):
        return ()
    seen = {(GATHER, m.nbytes): m.gather_seconds for m in sharding.modules}
    seen |= {(REDUCE, m.reduced_bytes): m.reduce_seconds for m in sharding.modules if m.reduced_bytes}
    return tuple((kind, nbytes, seconds) for (kind, nbytes), seconds in seen.items())


def _faster(record: StepRecord, present: Plan, settings: Settings) -> Plan:
    """A plan whose step is faster on its clocks by ``_LEAST_GAIN`` at least; the present one where none was found."""
    sharding = record.sharding
    if sharding is None or not seconds_known(sharding):
        return present
    schedules = [g.schedule for g in present.graphs]
    now = sharded_clocks(record, schedules).step_seconds
    if now <= (1 + _LEAST_GAIN) * sharded_clocks(keeping(record, sharding.choices), schedules).step_seconds:
        return present  # all-gathers take too little: it would gain nothing even if all parameters could be kept
    budget_bytes, options = present.budget_bytes, options_within_a_step(settings)
    try:
        plan = kept_parameters.plan_step(record, budget_bytes, settings.algorithm, options, starts=[schedules])
    except MonetrunError:
        return present
    then = sharded_clocks(as_planned(record, plan.keeps_parameters), [g.schedule for g in plan.graphs]).step_seconds
    return present if now <= (1 + _LEAST_GAIN) * then else plan


def line(record: StepRecord, plan: Plan) -> str:
    """What was seen in rank 0, and what follows from it."""
    kept, count = sum(plan.keeps_parameters.values()), len(plan.keeps_parameters)
    sharding = record.sharding
    assert sharding is not None
    largest = max(sharding.modules, key=lambda m: m.gather_seconds)
    return (
        f"an all-gather of {format_bytes(largest.nbytes)} takes {largest.gather_seconds * 1e3:.1f} ms: planned again,"
        f" {kept} of {count} sharded modules keep their parameters between forward and backward"
    )
