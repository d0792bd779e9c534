"""One stretch of a training step, as a trial run recorded it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from monetrun.core.graph import FORWARD

OUTSIDE = "outside"

# What FSDP2 does with a sharded module: see ``Action``.
GATHER, WAIT, FREE, REDUCE = "gather", "wait", "free", "reduce"
ACTIONS = (GATHER, WAIT, FREE, REDUCE)


def is_optimizer_step(kind: str, name: str) -> bool:
    """Whether a stretch of this kind and name is an optimizer's step."""
    return kind == OUTSIDE and name.endswith(".step")


@dataclass(frozen=True, slots=True)
class Action:
    """What FSDP2 does with a sharded module between calls of graphs.

    Attributes:
        kind: ``"gather"`` (its all-gather begins), ``"wait"`` (its parameters are there when it has ended), ``"free"``
            (of the gathered parameters) or ``"reduce"`` (the same after its backward, and the reduce-scatter of its
            gradients begins).
        module: index in ``Sharding.modules``.
        unless_kept: it is done only where the module does not keep its parameters between forward and backward.
    """

    kind: str
    module: int
    unless_kept: bool = False

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: there is no such kind or module.
        """
        if self.kind not in ACTIONS:
            raise ValueError(f"an action is of kind {self.kind!r}, it must be one of {', '.join(ACTIONS)}")
        if self.module < 0:
            raise ValueError(f"an action is of module {self.module}")


@dataclass(frozen=True, slots=True)
class Event:
    """One stretch of a training step.

    Attributes:
        kind: ``"forward"`` or ``"backward"`` (a call of a graph), or ``"outside"`` (the script between two calls).
        graph: index of the graph, -1 outside.
        delta_bytes: outside: allocated at its end, less at its start.
        peak_bytes: outside: the most allocated during it, less at its start, where ``dropped`` is freed.
        name: for messages (``"SGD.step"``).
        released: backward: ids of the graph's external tensors (its arguments, tangents) and outputs that only its
            saved values hold by then, then of gradients that are taken in this order as soon as they are final, and not
            kept; all are freed within the call (see ``freed_after``).
        dropped: outside: outputs and inputs (graph, id) that the script holds no more at its end; they are freed then,
            beside ``delta_bytes``, if the backward under the schedule does not read them.
        requests: outside, where the allocator records them (CUDA): bytes requested, in order; ``-n`` frees what the
            step's ``n``-th such request got.
        read_as: the inputs (graph, id) of other calls that each of ``dropped`` is as well: if the backward of one reads
            it, it is not freed either. Empty: none.
        dropped_after: how many of ``requests`` come before each of ``dropped`` is freed; empty: all of them.
        batch_freed: outside: parts of ``DeviceMemory.batch``, by their place there, that are freed where the step's
            next inputs replace them, and how many of ``requests`` come before each.
        freed: outside: bytes of each other tensor of a graph that is freed (gradients that are added to others), and
            how many of ``requests`` come before; None where that was not recorded.
        elsewhere_bytes: the part of ``delta_bytes`` on other streams than the graphs', which ``requests`` have not.
        action: outside: what FSDP2 does in it, if that is known.
    """

    kind: str
    graph: int = -1
    delta_bytes: int = 0
    peak_bytes: int = 0
    name: str = ""
    released: tuple[int, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    requests: tuple[int, ...] = ()
    elsewhere_bytes: int = 0
    dropped_after: tuple[int, ...] = ()
    batch_freed: tuple[tuple[int, int], ...] = ()
    freed: tuple[tuple[int, int], ...] | None = None
    action: Action | None = None
    read_as: tuple[tuple[tuple[int, int], ...], ...] = ()


def calls_of_graphs(events: Iterable[Event]) -> Counter[int]:
    """How often each graph is called, by its index."""
    return Counter(event.graph for event in events if event.kind == FORWARD)
