"""What each rank planned and measured, and which of them is slow: at the end of a launch of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from monetrun.core.budget import format_bytes

# A rank is called slow whose planned calls take so many times as long as the fastest rank's. The others wait for it.
_SLOW = 1.1
_FEWEST_STEPS = 20  # of fewer, the times of a few calls differ as much on a busy machine


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Of one rank.

    Attributes:
        rank: its number.
        planned_bytes: what its plan takes of the budget: allocated, on CUDA reserved; a rank may have planned again.
        measured_bytes: the same, the most in any training step; None if that was not counted.
        call_seconds: a timed call of a planned graph, the mean; None if none was timed.
        measured_overhead: see ``Outcome``.
    """

    rank: int
    planned_bytes: int
    measured_bytes: int | None
    call_seconds: float | None
    measured_overhead: float | None


def of_report(report: Mapping[str, Any]) -> RankFigures:
    """The figures in what a worker reports."""
    reserved = report.get("measured_reserved_bytes")
    measured = reserved or (report.get("measured_peak_bytes") if report.get("exact") else None)
    allocated, bounded = report.get("most_planned") or (0, 0)
    return RankFigures(
        rank=int(report.get("rank", 0)),
        planned_bytes=int(bounded or allocated),
        measured_bytes=int(measured) if measured else None,
        call_seconds=report.get("call_seconds"),
        measured_overhead=report.get("measured_overhead"),
    )


def slowest(ranks: Sequence[RankFigures]) -> tuple[int, float] | None:
    """The slowest rank and how many times as long as the fastest one it takes; None where that is not known."""
    timed = [(r.call_seconds, r.rank) for r in ranks if r.call_seconds]
    if len(timed) < 2:
        return None
    (least, _), (most, rank) = min(timed), max(timed)
    return rank, most / least


def lines(ranks: Sequence[RankFigures], steps: int) -> list[str]:
    """For the screen, where there are several ranks, which have trained for so many ``steps``."""
    if len(ranks) < 2:
        return []
    counted = [(r.measured_bytes, r.rank) for r in ranks if r.measured_bytes is not None]
    found = []
    if counted:
        (least, where), (most, rank) = min(counted), max(counted)
        found.append(
            f"measured {format_bytes(most)} on each"
            if least == most
            else f"measured {format_bytes(least)} (rank {where}) to {format_bytes(most)} (rank {rank})"
        )
    if steps >= _FEWEST_STEPS and (slow := slowest(ranks)) is not None and slow[1] >= _SLOW:
        found.append(f"rank {slow[0]} is slow: its calls take {slow[1]:.2f} times as long as the fastest rank's")
    return [f"  {'ranks':<15}{len(ranks)}: {'; '.join(found)}"] if found else []
