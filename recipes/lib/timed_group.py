"""A process group whose all-reduces take as long as on a link of a given speed, without using a core while they wait.

It reduces over gloo, so that sums are right, and completes no earlier than the link would: one transfer after the
other, each in ``latency_seconds`` and 2 (n - 1) / n of its bytes (a ring's) at ``bytes_per_second``, from when the last
rank has begun it. All other collectives are gloo's, at its own speed.

    timed_group.register()
    torch.distributed.init_process_group("timed")
    group = timed_group.default()
    group.link = Link(bytes_per_second=50e6)

Ranks are processes of one machine: their monotonic clocks are compared.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

NAME = "timed"


@dataclass(frozen=True, slots=True)
class Link:
    """What connects the ranks; by default it takes no time."""

    latency_seconds: float = 0.0
    bytes_per_second: float = float("inf")

    def all_reduce_seconds(self, nbytes: int, ranks: int) -> float:
        """Seconds of one all-reduce in a ring."""
        return self.latency_seconds + 2 * (ranks - 1) / ranks * nbytes / self.bytes_per_second


@dataclass(slots=True)
class Transfer:
    """One all-reduce; moments of the monotonic clock in seconds.

    Attributes:
        nbytes: reduced.
        posted: when this rank began it.
        ended: when it was complete; 0 until then.
    """

    nbytes: int
    posted: float
    ended: float = 0.0


class _Work(dist._Work):
    """An all-reduce on its way."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.future: Future[list[torch.Tensor]] = Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.future.wait()
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self.future


class TimedGroup(dist.ProcessGroup):
    """The process group.

    Attributes:
        link: of all transfers that begin from now on; the same in all ranks.
        transfers: all-reduces begun since the list was last cleared.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.link = Link()
        self.transfers: list[Transfer] = []
        self._under_way: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._free_at = 0.0  # when the link has passed on all transfers begun so far
        threading.Thread(target=self._pass_on, name="link", daemon=True).start()

    def getBackendName(self) -> str:
        """Its name, for torch."""
        return NAME

    def allreduce(self, tensors: Sequence[torch.Tensor] | torch.Tensor, opts: Any = None) -> _Work:
        """Begin to reduce; the link takes its time for it."""
        each = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        transfer = Transfer(sum(t.nbytes for t in each), time.monotonic())
        begun = torch.tensor([transfer.posted], dtype=torch.float64)
        latest = dist.AllreduceOptions()
        latest.reduceOp = dist.ReduceOp.MAX
        work = _Work(each)
        parts = (self._gloo.allreduce([begun], latest), self._gloo.allreduce(each, opts or dist.AllreduceOptions()))
        self.transfers.append(transfer)
        self._under_way.put((work, parts, begun, transfer, self.link))
        return work

    def _pass_on(self) -> None:
        while True:
            work, parts, begun, transfer, link = self._under_way.get()
            try:
                for part in parts:
                    part.wait()
            except RuntimeError as error:
                work.future.set_exception(error)
                continue
            seconds = link.all_reduce_seconds(transfer.nbytes, self.size())
            self._free_at = max(self._free_at, begun.item()) + seconds
            time.sleep(max(0.0, self._free_at - time.monotonic()))
            transfer.ended = time.monotonic()
            work.future.set_result(work.tensors)


def register() -> None:
    """Make ``init_process_group("timed")`` possible."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, TimedGroup, devices=["cpu"])


def default() -> TimedGroup:
    """The default process group, which is a timed one."""
    group = dist.group.WORLD
    assert isinstance(group, TimedGroup)
    return group
