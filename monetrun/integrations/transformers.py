"""A callback with which transformers' ``Trainer`` trains under a memory budget.

from monetrun.integrations.transformers import BudgetCallback

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[BudgetCallback("10GiB")])
trainer.train()
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback

from monetrun.integrations.applied_budget import AppliedBudget


class BudgetCallback(AppliedBudget, TrainerCallback):
    """Applies a budget when ``Trainer.train`` begins, and ends it when that returns or raises; see ``AppliedBudget``.

    Checkpoints, evaluation and gradient accumulation are as without it.
    """

    def __init__(self, budget_or_plan: Any, **options: Any) -> None:
        super().__init__(budget_or_plan, **options)
        _tell_callbacks_when_train_ends()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the budget to the model; accelerate has put DistributedDataParallel around it, if there are ranks."""
        self.begin(kwargs["model"])


def _tell_callbacks_when_train_ends() -> None:
    """Patch ``Trainer.train``, once: it has no event for a training that raises."""
    train = Trainer.train
    if hasattr(train, "monetrun"):
        return

    @functools.wraps(train)
    def observed_train(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        finally:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, BudgetCallback):
                    callback.end()

    observed_train.monetrun = True  # type: ignore[attr-defined]
    Trainer.train = observed_train  # type: ignore[method-assign]
