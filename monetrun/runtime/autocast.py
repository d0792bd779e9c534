"""Under which autocast the script calls the backward of its models: known once it does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from monetrun.capture import double_backward
from monetrun.capture.backward_autocast import OFF, State, present
from monetrun.runtime.unplannable_use import compiled_calls

_ROUNDING = (
    "the script calls backward under autocast, for which the model was not compiled yet: "
    "this step's gradients may differ by rounding"
)

# A script may call some backwards under autocast and others not: models are not compiled anew for ever.
_MOST_CHANGES = 4


class BackwardAutocast:
    """The autocast that backwards are traced for.

    Args:
        warn: called where a step differs from eager's.

    Attributes:
        state: that autocast.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.state: State = OFF
        self._warn = warn
        self._changes = 0

    def changes(self, roots: Iterable[Any], *, replace: bool) -> bool:
        """The script is about to differentiate ``roots``, perhaps under an autocast that makes a backward another one.

        Args:
            roots: tensors.
            replace: the gradients are replaced by those of eager, where the script still holds the model's inputs.

        Returns:
            Whether models have to be compiled anew.
        """
        now = present()
        if now == self.state == OFF:
            return False
        calls = [call for call in compiled_calls(roots) if double_backward.traced_otherwise(call, now)]
        if replace:
            if not all(map(double_backward.can_run_again, calls)):
                self._warn(_ROUNDING)
            double_backward.run_again(calls)
        if not calls or now == self.state or self._changes == _MOST_CHANGES:
            return False
        self.state = now
        self._changes += 1
        return True
