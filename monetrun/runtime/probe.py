"""A trial run of the user's script: one process stands for rank 0 of the real run, and ends before a step is taken."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from monetrun.core import codec
from monetrun.core.step import StepRecord
from monetrun.runtime.settings import PROBED


def stand_in_for_the_other_ranks(world_size: int) -> None:
    """Let ``init_process_group`` make torch's fake process group: collectives return at once, nobody else is there.

    Such a collective's result is None, which DistributedDataParallel does not take: its gradients are left as they are.
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


def leave(record: StepRecord, path: str) -> NoReturn:
    """Write the record and end the process: no ``atexit``, no ``finally``, no further line of the script runs."""
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(codec.dumps(record))
    part.replace(path)
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PROBED)
