"""What the callbacks of other trainers share: a budget that is applied when training begins, and then ended."""

from __future__ import annotations

from typing import Any

from torch import nn

from monetrun.runtime import apply_arguments
from monetrun.runtime.session import apply, close


class AppliedBudget:
    """A budget for the model that a trainer trains. Under the launcher its budget holds instead.

    Args:
        budget_or_plan: as ``monetrun.apply`` takes it.
        options: of ``monetrun.apply``.

    Attributes:
        measured: of the last training, as ``monetrun.close`` gives it; empty before, and where nothing was planned.

    Raises:
        TypeError, UsageError: as ``monetrun.apply`` does.
    """

    def __init__(self, budget_or_plan: Any, **options: Any) -> None:
        apply_arguments.checked_budget(budget_or_plan)
        self.budget_or_plan = budget_or_plan
        self.options = apply_arguments.checked_options(options)
        self.measured: dict[str, Any] = {}
        self._applied = False

    def begin(self, model: nn.Module) -> None:
        """Apply the budget.

        Raises:
            CaptureFailed: as ``monetrun.apply`` does.
        """
        apply(model, self.budget_or_plan, **self.options)
        self._applied = True

    def end(self) -> None:
        """End the budget, if it was applied."""
        if self._applied:
            self._applied = False
            self.measured = close()
