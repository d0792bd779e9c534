"""What recipes/compare.py has found: which points of a method are worth using, verdicts, and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

RECOMPUTATION, IMPLEMENTATIONS = "monetrun, recomputation only", "monetrun, implementations only"
EXACT, FULL = "monetrun, exact", "monetrun"


def bytes_of(row: Mapping[str, Any]) -> int:
    """What a step takes of the device: on CUDA what the allocator reserves, else what is allocated."""
    return int(row["allocated_bytes"] if row.get("reserved_bytes") is None else row["reserved_bytes"])


def cheapest(rows: Iterable[Mapping[str, Any]], method: str) -> list[Any]:
    """Of the method's points by rising peak, those that are faster than all before: one would use no other."""
    kept: list[Any] = []
    own = (r for r in rows if r["method"] == method and "allocated_bytes" in r)
    for row in sorted(own, key=lambda r: (bytes_of(r), r["ratio"])):
        if not kept or row["ratio"] < kept[-1]["ratio"]:
            kept.append(row)
    return kept
