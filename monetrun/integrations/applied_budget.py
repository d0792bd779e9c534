"""What the callbacks of other trainers share: a budget that is applied when training begins, and then ended."""

from __future__ import annotations

from typing import Any

from torch import nn

from monetrun.runtime import apply_arguments
from monetrun.runtime.applied import apply, close, current, figures
from monetrun.runtime.reporter import WARNING
from monetrun.runtime.session import Session


class AppliedBudget:
    """A budget for the model that a trainer trains. Under the launcher its budget holds instead.

    Args:
        budget_or_plan: as ``monetrun.apply`` takes it.
        options: of ``monetrun.apply``.

    Attributes:
        measured: of the last training, as ``monetrun.close`` gives it; empty before, under the launcher, and where
            nothing was planned.

    Raises:
        TypeError, UsageError: as ``monetrun.apply`` does.
    """

    def __init__(self, budget_or_plan: Any, **options: Any) -> None:
        apply_arguments.checked_budget(budget_or_plan)
        self.budget_or_plan = budget_or_plan
        self.options = apply_arguments.checked_options(options)
        self.measured: dict[str, Any] = {}
        self._session: Session | None = None  # that this budget has trained in since ``begin``
        self._began = False  # and has begun: another one's is not to be ended

    def begin(self, model: nn.Module) -> None:
        """Apply the budget. Where another one is active, with the same arguments they share its bytes; else it ends.

        Raises:
            CaptureFailed: as ``monetrun.apply`` does.
        """
        before, self.measured = current(), {}
        apply(model, self.budget_or_plan, **self.options)
        session = current()
        if session is not before or session is not self._session:
            self._session, self._began = session, session is not before
        if session is not None and before is not None and session is not before:
            former, this = before.settings.budget, session.settings.budget
            session.reporter.tell(
                f"{WARNING}the budget {former} was active and has ended: all models are planned anew under {this}, and"
                " run as they are once that has ended"
            )

    def end(self) -> None:
        """End what ``begin`` began."""
        session, self._session = self._session, None
        if session is None or session is not current():
            return
        self.measured = close() if self._began else figures(session)
