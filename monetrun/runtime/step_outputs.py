"""What the script holds of a step's outputs, and of its losses, once the next step has begun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# Where all of the last step's outputs are gone, and they were fewer than planned, its batch was smaller; unless they
# were less than this part of them: then most of what was planned is no outputs, but what a library has kept.
_SMALLER_BATCH = 4


@dataclass(frozen=True, slots=True)
class _Output:
    storage: StorageWeakRef
    address: int
    nbytes: int


class StepOutputs:
    """The outputs of the graphs of the present step and of the last one, and what the script has differentiated.

    A loss is no output of a graph, but the script lets go of it as it does of them: when it has the next one. And it
    may be large: the mean of ``F.mse_loss`` keeps the memory of all of its terms.
    """

    def __init__(self) -> None:
        self._present: list[_Output] = []  # of graphs
        self._losses: list[_Output] = []
        self._last: list[_Output] = []  # of the step before, but for those that were seen to be freed
        self._freed: list[int] = []  # the bytes of these, ascending

    def given(self, outputs: Iterable[Any]) -> None:
        """A graph's forward has given these."""
        self._present += _outputs(outputs)

    def differentiated(self, roots: Iterable[Any]) -> None:
        """The script differentiates these."""
        self._losses += _outputs(roots)

    def step_ended(self) -> None:
        """The present step is the last one from now on."""
        known = {output.storage.cdata for output in self._present}
        others = {output.storage.cdata: output for output in self._losses if output.storage.cdata not in known}
        self._last = [*self._present, *others.values()]
        self._present, self._losses, self._freed = [], [], []

    def are_gone(self) -> bool:
        """Whether the script has let go of all that graphs have given in the present step: no backward will come."""
        return all(output.storage.expired() for output in self._present)

    def last(self) -> dict[int, int]:
        """Those of the last step that are there: bytes by address."""
        return {o.address: o.nbytes for o in self._last if not o.storage.expired()}

    def missing_bytes(self, planned: int) -> int:
        """Of so many bytes of the last step's outputs that are planned to be there, those that are not."""
        there: list[_Output] = []
        gone: list[int] = []
        for output in self._last:
            if output.storage.expired():
                gone.append(output.nbytes)
            else:
                there.append(output)
        if gone:
            self._last, self._freed = there, sorted([*self._freed, *gone])
        return _missing(planned, self._freed, sum(o.nbytes for o in self._last))


def _outputs(tensors: Iterable[Any]) -> list[_Output]:
    found = (t for t in tensors if type(t) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(t))
    storages = (t.untyped_storage() for t in found)
    return [_Output(StorageWeakRef(s), s.data_ptr(), s.nbytes()) for s in storages]


def _missing(planned: int, gone: Sequence[int], there: int) -> int:
    """Of ``planned`` bytes of outputs those that are not there; ``gone``, ascending, are also others, never held."""
    left = planned - there
    if left <= 0:
        return 0
    if not there and planned >= sum(gone) >= planned // _SMALLER_BATCH > 0:
        return planned
    for nbytes in reversed(gone):
        if nbytes <= left:
            left -= nbytes
    return planned - there - left
