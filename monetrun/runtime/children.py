"""Processes that a worker or a trial run starts, and that train: no plan reaches them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from monetrun.runtime import probe
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.settings import CLAIM, TRIALS, Settings

REASON = "it trains in processes that it starts itself"


def watch(settings: Settings) -> None:
    """Wait for an optimizer's step in this process, a child of the one that monetrun started.

    A trial run ends there, since training must not happen in it. In a run it is warned of once.

    Args:
        settings: inherited from the process that monetrun started.
    """
    noticed = False

    def step_begins(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal noticed
        if settings.mode in TRIALS:
            probe.leave_unseen(REASON, settings.record_file)
        first, noticed = not noticed, True  # a hook cannot be removed while torch goes through them
        if first and (settings.strict or _first(settings.report_folder)):
            Reporter(settings).give_up(f"models run without a plan: {REASON}; --nproc-per-node N starts N that plan")

    register_optimizer_step_pre_hook(step_begins)


def _first(folder: str) -> bool:
    """Whether no other child of this launch has been here."""
    if not folder:
        return True
    try:
        (Path(folder) / "child_trains").open("x").close()
    except FileExistsError:
        return False
    except OSError:  # the folder is gone, or this process may not write there
        return os.getppid() == int(os.environ.get(CLAIM, "0"))
    return True
