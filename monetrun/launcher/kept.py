"""What the cache has for a launch, judged before use: what cannot be right is a miss, and one warning."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from monetrun.core.budget import Budget
from monetrun.core.errors import UsageError
from monetrun.core.graph import Graph
from monetrun.core.plan import Plan, Schedule, StepSchedules
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.keys import measured_key
from monetrun.launcher.options import LaunchOptions
from monetrun.machine.store import Store, default_root
from monetrun.planning.explain import describes
from monetrun.planning.intervals import MeasuredStep
from monetrun.planning.kept import check_plan, check_schedules, check_torch


def find_store(options: LaunchOptions) -> Store | None:
    """The launch's cache, if it has one: None, after a warning, where there is no folder for it.

    A script that comes from standard input has none: nobody knows whether the next one is the same.
    """
    if not options.use_cache or options.script == "-":
        return None
    try:
        return Store(default_root(), script=Path(options.script).name)
    except UsageError as homeless:
        report.warn(f"nothing is cached: {homeless.message}. {homeless.hint}")
        return None


def kept_record(store: Store | None, key: str) -> StepRecord | None:
    """The record under ``key``, if it was made with this torch."""
    if store is None:
        return None
    return store.get("probe", key, StepRecord, lambda record: check_torch(record.torch_version, torch.__version__))


def record_of(plan: Plan, store: Store | None, key: str) -> StepRecord | None:
    """``kept_record``, if the plan, which was given, was made from it."""
    record = kept_record(store, key)
    return record if record is not None and describes(record, plan) else None


def kept_plan(
    store: Store | None, key: str, record: StepRecord, budget: Budget, budget_bytes: int | None
) -> Plan | None:
    """The plan under ``key``, if ``check_plan`` finds nothing wrong with it."""
    if store is None:
        return None
    check = partial(check_plan, record=record, budget=budget, budget_bytes=budget_bytes)
    return store.get("plan", key, Plan, check)


def kept_schedules(store: Store | None, key: str, graphs: Sequence[Graph]) -> tuple[Schedule, ...] | None:
    """The schedules of ``graphs`` under ``key``, if these graphs can run them."""
    if store is None:
        return None
    found = store.get("plan", key, StepSchedules, partial(check_schedules, graphs=graphs))
    return None if found is None else found.schedules_for(graphs)


def keep_measured_step(store: Store, plans: Sequence[Plan | None], step: MeasuredStep | None) -> None:
    """Keep ``step``, if there is one, for the plan that the workers got and the one that they had made of it."""
    for plan in plans:
        if plan is not None and step is not None:
            store.put("measured", measured_key(plan), step)
