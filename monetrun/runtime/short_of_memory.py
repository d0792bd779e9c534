"""Refusals of a training step as what torch raises where memory runs out: scripts that catch that skip the step.

fairseq skips such a batch; accelerate and transformers halve it where " out of memory." is in the error's one argument.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, TypeVar, cast

import torch

from monetrun.core.errors import MonetrunError

E = TypeVar("E", bound=MonetrunError)


def as_out_of_memory(error: E, device_type: str) -> E:
    """``error`` as one that is a ``torch.OutOfMemoryError`` too, and says so."""
    kind = _also_out_of_memory(cast(Hashable, type(error)))
    found = cast(E, kind.__new__(kind))
    found.__dict__.update(error.__dict__)
    # on a CPU libraries know it by what torch's own allocator says (Lightning's search for a batch size)
    torchs = " DefaultCPUAllocator: can't allocate memory." if device_type == "cpu" else ""
    found.message = f"{device_type.upper()} out of memory.{torchs} {error.message}"
    found.args = (str(found),)
    return found


@functools.cache
def _also_out_of_memory(kind: Hashable) -> Any:
    assert isinstance(kind, type)
    return type(kind.__name__, (kind, cast(type, torch.OutOfMemoryError)), {"__module__": kind.__module__})
