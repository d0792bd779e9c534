"""Modules that FSDP2 shards: what they gather, and which of them keep their parameters between forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

from monetrun.core.event import Event
from monetrun.core.graph import check_bytes


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
