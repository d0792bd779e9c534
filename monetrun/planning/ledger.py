"""What a step's peak consists of, by name."""

from __future__ import annotations

from collections.abc import Mapping

from monetrun.core.budget import format_bytes
from monetrun.core.step import StepRecord

WEIGHTS = ("parameters", "gradients", "optimizer state")  # what a plan cannot change
OWN, FRAGMENTATION = "activations and workspace", "fragmentation"


def ledger(record: StepRecord, peak_bytes: int) -> dict[str, int]:
    """What the peak consists of, by name, adding up to it; the last row is the graphs' own."""
    rows = {name: nbytes for name, nbytes in record.ledger.items() if nbytes > 0}
    rest = peak_bytes - sum(rows.values())
    return {**rows, OWN: max(0, rest)}


def ledger_line(rows: Mapping[str, int]) -> str:
    """The rows in one line, always in the same order: a file's are in another one than a new record's."""
    between = sorted(rows.keys() - {*WEIGHTS, OWN, FRAGMENTATION})
    names = [name for name in (*WEIGHTS, *between, OWN, FRAGMENTATION) if name in rows]
    return " + ".join(f"{name} {format_bytes(rows[name])}" for name in names)
