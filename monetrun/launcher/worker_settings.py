"""The settings of the processes that a launch starts."""

from __future__ import annotations

import os
from pathlib import Path

from monetrun.launcher.options import LaunchOptions
from monetrun.machine.store import Store
from monetrun.runtime.settings import Settings


def worker_settings(options: LaunchOptions, report_folder: Path, store: Store | None) -> Settings:
    """What the options determine of a worker's settings, those of a run and those of a trial run."""
    return Settings(
        budget=options.budget,
        plan_given=bool(options.plan_file),
        report_folder=str(report_folder),
        tensorboard_folder=options.tensorboard_folder and str(Path(options.tensorboard_folder).resolve()),
        cache_folder=str(store.root) if store else "",
        algorithm=options.algorithm,
        solver_seconds=options.solver_seconds,
        mip_solver=options.mip_solver,
        cost_model=options.cost_model,
        recompute=options.recompute,
        implementations=options.implementations,
        strict=options.strict,
        quiet=options.quiet,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
    )
