"""What happens where something takes long."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def if_longer_than(seconds: float, act: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Call ``act`` with ``args``, in a thread of its own, where this context takes longer."""
    timer = threading.Timer(seconds, act, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
