"""What is asked of a planner beside graph, costs and budget, and the grammar of ``--implementations``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from monetrun.core.errors import UsageError
from monetrun.core.graph import EXACT, KINDS


@dataclass(frozen=True, slots=True)
class Options:
    """What every solver takes beside graph, costs and budget.

    Attributes:
        seconds: time limit.
        gap: stop when (cost - bound) / bound is at most this.
        recompute: False for the paper's ablation "implementations only".
        implementations: None for all, or the kinds of those allowed beside ``"default"`` (``()``: MONeT-NoOp;
            ``"exact"`` among them: of these, or alone of all, the ones with the default's bits).
        mip_solver: ``"scip"`` or ``"highs"``.
        seed: for the randomized ones; the same inputs give the same schedule.
        on_progress: called with (seconds since the beginning, seconds of the best schedule or infinity, bound in
            seconds) whenever one of the two improves; no part of what is asked for, so not compared.
    """

    seconds: float = 10.0
    gap: float = 0.01
    recompute: bool = True
    implementations: tuple[str, ...] | None = None
    mip_solver: str = "scip"
    seed: int = 0
    on_progress: Callable[[float, float, float], None] | None = field(default=None, compare=False, repr=False)


def parse_kinds(text: str) -> tuple[str, ...] | None:
    """What ``--implementations`` says: ``all`` (None), ``none`` (``()``), or kinds and ``exact`` with commas between.

    Raises:
        UsageError: a word is neither one of ``graph.KINDS`` nor ``graph.EXACT``.
    """
    if text == "all":
        return None
    words = tuple(word for word in text.split(",") if word and text != "none")
    unknown = [word for word in words if word not in (*KINDS, EXACT)]
    if unknown or (text != "none" and not words):
        raise UsageError(
            f"--implementations {text}: {', '.join(unknown) or 'nothing'} is not one of {', '.join((*KINDS, EXACT))}",
            "say all, none, or some of them with commas between",
        )
    return words
