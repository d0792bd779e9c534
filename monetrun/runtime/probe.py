"""A trial run of the user's script: one process runs as rank 0, and ends with the first training step."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from monetrun.capture import fake_tensors, roofline
from monetrun.core import codec
from monetrun.core.overdue import if_longer_than
from monetrun.core.patched import patched
from monetrun.core.plain import PlainPeaks
from monetrun.core.step import StepRecord
from monetrun.planning.check import CheckedRun
from monetrun.runtime import collectives, trial_sources
from monetrun.runtime.settings import PROBED, Settings

# What is added to the path of a record that a trial run could not make, for the file that says why.
UNSEEN = ".unseen"

# The same, for the record while its models are compared with eager: what ends the process then costs no plan.
UNCOMPARED = ".uncompared"

# The same, for an empty file that says that a model has been called in training.
BEGUN = ".begun"

# The same, for the folder of the values that a check's run keeps of its first step.
VALUES = ".values"

_COMPARING_SECONDS = 60.0

NO_OPTIMIZER = "it computes gradients without an optimizer of torch.optim"
MOST_ROUNDS = 256
"""So many backward passes without an optimizer's step are no gradient accumulation."""
NO_STEP = f"no optimizer of torch.optim makes a step in {MOST_ROUNDS} backward passes"


def prepare(settings: Settings, undo: contextlib.ExitStack) -> None:
    """Have a trial run without other ranks, and without memory where costs are a model's; ``undo`` takes it back."""
    measured = settings.cost_model == roofline.MEASURED
    stand_in_for_the_other_ranks(settings.world_size, undo, on_this_device=measured)
    if not measured:
        fake_tensors.start(undo)


def stand_in_for_the_other_ranks(world_size: int, undo: contextlib.ExitStack, *, on_this_device: bool = True) -> None:
    """Make ``init_process_group`` and ``new_group`` create torch's fake process groups: collectives return at once.

    There are no other ranks. What gloo's would allocate they do, too, if the step is for this device
    (``on_this_device``) and not for another. Such a collective returns None, which DistributedDataParallel rejects: a
    hook leaves its gradients as they are. It compares its parameters' shapes with no one's, which would read memory
    that fake tensors do not have. ``undo`` gets what takes it back.
    """
    if not torch.distributed.is_available():
        return
    original = torch.distributed.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if on_this_device:
            collectives.asked_for(backend or "")
        original(backend="fake", store=FakeStore(), rank=0, world_size=world_size)

    new_group_ = torch.distributed.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(new_group_).bind(*args, **kwargs).arguments
        # another backend, or a device to connect at once, would wait for the other ranks
        return new_group_(**{**given, "backend": None, "pg_options": None, "device_id": None})

    if on_this_device:
        collectives.copy_as_gloo(undo)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    initialize, register = parallel.__init__, parallel.register_comm_hook

    def initialize_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        register(self, None, lambda _, bucket: _future(bucket.buffer()))

    for owner, name, stand_in in (
        (torch.distributed, "init_process_group", init_process_group),
        (torch.distributed.distributed_c10d, "init_process_group", init_process_group),
        (torch.distributed.device_mesh, "init_process_group", init_process_group),
        (torch.distributed, "new_group", new_group),
        (torch.distributed.distributed_c10d, "new_group", new_group),
        (torch.distributed.device_mesh, "new_group", new_group),
        (parallel, "__init__", initialize_alone),
        (parallel, "register_comm_hook", lambda self, state, hook: None),
        (torch.distributed, "_verify_params_across_processes", lambda *args: None),
    ):
        undo.enter_context(patched(owner, name, stand_in))


def _future(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def write(record: StepRecord | PlainPeaks | CheckedRun, path: str) -> None:
    """Write what a trial run found; the file is there as a whole or not at all."""
    trial_sources.write(path)
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(codec.dumps(record))
    part.replace(path)


@contextlib.contextmanager
def comparing(record: StepRecord, path: str) -> Iterator[None]:
    """The record is known, and what runs in this context may end the process, or never end: then it counts as it is."""
    kept = Path(path + UNCOMPARED)
    kept.write_text(codec.dumps(record))
    try:
        with if_longer_than(_COMPARING_SECONDS, leave, record, path):
            yield
    finally:
        kept.unlink(missing_ok=True)


def begin(path: str) -> None:
    """A model is called in training: whatever its step takes, the launcher waits for it."""
    Path(path + BEGUN).touch()


def leave_unseen(reason: str, path: str, *, as_is: bool = False) -> NoReturn:
    """End a trial run that cannot see the script's training step, from the trial's process or from a child of it.

    Args:
        reason: what it cannot see, in the words of the launch's warning.
        path: of the record, which is not written; the launcher finds the reason beside it.
        as_is: no model of the script can be planned, ``reason`` says why.
    """
    part = Path(f"{path}.{os.getpid()}")
    part.write_text(json.dumps({"reason": reason, "as_is": as_is}))
    part.replace(path + UNSEEN)
    leave(None, path)


def leave_without_steps(backwards: int, has_optimizer: bool, path: str) -> None:
    """``leave_unseen``, if after so many backward passes none of the optimizers can be expected to make a step."""
    if backwards > 1 and not has_optimizer:
        leave_unseen(NO_OPTIMIZER, path)
    if backwards > MOST_ROUNDS:
        leave_unseen(NO_STEP, path)


def leave(record: StepRecord | PlainPeaks | CheckedRun | None, path: str) -> NoReturn:
    """Write the record, if any, and end the process at once: no ``atexit``, no ``finally``, no further line.

    The launcher ends what it has started (``launcher.trial_end``).
    """
    if record is not None:
        write(record, path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PROBED)
