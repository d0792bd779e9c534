"""A trial run of the user's script: one process runs as rank 0, and ends with the first training step."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from monetrun.core import codec
from monetrun.core.plain import PlainPeaks
from monetrun.core.step import StepRecord
from monetrun.runtime.settings import PROBED


def stand_in_for_the_other_ranks(world_size: int) -> None:
    """Make ``init_process_group`` create torch's fake process group: collectives return at once, without other ranks.

    Such a collective returns None, which DistributedDataParallel rejects: a hook leaves its gradients as they are.
    """
    if not torch.distributed.is_available():
        return
    original = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        original(backend="fake", store=FakeStore(), rank=0, world_size=world_size)

    torch.distributed.init_process_group = init_process_group
    torch.distributed.distributed_c10d.init_process_group = init_process_group
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    initialize, register = parallel.__init__, parallel.register_comm_hook

    def initialize_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        register(self, None, lambda _, bucket: _future(bucket.buffer()))

    parallel.__init__ = initialize_alone
    parallel.register_comm_hook = lambda self, state, hook: None


def _future(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def write(record: StepRecord | PlainPeaks, path: str) -> None:
    """Write what a trial run found; the file is there as a whole or not at all."""
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(codec.dumps(record))
    part.replace(path)


def leave(record: StepRecord | PlainPeaks | None, path: str) -> NoReturn:
    """Write the record, if any, and end the process at once: no ``atexit``, no ``finally``, no further line."""
    if record is not None:
        write(record, path)
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PROBED)
