"""A callback with which Lightning's ``Trainer`` trains under a memory budget.

from monetrun.integrations.lightning import BudgetCallback

trainer = lightning.Trainer(callbacks=[BudgetCallback("10GiB")])
trainer.fit(module, loader)
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from monetrun.runtime.session import apply, close


class BudgetCallback(Callback):
    """Applies a budget when ``Trainer.fit`` begins, and ends it when that returns or raises.

    Checkpoints, validation and gradient accumulation are as without it. Under the launcher its budget holds instead.

    Args:
        budget_or_plan: as ``monetrun.apply`` takes it.
        options: of ``monetrun.apply``.

    Attributes:
        measured: of the last ``fit``, as ``monetrun.close`` gives it; empty before, and where nothing was planned.
    """

    def __init__(self, budget_or_plan: Any, **options: Any) -> None:
        self.budget_or_plan = budget_or_plan
        self.options = options
        self.measured: dict[str, Any] = {}
        self._applied = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the budget to the module, which is on its device, and in DistributedDataParallel if there are ranks.

        Raises:
            BudgetSyntaxError, CaptureFailed: as ``monetrun.apply`` does.
        """
        apply(pl_module, self.budget_or_plan, **self.options)
        self._applied = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """``fit`` has ended."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """``fit`` raises."""
        self._end()

    def _end(self) -> None:
        if self._applied:
            self._applied = False
            self.measured = close()
