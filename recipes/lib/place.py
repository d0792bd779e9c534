"""Where a process of a training recipe trains, alone or as one of torchrun's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """Which of the processes this is, and its device."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process writes."""
        return self.rank == 0

    def say(self, line: str) -> None:
        """Print, in one process."""
        if self.first:
            print(line, flush=True)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values


@contextlib.contextmanager
def placed(device: str) -> Iterator[Place]:
    """Join the process group that torchrun's variables describe, if there are other processes."""
    rank, local, world = (int(os.environ.get(n, d)) for n, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    place = Place(rank, world, torch.device(kind, local) if kind == "cuda" else torch.device(kind))
    if kind == "cuda":
        torch.cuda.set_device(place.device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield place
    finally:
        if world > 1:
            torch.distributed.destroy_process_group()
