"""monetrun: train an unmodified PyTorch script under a memory budget."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> module: resolved on first use, so that an installed monetrun costs other Python processes nothing
_PUBLIC = {
    "apply": "monetrun.runtime.applied",
    "close": "monetrun.runtime.applied",
    "SavedTensors": "monetrun.integrations.partitioner",
    "MonetrunError": "monetrun.core.errors",
    "InfeasibleBudget": "monetrun.core.errors",
    "BudgetExceeded": "monetrun.core.errors",
    "CaptureFailed": "monetrun.core.errors",
    "UsageError": "monetrun.core.errors",
    "BudgetSyntaxError": "monetrun.core.errors",
    "PlanMismatch": "monetrun.core.errors",
}

__all__ = [
    "BudgetExceeded",
    "BudgetSyntaxError",
    "CaptureFailed",
    "InfeasibleBudget",
    "MonetrunError",
    "PlanMismatch",
    "SavedTensors",
    "UsageError",
    "__version__",
    "apply",
    "close",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'monetrun' has no attribute {name!r}")
