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

from monetrun.core.event import GATHER, REDUCE
from monetrun.core.patched import patched

# The collectives that FSDP2 calls, by name (two names of each in newer torch): the kind, and the place and name of the
# tensor that has what all ranks have together. gloo copies that one.
_OF_SHARDED = {
    "all_gather_single": (GATHER, 0, "output_tensor"),
    "all_gather_into_tensor": (GATHER, 0, "output_tensor"),
    "reduce_scatter_single": (REDUCE, 1, "input"),
    "reduce_scatter_tensor": (REDUCE, 1, "input"),
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


def patch(undo: contextlib.ExitStack, wrap: Callable[..., Callable[..., Any]]) -> None:
    """Put a wrapper on each collective that FSDP2 calls; ``undo`` takes it off.

    Args:
        undo: ends it.
        wrap: gives the wrapper, from the collective, its kind (``GATHER``, ``REDUCE``), and what finds in the arguments
            and keywords of a call the tensor that has what all ranks have together.
    """
    for name, (kind, place, keyword) in _OF_SHARDED.items():
        original = getattr(distributed, name, None)
        if original is not None:
            wrapper = functools.wraps(original)(wrap(original, kind, functools.partial(_whole, place, keyword)))
            undo.enter_context(patched(distributed, name, wrapper))


def _whole(place: int, keyword: str, args: Any, kwargs: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(keyword)


def copy_as_gloo(undo: contextlib.ExitStack) -> None:
    """Let the collectives that FSDP2 calls allocate what gloo's would, where they would be gloo's; ``undo`` ends it."""
    undo.callback(asked_for, _asked)
    patch(undo, _copying)


def _copying(run: Callable[..., Any], kind: str, whole: Callable[..., Any]) -> Callable[..., Any]:
    def copying(*args: Any, **kwargs: Any) -> Any:
        copied = whole(args, kwargs)
        copy = torch.empty_like(copied) if copied is not None and through_gloo(copied.device) else None
        del copied
        result = run(*args, **kwargs)
        del copy
        return result

    return copying
