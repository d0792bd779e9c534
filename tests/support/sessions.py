"""Training under a plan in the test's own process."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from monetrun.capture import cpu_allocator
from monetrun.core.plan import Plan
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


@contextlib.contextmanager
def opened_session(plan: Plan | None = None, **settings: Any) -> Iterator[Session]:
    """A session that watches this process and counts what torch allocates; torch's compiled code goes with it."""
    assert cpu_allocator.install(), cpu_allocator.unavailable_reason()
    gc.collect()  # models of tests before this one are bytes that torch holds until then
    opened = Session(Settings(mode=RUN, **settings), plan)
    opened.watch_process()
    try:
        yield opened
    finally:
        opened.close()
        torch._dynamo.reset()
