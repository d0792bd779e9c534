"""When the script zeroes gradients in the recorded step, and which of the last step's that frees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from monetrun.core.graph import BACKWARD
from monetrun.planning.intervals import Stretch


class ZeroedGradients:
    """Calls of ``zero_grad`` in the recorded step: from the second on, the last step's gradients are there until then.

    Those that the step has computed itself are none of them. Without ``set_to_none`` they stay, and new ones are added.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int | None, list[torch.Tensor]]] = []  # by the stretch; None: zeroed, not freed
        self._known: set[int] = set()

    def zeroing(self, parameters: Iterable[torch.Tensor], set_to_none: bool, stretch: int) -> None:
        """The script calls it after this stretch."""
        absent = [p for p in parameters if p.grad is None and id(p) not in self._known]
        self._known.update(id(p) for p in absent)
        self._found.append((stretch if set_to_none else None, absent))

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
