"""Why nothing of a session was planned."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.optim.optimizer import Optimizer

from monetrun.runtime import candidates, unplannable_use

if TYPE_CHECKING:
    from monetrun.runtime.engine import Engine


class Optimizers(weakref.WeakSet[Optimizer]):
    """Optimizers while they are there.

    Attributes:
        had_one: whether there was one.
    """

    had_one = False

    def add(self, item: Optimizer) -> None:
        """There is another one, or this one again."""
        self.had_one = True
        super().add(item)


def why(
    engine: Engine | None,
    warned: bool,
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    stepped: Collection[Optimizer],
) -> str:
    """Why a session that ends has no plan.

    Args:
        engine: of the session.
        warned: there were warnings.
        models: that are planned, or wait for it.
        optimizers: of the session.
        stepped: those that have made a step.
    """
    waiting = [type(optimizer).__name__ for optimizer in optimizers if optimizer not in stepped]
    if engine is not None and engine.refused:
        return "no schedule fits the budget (see the error above)"
    if engine is None and warned:
        return "the warnings above say why"
    if engine is None:
        name = candidates.outermost_name(list(models))
        return f"no training forward of {name} has run since apply (in training mode, with gradients enabled)"
    if waiting or not stepped:
        return f"no step of {', '.join(waiting) or 'an optimizer'} has ended since the model's first training forward"
    return "training ended before the plan is made: when the second step begins, or the third where outputs are held"


def unsaid(engine: Engine | None, warned: bool, optimizers: Optimizers, stepped: Optimizers) -> str:
    """Why nothing was planned, where no warning has said it."""
    return "" if engine or warned else unplannable_use.no_step(optimizers.had_one, stepped.had_one)
