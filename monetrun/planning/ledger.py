"""What a step's peak consists of, by name."""

from __future__ import annotations

from collections.abc import Mapping

from monetrun.core.budget import format_bytes
from monetrun.core.step import BUCKETS, StepRecord, StepTimeline

_WEIGHTS = ("parameters", "gradients", "optimizer state", BUCKETS)  # what a plan cannot change
GATHERED = "parameters and gradients in FSDP2's collectives"
OWN, FRAGMENTATION = "activations and workspace", "fragmentation"


def ledger(record: StepRecord, timeline: StepTimeline) -> dict[str, int]:
    """What the peak of a step of ``record`` consists of, by name, adding up to it; the last row is the graphs' own."""
    rows = {name: nbytes for name, nbytes in record.ledger.items() if nbytes > 0}
    rest = max(0, timeline.peak_bytes - sum(rows.values()))
    if gathered := min(rest, _gathered_bytes(record, timeline.peak_event)):
        rows[GATHERED] = gathered
    return {**rows, OWN: rest - gathered}


def _gathered_bytes(record: StepRecord, peak_event: int) -> int:
    """What FSDP2's collectives have allocated and not freed by then: gathered parameters, gradients to be reduced."""
    actions = [event for event in record.events[: peak_event + 1] if event.action is not None]
    held = sum(event.delta_bytes for event in actions)
    if actions and actions[-1] is record.events[peak_event]:
        held += actions[-1].peak_bytes - actions[-1].delta_bytes
    return max(0, held)


def ledger_line(rows: Mapping[str, int]) -> str:
    """The rows in one line, always in the same order: a file's are in another one than a new record's."""
    between = sorted(rows.keys() - {*_WEIGHTS, OWN, FRAGMENTATION})
    names = [name for name in (*_WEIGHTS, *between, OWN, FRAGMENTATION) if name in rows]
    return " + ".join(f"{name} {format_bytes(rows[name])}" for name in names)
