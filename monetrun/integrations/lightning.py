"""A callback with which Lightning's ``Trainer`` trains under a memory budget.

from monetrun.integrations.lightning import BudgetCallback

trainer = lightning.Trainer(callbacks=[BudgetCallback("10GiB")])
trainer.fit(module, loader)
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from monetrun.integrations.applied_budget import AppliedBudget


class BudgetCallback(AppliedBudget, Callback):
    """Applies a budget when ``Trainer.fit`` begins, and ends it when that returns or raises; see ``AppliedBudget``.

    Checkpoints, validation and gradient accumulation are as without it.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the budget to the module, which is on its device, and in DistributedDataParallel if there are ranks."""
        self.begin(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """``fit`` has ended."""
        self.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """``fit`` raises."""
        self.end()
