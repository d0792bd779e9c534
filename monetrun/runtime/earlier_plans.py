"""Plans that were left since more was held before a forward, to go back to once it is held no more.

DistributedDataParallel over NCCL holds its first buckets into the second step, for example, and no longer.
"""

from __future__ import annotations

from dataclasses import replace

from monetrun.core.plan import Plan
from monetrun.core.step import HELD_SINCE, StepRecord
from monetrun.runtime.moved_memory import allocated_limit, with_plain_peak_of

# After so many steps with room for the earlier plan it runs again, and after so many times more the next time: models
# are compiled anew. Not where it is not faster by at least this.
_STEPS, _TIMES_MORE, _FASTER = 4, 16, 0.01


class EarlierPlans:
    """Of one process."""

    def __init__(self) -> None:
        self._left: list[tuple[Plan, StepRecord]] = []
        self._wanted, self._steps = _STEPS, 0
        self._beyond: int | None = None

    def leave(self, plan: Plan, record: StepRecord, following: Plan) -> None:
        """``following`` runs from now on, which has room for more; ``record``: of the step that ``plan`` is of."""
        if following.overhead >= plan.overhead + _FASTER:
            self._left.append((plan, record))
        self._steps, self._beyond = 0, None

    def first_record(self, record: StepRecord) -> StepRecord:
        """That of the first plan that was left; ``record`` where none was."""
        return self._left[0][1] if self._left else record

    def held(self, nbytes: int, record: StepRecord) -> None:
        """So much more is held before a forward than in ``record``, of the plan that runs; negative where less."""
        nbytes += record.ledger.get(HELD_SINCE, 0)
        self._beyond = nbytes if self._beyond is None else max(self._beyond, nbytes)

    def step_ended(self, plan: Plan) -> tuple[Plan, StepRecord] | None:
        """A step has ended under ``plan``. Gives the plan to go back to, within its budget, and that plan's record."""
        beyond, self._beyond = self._beyond, None
        if not self._left or beyond is None:
            return None
        earlier, record = self._left[-1]
        earlier = replace(with_plain_peak_of(plan, earlier), budget_bytes=plan.budget_bytes)
        free = max(0, allocated_limit(earlier) - earlier.planned_peak_bytes)
        self._steps = self._steps + 1 if beyond <= record.ledger.get(HELD_SINCE, 0) + free else 0
        if self._steps < self._wanted:
            return None
        self._left.pop()
        self._steps, self._wanted = 0, self._wanted * _TIMES_MORE
        return earlier, record
