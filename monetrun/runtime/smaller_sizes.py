"""Calls with sizes that are new, and no larger than those of a call whose plain step fits: they run as they are.

To make a graph of new sizes takes tenths of a second, or seconds; scripts with molecules, graphs or padded texts have
some in nearly every step. No schedule is needed for what fits as it is, and of smaller sizes the plain step takes less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# So many calls are known by their sizes, and so many of them are looked at for larger ones.
_MOST_KNOWN, _MOST_LARGEST = 4096, 64
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class _Call:
    """What of a call decides its graph: its kind, to be compared, and the sizes of its tensors."""

    kind: Any
    sizes: tuple[int, ...]

    def covers(self, other: _Call) -> bool:
        """Whether the other call is of this kind, and nowhere larger."""
        return self.kind == other.kind and all(a >= b for a, b in zip(self.sizes, other.sizes, strict=True))


class SmallerSizes:
    """Of one model."""

    def __init__(self) -> None:
        self._known: dict[_Call, str] = {}  # calls that have run captured: the fingerprint of their graph
        self._largest: list[_Call] = []  # of these, those that no other one covers
        self._generation = -1

    def are_small(self, fits: Callable[[str], bool], args: Any, kwargs: Any) -> bool:
        """A call of the model begins; gives whether it is to run as it is, within the budget.

        ``fits``: whether the plain step of a graph fits now, by its fingerprint.
        """
        this = _of(args, kwargs)
        return this not in self._known and any(c.covers(this) and fits(self._known[c]) for c in self._largest)

    def captured(self, began: Sequence[str], generation: int, args: Any, kwargs: Any) -> None:
        """For a call a graph was captured, and it has ended.

        Args:
            began: the graphs that it ran.
            generation: another one: all is captured anew.
            args: of the call.
            kwargs: of the call.
        """
        if self._generation != generation or len(self._known) >= _MOST_KNOWN:
            self._known, self._largest, self._generation = {}, [], generation
        if len(began) == 1:
            this = _of(args, kwargs)
            self._known[this] = began[0]
            self._largest = [this, *(c for c in self._largest if not this.covers(c))][:_MOST_LARGEST]


def is_small(call: Any, args: Any, kwargs: Any) -> bool:
    """A ``PlannedCall`` begins; gives whether it runs as it is, since its sizes are new and small enough."""
    if (running := call.engine.running) is None:
        return False
    running.room.call_begins()
    whole = call.broken is None and call.model is None and call.engine.recorder is None
    if not whole or call.backend is None or call.backend.captured < 2 or call._generation != call.engine.generation:
        return False  # of one graph: all calls so far had the same sizes
    from monetrun.runtime.running_plan import fits_plainly  # imports the planner, too slow for ``import torch``

    small = call.sizes.are_small(lambda graph: fits_plainly(running, graph), args, kwargs)
    if small:
        running.enforcement.enforce()
    return bool(small)


def _of(args: Any, kwargs: Any) -> _Call:
    leaves, structure = torch.utils._pytree.tree_flatten((args, kwargs))
    return _Call((structure, *map(_kind, leaves), _autocast(leaves)), tuple(n for v in leaves for n in _sizes(v)))


def _kind(value: Any) -> Any:
    if _has_sizes(value):
        return type(value), value.dtype, value.device, value.requires_grad, value.dim()
    return value if isinstance(value, _PLAIN) else (type(value), id(value))


def _sizes(value: Any) -> Sequence[int]:
    return value.shape if _has_sizes(value) else ()


def _has_sizes(value: Any) -> bool:
    """Whether it is a tensor of which others may be smaller: a nested one's lengths are no numbers."""
    return isinstance(value, torch.Tensor) and not value.is_nested


def _autocast(leaves: Sequence[Any]) -> Any:
    kinds = {value.device.type for value in leaves if isinstance(value, torch.Tensor)}
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if torch.is_autocast_enabled(kind))
