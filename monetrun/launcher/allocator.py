"""How a launch configures torch's allocator: expandable segments, where the driver can map memory."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from monetrun.machine.device import driver_key
from monetrun.machine.driver import DriverFailed, why_nothing_is_mapped
from monetrun.machine.store import Store
from monetrun.runtime.settings import PREFIX, Settings

_KIND = "driver"


@dataclass(frozen=True, slots=True)
class Mapping:
    """Whether a driver maps memory page by page.

    Attributes:
        failed: why it does not; empty where it does.
    """

    failed: str


def allocator_variables(kind: str, settings: Settings) -> dict[str, str]:
    """The variables that configure torch's allocator, unless the user has configured it.

    On CUDA they make its segments expandable, which keeps reserved memory close to allocated memory. Where the driver
    cannot map memory, torch's first tensor would fail with them: segments then stay as they are without monetrun.
    """
    if kind != "cuda" or "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ:
        return {}
    if _refusal(settings.cache_folder):
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True", PREFIX + "OWN_ALLOCATOR": "1"}


@functools.cache
def _refusal(cache_folder: str) -> str:
    """Why segments cannot be expandable, which is said once; empty where they can, or that is not known."""
    store, key = Store(Path(cache_folder)) if cache_folder else None, driver_key(os.environ)
    found = None if store is None else store.get(_KIND, key, Mapping)
    if found is None:
        try:
            found = Mapping(why_nothing_is_mapped(os.environ))
        except DriverFailed:
            return ""  # as under torchrun, the script will say what is wrong
        if store is not None:
            store.put(_KIND, key, found)
    if found.failed:
        why = f"the CUDA driver maps no memory ({found.failed})"
        print(f"monetrun: segments are not expandable: {why}; more is reserved", file=sys.stderr, flush=True)
    return found.failed
