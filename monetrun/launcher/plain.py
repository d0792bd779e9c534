"""What the plain run takes of a CUDA device, and whether a launch needs a plan at all."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from monetrun.core.budget import SHARE_OF_PLAIN, Budget, format_bytes, is_auto, resolve
from monetrun.core.plain import PlainPeaks
from monetrun.launcher import memory, sources
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.ranks import Ranks
from monetrun.launcher.trial import PLAIN_FILE, measure_plain_run
from monetrun.machine.store import Store
from monetrun.runtime.settings import MEASURE, Settings


def find_plain(
    options: LaunchOptions,
    ranks: Ranks,
    base_key: str,
    settings: Settings,
    folder: Path,
    console: Console,
    store: Store | None,
    *,
    look: bool = True,
) -> tuple[PlainPeaks | None, str]:
    """The peaks of the plain run, from the cache or by a trial run, and their key in the cache.

    Args:
        options: of the launch.
        ranks: the workers that it will start.
        base_key: of the peaks in the cache, as for ``sources.key_now``.
        settings: of the launch's workers.
        folder: for the trial's files.
        console: where progress is shown.
        store: the cache, if any.
        look: whether to look into it.

    Returns:
        No peaks on a CPU, for a cost model, and where the plain run does not fit the device.
    """
    if ranks.kind != "cuda" or options.cost_model != "measured":
        return None, base_key
    key = sources.key_now(store, base_key)
    plain = store.get("plain", key, PlainPeaks) if store and look else None
    if plain is None:
        trial = replace(settings, mode=MEASURE, record_file=str(folder / PLAIN_FILE))
        plain = measure_plain_run(options, ranks, trial, folder, console)
        key = sources.keep(store, base_key, sources.of_trial(trial.record_file))
        if plain is not None and store is not None:
            store.put("plain", key, plain)
        elif store is not None and not look:
            with contextlib.suppress(OSError):  # a cache that cannot be written
                store.remove("plain", key)
    return plain, key


def budget_that_fits(plain: PlainPeaks | None, budget: Budget, ranks: Ranks) -> int | None:
    """The budget in bytes, if the plain run fits it with room, so that there is nothing to plan."""
    budget_bytes = _in_bytes(plain, budget, ranks)
    return budget_bytes if plain is not None and plain.fits(budget_bytes) else None


def has_run_short(plain: PlainPeaks, budget_bytes: int, key: str, store: Store | None) -> str:
    """Memory ran out in a plain run that was to fit ``budget_bytes``: keep that it takes more.

    Args:
        plain: its first steps.
        budget_bytes: what it could reserve.
        key: of its peaks in the cache.
        store: the cache, if any.

    Returns:
        What is said of it.
    """
    if store is not None:
        store.put("plain", key, replace(plain, more_than_bytes=budget_bytes))
    return (
        f"a later step takes more than {format_bytes(budget_bytes)}, where the first ones took"
        f" {format_bytes(plain.reserved_bytes)} and nothing was planned"
        + (": the next launch plans" if store is not None else "")
    )


def plain_instead(plain: PlainPeaks | None, budget: Budget, ranks: Ranks) -> tuple[str, int] | None:
    """What the plain run has to do in place of a plan that was not found: why it may, and its cap in bytes.

    It has to keep a budget that the user has stated, if only just. A share of the plain run's peak is no cap for it
    (0): what it takes later is what the share is of. Nor is ``auto``: torchrun would try.
    """
    took = "" if plain is None else f": the plain run's first steps took {format_bytes(plain.reserved_bytes)}"
    if is_auto(budget):
        return f"models run as they are, without a limit, as under torchrun{took}", 0
    budget_bytes = _in_bytes(plain, budget, ranks)
    if plain is None or max(plain.reserved_bytes, plain.more_than_bytes + 1) > budget_bytes:
        return None
    line = f"models run as they are{took}, the budget is {format_bytes(budget_bytes)}"
    return line, 0 if budget.kind == SHARE_OF_PLAIN else budget_bytes


def _in_bytes(plain: PlainPeaks | None, budget: Budget, ranks: Ranks) -> int:
    if plain is None:
        return 0
    budget_bytes = memory.budget_bytes(budget, ranks, 0, plain)
    return resolve(budget, None, plain.reserved_bytes) if budget_bytes is None else budget_bytes
