"""Training in evaluation mode: by intent, or since the script has never called ``train`` after an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer

from monetrun.runtime import candidates
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.trigger import Nesting

if TYPE_CHECKING:  # the engine imports the planner, too slow for ``import torch``
    from monetrun.runtime.engine import Engine


def found(nesting: Nesting, optimizer: Optimizer, reporter: Reporter, engine: Engine | None) -> bool:
    """An optimizer's step has ended: look whether it was of models in evaluation mode, until it was once.

    Such models are planned from the next step on, which is recorded in place of this one if that is being recorded.

    Returns:
        Whether it was, and no other model is planned: the step counts for nothing.
    """
    modules = nesting.found_in_evaluation_mode(optimizer)
    if not modules:
        return False
    name = candidates.outermost_name(modules)
    reporter.warn(f"{name} is trained in evaluation mode, without a call of train(): planned from the next step on")
    if engine is not None:
        engine.found_broken(anew=True)
    return engine is None
