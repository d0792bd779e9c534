"""What gloo's collectives allocate: copies that a trial run, whose process group is torch's fake one, would not see.

``ProcessGroupGloo`` gathers into a tensor of its own, from which the output is copied, and reduces a copy of the input
of a reduce-scatter. A thread of its own runs them: it may hold that copy for a moment after the collective has
returned.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from monetrun.core.patched import patched

# Of torch's collectives, by name (two names of each in newer versions): the place and the name of what is copied.
_COPIED = {
    "all_gather_single": (0, "output_tensor"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter_single": (1, "input"),
    "reduce_scatter_tensor": (1, "input"),
}

_asked: str | None = None


def asked_for(backend: str | None) -> None:
    """The script of a trial run asks for this backend (empty: torch's defaults), and gets the fake one.

    None: this is no trial run.
    """
    global _asked
    _asked = backend


def through_gloo(device: torch.device) -> bool:
    """Whether collectives of tensors on ``device`` run through gloo, or would if this was not a trial run."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    backend = distributed.get_backend_config() if _asked is None else _asked
    chosen = distributed.distributed_c10d.BackendConfig(distributed.Backend(backend or "undefined"))
    return chosen.get_device_backend_map().get(device.type) == distributed.Backend.GLOO


def copy_as_gloo(undo: contextlib.ExitStack) -> None:
    """Let the collectives that FSDP2 calls allocate what gloo's would, where they would be gloo's; ``undo`` ends it."""
    undo.callback(asked_for, _asked)
    for name, copied in _COPIED.items():
        original = getattr(distributed, name, None)
        if original is not None:
            undo.enter_context(patched(distributed, name, _copying(original, *copied)))


def _copying(run: Callable[..., Any], place: int, keyword: str) -> Callable[..., Any]:
    @functools.wraps(run)
    def copying(*args: Any, **kwargs: Any) -> Any:
        copied = args[place] if len(args) > place else kwargs.get(keyword)
        copy = torch.empty_like(copied) if copied is not None and through_gloo(copied.device) else None
        del copied
        result = run(*args, **kwargs)
        del copy
        return result

    return copying
