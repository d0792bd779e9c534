"""A callback with which transformers' ``Trainer`` trains under a memory budget.

from monetrun.integrations.transformers import BudgetCallback

trainer = Trainer(model, arguments, train_dataset=data, callbacks=[BudgetCallback("10GiB")])
trainer.train()
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback

from monetrun.runtime.session import apply, close


class BudgetCallback(TrainerCallback):
    """Applies a budget when ``Trainer.train`` begins training, and ends it when that returns or raises.

    Checkpoints, evaluation and gradient accumulation are as without it. Under the launcher its budget holds instead.

    Args:
        budget_or_plan: as ``monetrun.apply`` takes it.
        options: of ``monetrun.apply``.

    Attributes:
        measured: of the last ``train``, as ``monetrun.close`` gives it; empty before, and where nothing was planned.
    """

    def __init__(self, budget_or_plan: Any, **options: Any) -> None:
        self.budget_or_plan = budget_or_plan
        self.options = options
        self.measured: dict[str, Any] = {}
        self._applied = False
        _tell_callbacks_when_train_ends()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Apply the budget to the model; accelerate has put DistributedDataParallel around it, if there are ranks.

        Raises:
            BudgetSyntaxError, CaptureFailed: as ``monetrun.apply`` does.
        """
        apply(kwargs["model"], self.budget_or_plan, **self.options)
        self._applied = True

    def train_ended(self) -> None:
        """End the budget, if it was applied."""
        if self._applied:
            self._applied = False
            self.measured = close()


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
                    callback.train_ended()

    observed_train.monetrun = True  # type: ignore[attr-defined]
    Trainer.train = observed_train  # type: ignore[method-assign]
