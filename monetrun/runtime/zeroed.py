"""When the script zeroes gradients in the recorded step, and which of the last step's that frees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from monetrun.core.graph import BACKWARD
from monetrun.planning.intervals import Stretch
from monetrun.runtime.sharding import local


class ZeroedGradients:
    """Calls of ``zero_grad`` in the recorded step: from the second on, the last step's gradients are there until then.

    Those that the step has computed itself are none of them. Without ``set_to_none`` they stay, and new ones are added.

    Attributes:
        freed_now: of steps before the recorded one (``monetrun.apply`` after plain steps): address and bytes of the
            gradients that are freed in it, by the stretch after which they are.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int | None, list[torch.Tensor]]] = []  # by the stretch; None: zeroed, not freed
        self._known: set[int] = set()
        self._there: dict[int, int] = {}
        self.freed_now: dict[int, dict[int, int]] = {}

    def step_begins(self, gradients: Mapping[int, int]) -> None:
        """The recorded step begins with these, of a step before it: bytes by address."""
        self._there = dict(gradients)

    def zeroing(self, parameters: Iterable[torch.Tensor], set_to_none: bool, stretch: int) -> None:
        """The script calls it after this stretch."""
        parameters = list(parameters)
        absent = [p for p in parameters if p.grad is None and id(p) not in self._known]
        self._known.update(id(p) for p in absent)
        self._found.append((stretch if set_to_none else None, absent))
        if set_to_none:
            places = {local(p.grad).untyped_storage().data_ptr() for p in parameters if p.grad is not None}
            found = {place: self._there.pop(place) for place in places & self._there.keys()}
            self.freed_now.setdefault(stretch, {}).update(found)

    @property
    def bytes_freed_now(self) -> int:
        """Of ``freed_now``."""
        return sum(n for found in self.freed_now.values() for n in found.values())

    @property
    def places_freed_now(self) -> frozenset[int]:
        """Addresses of ``freed_now``."""
        return frozenset(place for found in self.freed_now.values() for place in found)

    def freed(self, stretches: Sequence[Stretch], storages_of: Mapping[int, Mapping[int, int]]) -> dict[int, int]:
        """Bytes of the last step's gradients, by the stretch after which they are freed.

        ``storages_of``: the gradient of each parameter, by its id: bytes of its storage, by the storage's own number.
        Those of FSDP2's parameters are parts of one.
        """
        last_backward = max((i for i, s in enumerate(stretches) if s.kind == BACKWARD), default=0)
        found: dict[int, int] = {}
        counted: set[int] = set()
        for stretch, parameters in self._found:
            freed = {k: n for p in parameters for k, n in storages_of.get(id(p), {}).items() if k not in counted}
            counted.update(freed)
            if freed and stretch != 0:
                after = last_backward if stretch is None else stretch
                found[after] = found.get(after, 0) + sum(freed.values())
        return found
