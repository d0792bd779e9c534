"""The options of solvers and planner, and the grammar of ``--implementations``."""

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
        implementations: None for all, or the kinds allowed beside ``"default"`` (``()``: MONeT-NoOp). ``"exact"`` among
            them leaves out implementations that are not bitwise identical to the default; alone it means all that are.
        mip_solver: ``"scip"`` or ``"highs"``.
        seed: for randomized solvers; the same inputs give the same schedule.
        on_progress: called with (seconds since the beginning, seconds of the best schedule or infinity, bound in
            seconds) whenever the schedule or the bound improves. Not compared: it does not change the result.
        on_search: called with what the planner looks for, where it begins to look for something else with the same
            options; ``on_progress`` then begins anew. Not compared.
    """

    seconds: float = 10.0
    gap: float = 0.01
    recompute: bool = True
    implementations: tuple[str, ...] | None = None
    mip_solver: str = "scip"
    seed: int = 0
    on_progress: Callable[[float, float, float], None] | None = field(default=None, compare=False, repr=False)
    on_search: Callable[[str], None] = field(default=lambda name: None, compare=False, repr=False)


def parse_kinds(text: str, name: str = "--implementations ") -> tuple[str, ...] | None:
    """Read ``--implementations``: ``all`` (None), ``none`` (``()``), or kinds and ``exact``, separated by commas.

    Args:
        text: the value.
        name: what stands before it, for messages.

    Raises:
        UsageError: a word is neither one of ``graph.KINDS`` nor ``graph.EXACT``.
    """
    if text == "all":
        return None
    words = tuple(word for word in text.split(",") if word and text != "none")
    unknown = [word for word in words if word not in (*KINDS, EXACT)]
    if unknown or (text != "none" and not words):
        raise UsageError(
            f"{name}{text}: {', '.join(unknown) or 'nothing'} is not one of {', '.join((*KINDS, EXACT))}",
            "give all, none, or some of them separated by commas",
        )
    return words


def only_exact(kinds: tuple[str, ...] | None) -> bool:
    """Whether ``parse_kinds``' result allows nothing but what is bitwise identical to eager."""
    return kinds is not None and (EXACT in kinds or not kinds)
