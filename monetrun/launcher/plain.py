"""What the plain run takes of a CUDA device, and whether a launch needs a plan at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from monetrun.core.budget import Budget, resolve
from monetrun.core.plain import PlainPeaks
from monetrun.launcher import keys, memory
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.ranks import Ranks
from monetrun.launcher.trial import measure_plain_run
from monetrun.machine.store import Store
from monetrun.runtime.settings import MEASURE, Settings


def find_plain(
    options: LaunchOptions, ranks: Ranks, settings: Settings, folder: Path, console: Console, store: Store | None
) -> PlainPeaks | None:
    """The peaks of the plain run, from the cache or by a trial run.

    Args:
        options: of the launch.
        ranks: the workers that it will start.
        settings: of the launch's workers.
        folder: for the trial's files.
        console: where progress is shown.
        store: the cache, if any.

    Returns:
        None on a CPU, for a cost model, and where the plain run does not fit the device.
    """
    if ranks.kind != "cuda" or options.cost_model != "measured":
        return None
    key = keys.plain_key(options, ranks)
    plain = store.get("plain", key, PlainPeaks) if store else None
    if plain is None:
        trial = replace(settings, mode=MEASURE, record_file=str(folder / "plain.json"))
        plain = measure_plain_run(options, ranks, trial, folder, console)
        if plain is not None and store is not None:
            store.put("plain", key, plain)
    return plain


def budget_that_fits(plain: PlainPeaks | None, budget: Budget, ranks: Ranks) -> int | None:
    """The budget in bytes, if the plain run fits it with room, so that there is nothing to plan."""
    if plain is None:
        return None
    budget_bytes = memory.budget_bytes(budget, ranks, 0, plain)
    if budget_bytes is None:
        budget_bytes = resolve(budget, None, plain.reserved_bytes)
    return budget_bytes if plain.fits(budget_bytes) else None
