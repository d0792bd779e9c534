"""What a launch does, decided once for all nodes: run a plan, or plan in the workers, or run the script as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from monetrun.core import codec
from monetrun.core.budget import Budget
from monetrun.core.plain import PlainPeaks
from monetrun.core.plan import Plan
from monetrun.core.sources import Sources
from monetrun.core.step import StepRecord
from monetrun.core.step_changes import with_more_held
from monetrun.launcher.allocator import allocator_variables
from monetrun.runtime.settings import PLAIN, RUN, Settings


@dataclass(frozen=True, slots=True)
class Decision:
    """What the workers do.

    Attributes:
        mode: ``"run"`` or ``"plain"``.
        budget: the smallest of all nodes.
        budget_bytes: in bytes; 0: each worker's budget is its own node's, until rank 0 plans with all of them.
        plan: None: rank 0 plans at its first step.
        record: the step that the plan is of, where known.
        plain: what the plain run takes of a CUDA device, where measured.
        plan_given: the user named the plan.
        as_is: why no model of the script can be planned; empty: one can, or that is not known.
        nodes: for how many this was decided.
        tightened: how often the plan was made tighter since memory had run out under it.
        more_held_bytes: beside what is in ``record`` so much is held by a tighter plan.
        sources: what the trial run has read that ``record`` is from, if there was one.
    """

    mode: str
    budget: Budget
    budget_bytes: int
    plan: Plan | None
    record: StepRecord | None
    plain: PlainPeaks | None
    plan_given: bool
    as_is: str = ""
    nodes: int = 1
    tightened: int = 0
    more_held_bytes: int = 0
    sources: Sources | None = None

    @property
    def held_record(self) -> StepRecord | None:
        """``record`` with ``more_held_bytes``: the step that the plan is of."""
        if self.record is None or not self.more_held_bytes:
            return self.record
        return with_more_held(self.record, self.more_held_bytes)

    def environment(self, settings: Settings, folder: Path, kind: str) -> dict[str, str]:
        """The variables of the workers of one node.

        Args:
            settings: what that node's options determine.
            folder: where its workers read plan and record.
            kind: of their device.
        """
        if self.mode == PLAIN:
            return replace(settings, mode=PLAIN, budget_bytes=self.budget_bytes).to_environment()
        found = replace(
            settings,
            mode=RUN,
            budget_bytes=self.budget_bytes or settings.budget_bytes,
            plan_given=self.plan_given,
            as_is=self.as_is,
            plan_file=_written(folder / "plan.json", self.plan),
            record_file=_written(folder / "record.json", self.held_record),
        )
        return {**found.to_environment(), **allocator_variables(kind, settings)}


def _written(path: Path, value: Plan | StepRecord | None) -> str:
    """Write ``value`` to ``path`` for the workers; gives the path, empty for None."""
    if value is None:
        return ""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # a system removes what was not used for days
    path.write_text(codec.dumps(value))
    return str(path)


def one_for_all(decisions: Sequence[Decision]) -> Decision | None:
    """Of the decisions for unlike devices the one that all nodes follow: the tightest; None: each follows its own.

    FSDP2's collectives are the same on all ranks only if all keep the same parameters from forward to backward.
    """
    sharded = any(d.record is not None and d.record.sharding is not None for d in decisions)
    return max(decisions, key=lambda d: d.tightened) if sharded else None
