"""Operators with which a model talks to other ranks in its own forward: TorchDynamo captures its collectives as such.

Each rank runs them once, in the order of the script: not again in the backward, and not to find out what they cost.
"""

from __future__ import annotations

from typing import Any

import torch

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")


def is_collective(target: Any) -> bool:
    """Whether a call of ``target`` waits for other ranks, or takes part in such a call."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES
