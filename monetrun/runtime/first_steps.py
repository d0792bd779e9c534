"""When a plan is compared with what its first steps take: once they have settled, and again after each correction."""

from __future__ import annotations

from monetrun.runtime.settings import CHECK, Settings
from monetrun.runtime.step_meter import SETTLING_STEPS, StepMeter

# An allocator that is short tells that it is, and not by how much: the second correction may have to go further.
_MOST_CORRECTIONS = 3


class FirstSteps:
    """Of one process; all ranks are corrected together, so that all look after the same steps.

    Args:
        steps: counts them.
        settings: of the process. The plan of a check is run as it is.
    """

    def __init__(self, steps: StepMeter, settings: Settings) -> None:
        self._steps = steps
        self._left = 0 if settings.mode == CHECK else _MOST_CORRECTIONS
        self._from_step = 0

    @property
    def have_settled(self) -> bool:
        """Whether the plan is to be looked at now; after that ``looked`` is called."""
        return bool(self._left) and self._steps.settled and self._steps.steps >= self._from_step

    def looked(self, corrected: bool) -> bool:
        """The plan was looked at; another one runs now (``corrected``, which is returned), or it is trusted."""
        self._left = self._left - 1 if corrected else 0
        self._from_step = self._steps.steps + SETTLING_STEPS
        return corrected
