"""The two ways in which AOTAutograd passes arguments: one by one, and *boxed*, in a list that the callee empties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def passed_on(call: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, marked as taking its arguments the way ``compiled`` does, to which it passes them on."""
    if hasattr(compiled, "_boxed_call"):
        call._boxed_call = compiled._boxed_call  # type: ignore[attr-defined]
    return call
