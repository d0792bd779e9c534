"""Texts and refusals that processes of one job pass on over a store of torch's, ``TCPStore`` as a rule.

A store has no collectives whose order could be confused with the script's, and reaches other nodes before there is a
process group. It is polled: a blocking call would keep the other threads of the process from the store.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from monetrun.core import codec
from monetrun.core.errors import MonetrunError, PlanningFault

# TCPStore ends the connection of a client that sends 8 MiB at once.
_PIECE_BYTES = 1 << 20
_POLL_SECONDS = 0.05
_FAILURE = "monetrun/failure"

# A process that refuses stays this long, so that the others can read why: the store may be in it.
_GRACE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A ``MonetrunError`` of another process."""

    exit_code: int
    message: str
    hint: str

    @classmethod
    def of(cls, error: MonetrunError, rank: str = "") -> Refusal:
        """What ``error`` says; ``rank``: whose it is, where the others have to be told."""
        return cls(error.exit_code, f"rank {rank}: {error.message}" if rank else error.message, error.hint)

    def error(self) -> MonetrunError:
        """The same error, to be raised here."""
        kind = PlanningFault if self.exit_code == PlanningFault.exit_code else MonetrunError
        error = kind(self.message, self.hint)
        error.exit_code = self.exit_code
        return error


def post_failure(refusal: Refusal) -> None:
    """Tell the other ranks of this process's group why it ends: their collectives fail without a reason."""
    store = _store()
    if store is not None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            post(store, _FAILURE, json.dumps(codec.to_plain(refusal)))


def failure_elsewhere() -> Refusal | None:
    """Why another rank has ended, if it has told."""
    store = _store()
    if store is None:
        return None
    try:
        if not is_posted(store, _FAILURE):
            return None
        found: Refusal = codec.from_plain(Refusal, json.loads(read(store, _FAILURE)))
    except (RuntimeError, ValueError):  # the store is gone
        return None
    return found


def _store() -> Any:
    """``store_of_ranks``; None where this process is alone, or has no process group."""
    if "torch.distributed" not in sys.modules:
        return None
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    return store_of_ranks()


def store_of_ranks() -> Any:
    """The store of the default process group, without what earlier workers have left in it.

    Torchrun's agent may keep it when it starts the workers again. How often it has, only a single node knows for all.
    """
    from torch import distributed

    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if os.environ.get("GROUP_WORLD_SIZE") == "1" else ""
    return distributed.PrefixStore(f"monetrun-{life}", distributed.distributed_c10d._get_default_store())


def post(store: Any, key: str, text: str) -> None:
    """Set ``key`` to ``text``, of any length."""
    data = zlib.compress(text.encode())
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    for i, piece in enumerate(pieces):
        store.set(f"{key}/{i}", piece)
    store.set(key, str(len(pieces)))


def is_posted(store: Any, key: str) -> bool:
    """Whether ``read`` would find a text."""
    return bool(store.check([key]))


def are_posted(store: Any, keys: Sequence[str]) -> bool:
    """``is_posted`` of each of ``keys``, asked for at once."""
    return bool(store.check(list(keys)))


def read(store: Any, key: str) -> str:
    """The text that was posted."""
    data = b"".join(bytes(store.get(f"{key}/{i}")) for i in range(int(store.get(key))))
    return zlib.decompress(data).decode()


def first_said(store: Any, key: str, number: int) -> int:
    """What the first process has said under ``key``: ``number``, if it is this one."""
    return int(store.compare_set(key, "", str(number)))


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll ``condition`` until it holds or ``seconds`` have passed; gives whether it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def leave_together(store: Any, key: str, processes: int) -> None:
    """Say under ``key`` that this process has read why the job ends, and wait until all have, but not for long."""
    try:
        store.add(key, 1)
        wait_until(lambda: store.add(key, 0) >= processes, _GRACE_SECONDS)
    except RuntimeError:
        return  # the process that has the store has left: it has seen all others
