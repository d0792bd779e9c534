"""Records of steps in which other sharded modules (FSDP2) keep their parameters between forward and backward.

A module that keeps them is not freed after its forward, and not gathered before its backward: what was recorded of both
is left out. Nothing else that FSDP2 does depends on it (``FSDPParamGroup.unshard`` returns at once where the parameters
are there), so that the bytes of any choice follow from one recorded step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from monetrun.core.event import Event
from monetrun.core.link import Link
from monetrun.core.sharding import Sharding
from monetrun.core.step import DeviceMemory, StepRecord


def keeping(record: StepRecord, kept: Iterable[int]) -> StepRecord:
    """The record of the step in which the modules ``kept`` (indices in ``Sharding.modules``) keep their parameters."""
    sharding = record.sharding
    chosen = tuple(sorted({*kept}))
    if sharding is None or chosen == sharding.kept:
        return record
    return _renewed(record, replace(sharding, kept=chosen))


def as_scripted(record: StepRecord) -> StepRecord:
    """The record of the step in which every module does as the script says."""
    return record if record.sharding is None else keeping(record, record.sharding.scripted)


def as_planned(record: StepRecord, keeps: Mapping[str, bool]) -> StepRecord:
    """The record of the step with the choice of a plan, by the modules' names; others do as the script says."""
    sharding = record.sharding
    if sharding is None:
        return record
    modules = sharding.modules
    return keeping(record, (i for i in sharding.choices if keeps.get(modules[i].name, modules[i].kept)))


def choice_of(record: StepRecord) -> dict[str, bool]:
    """The present choice by the modules' names, as a plan has it."""
    sharding = record.sharding
    return {} if sharding is None else {sharding.modules[i].name: i in sharding.kept for i in sharding.choices}


def with_events(record: StepRecord, change: Callable[[Sequence[Event]], Iterable[Event]]) -> StepRecord:
    """The record with its events changed, under its present choice and under every other one."""
    if record.sharding is None:
        return replace(record, events=tuple(change(record.events)))
    return _renewed(record, replace(record.sharding, events=tuple(change(record.sharding.events))))


def with_memory(record: StepRecord, memory: DeviceMemory) -> StepRecord:
    """The record with what was recorded of the device; ``memory.between`` follows the events as they were recorded."""
    record = replace(record, memory=memory)
    return record if record.sharding is None else _renewed(record, replace(record.sharding, between=memory.between))


def _renewed(record: StepRecord, sharding: Sharding) -> StepRecord:
    """The record with the events of the present choice."""
    between, memory = sharding.between, record.memory
    events = _without_actions((*sharding.events, *([between] if between else ())), {*sharding.kept})
    if between is not None and memory is not None:
        memory = replace(memory, between=events[-1])
    return replace(record, events=events[: len(sharding.events)], memory=memory, sharding=sharding)


def over_link(record: StepRecord, link: Link) -> StepRecord:
    """The record with the seconds that its sharded modules' collectives take over ``link``."""
    if record.sharding is None:
        return record
    modules = (
        replace(
            m,
            gather_seconds=link.all_gather_seconds(m.nbytes, m.ranks),
            reduce_seconds=link.all_gather_seconds(m.reduced_bytes, m.ranks) if m.reduced_bytes else 0.0,
        )
        for m in record.sharding.modules
    )
    return replace(record, sharding=replace(record.sharding, modules=tuple(modules)))


def _without_actions(events: Sequence[Event], kept: set[int]) -> tuple[Event, ...]:
    """The events without what modules in ``kept`` do unless they keep their parameters; as many as before."""
    left_out = [e.action is not None and e.action.unless_kept and e.action.module in kept for e in events]
    if not any(left_out):
        return tuple(events)
    requests = _renumbered(events, left_out)
    return tuple(
        replace(
            e, delta_bytes=0, peak_bytes=0, elsewhere_bytes=0, requests=(), dropped_after=(), freed=None, action=None
        )
        if out
        else replace(e, requests=own)
        for e, own, out in zip(events, requests, left_out, strict=True)
    )


def _renumbered(events: Sequence[Event], left_out: Sequence[bool]) -> list[tuple[int, ...]]:
    """Each event's requests (see ``Event.requests``) once those of the events that are ``left_out`` are not made.

    What a gather that is left out got and something later frees is then what the module has kept: the block of the
    same size of the same module that is not freed after its forward.
    """
    freed_there = {-n for e, out in zip(events, left_out, strict=True) for n in e.requests if out and n < 0}
    names: dict[int, int] = {}  # of what is still requested: its number now, by the one before
    sizes: dict[int, int] = {}
    kept: dict[int, list[int]] = {}  # what is not freed, by module: numbers now
    before = now = 0
    found = []
    for event, out in zip(events, left_out, strict=True):
        changed = []
        of_module = kept.setdefault(event.action.module, []) if out and event.action is not None else []
        for n in event.requests:
            if n > 0:
                before += 1
                if not out:
                    now += 1
                    names[before], sizes[now] = now, n
                    changed.append(n)
                elif before not in freed_there and (same := next((k for k in of_module if sizes[k] == n), 0)):
                    of_module.remove(same)
                    names[before] = same
            elif -n in names:
                name = names.pop(-n)
                if out:
                    of_module.append(name)
                else:
                    changed.append(-name)
        found.append(tuple(changed))
    return found
