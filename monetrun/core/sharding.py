"""Modules that FSDP2 shards: what they gather, and which of them keep their parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from monetrun.core.event import GATHER, REDUCE, Event
from monetrun.core.graph import check_bytes

# Of collectives: ``GATHER`` or ``REDUCE``, the bytes of all ranks together, and seconds.
CollectiveSeconds = tuple[tuple[str, int, float], ...]


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module whose parameters all ranks of a group share.

    Attributes:
        name: which of the process's models, and the path in it (see ``Break.module``).
        nbytes: of its parameters, gathered.
        reduced_bytes: of its gradients, before they are reduced; 0: none are trained.
        ranks: in its group.
        kept: the script has it keep its parameters between forward and backward (``reshard_after_forward=False``).
        choice: that can be chosen anew; not of a root, nor where they are resharded to fewer ranks.
        gather_seconds: of one all-gather of its parameters; 0.0 where that is not known.
        reduce_seconds: of one reduce-scatter of its gradients; 0.0 where that is not known.
    """

    name: str
    nbytes: int
    reduced_bytes: int
    ranks: int
    kept: bool = False
    choice: bool = True
    gather_seconds: float = 0.0
    reduce_seconds: float = 0.0

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: an amount cannot be right.
        """
        check_bytes(gathered=self.nbytes, reduced=self.reduced_bytes)
        if self.ranks < 1 or not min(self.gather_seconds, self.reduce_seconds) >= 0.0:
            seconds = f"{self.gather_seconds} s, and reduced in {self.reduce_seconds} s"
            raise ValueError(f"{self.name} is gathered from {self.ranks} ranks in {seconds}")


@dataclass(frozen=True, slots=True)
class Sharding:
    """The sharded modules of a step.

    Attributes:
        modules: in the order in which they were called first.
        events: of the step in which every module that is a choice frees its parameters after its forward.
        kept: indices of the modules that keep them, in order: the present choice.
        between: ``DeviceMemory.between``, with the numbers that requests have in ``events``.
    """

    modules: tuple[ShardedModule, ...]
    events: tuple[Event, ...]
    kept: tuple[int, ...] = ()
    between: Event | None = None

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: an index is of no module.
        """
        actions = (event.action.module for event in self.events if event.action is not None)
        if any(not 0 <= i < len(self.modules) for i in (*actions, *self.kept)):
            raise ValueError("a sharded module is named that does not exist")

    @property
    def choices(self) -> tuple[int, ...]:
        """Indices of the modules for which it can be chosen."""
        return tuple(i for i, module in enumerate(self.modules) if module.choice)

    @property
    def scripted(self) -> tuple[int, ...]:
        """Indices of those of them that keep their parameters where the script's choice is followed."""
        return tuple(i for i in self.choices if self.modules[i].kept)


def seconds_known(sharding: Sharding) -> bool:
    """Whether it is known how long the all-gather of each module takes that is a choice."""
    return all(sharding.modules[i].gather_seconds > 0.0 for i in sharding.choices)


def with_seconds(sharding: Sharding, found: Iterable[tuple[str, int, float]]) -> Sharding:
    """The modules with the seconds of their collectives, the shortest in ``found`` of each kind and size."""
    shortest: dict[tuple[str, int], float] = {}
    for kind, nbytes, seconds in found:
        shortest[kind, nbytes] = min(seconds, shortest.get((kind, nbytes), seconds))
    modules = (
        replace(
            m,
            gather_seconds=shortest.get((GATHER, m.nbytes), m.gather_seconds),
            reduce_seconds=shortest.get((REDUCE, m.reduced_bytes), m.reduce_seconds),
        )
        for m in sharding.modules
    )
    return replace(sharding, modules=tuple(modules))
