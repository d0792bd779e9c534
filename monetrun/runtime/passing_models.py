"""Models that come and go: copies of one that are trained for some steps, as in meta-learning.

Each is traced and compiled anew, which takes a hundred times as long as a step of a small model.
"""

from __future__ import annotations

from collections import deque

# So many models have come and gone, after so few steps of an optimizer each.
_MOST, _FEW_STEPS = 8, 32


class PassingModels:
    """Of one session."""

    def __init__(self) -> None:
        self._left: deque[int] = deque(maxlen=_MOST)  # the steps that were made by then

    def reason(self, gone: int, steps: int) -> str:
        """A further model is trained: why it is not planned, where those before it were passing ones; else empty.

        Args:
            gone: how many that were planned are not there any more, since the last time.
            steps: of optimizers, under a plan so far.
        """
        self._left.extend([steps] * gone)
        if len(self._left) < _MOST or steps - self._left[0] >= _MOST * _FEW_STEPS:
            return ""
        return (
            "models come and go after a few steps each, and to compile each one takes longer than its training; their"
            " budget is not enforced"
        )
