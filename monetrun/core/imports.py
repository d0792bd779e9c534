"""Imports of large packages, quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's garbage collector inside a ``with`` block, for an import.

    torch's compiler front end makes a million objects when it is imported, and all stay. Looking through them for
    garbage again and again takes a fifth of the import's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
