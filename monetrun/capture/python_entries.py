"""Python kernels that stand in for torch's while a model is traced."""

from __future__ import annotations

from typing import Any

from torch._C import DispatchKey


def replace_entry(overload: Any, key: DispatchKey, kernel: Any) -> Any:
    """Make ``kernel`` (None: nothing) the Python entry of an overload; gives the one that it replaces."""
    replaced = overload.py_kernels.pop(key, None)
    if kernel is not None:
        overload.py_kernels[key] = kernel
    overload._dispatch_cache.clear()
    return replaced
