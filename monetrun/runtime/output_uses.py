"""Which outputs of a graph the script differentiates: what a step takes depends on that, and one step was recorded."""

from __future__ import annotations

Form = tuple[tuple[int, ...] | None, ...]
"""The strides of each output's gradient; None where there is none."""


class OutputUses:
    """Those of the recorded step: seen while it was recorded here, else in this process's first steps.

    A training step of several optimizers has made some of its backwards only when the first of them has stepped.
    """

    def __init__(self) -> None:
        self._recorded: set[tuple[int, Form]] = set()
        self._here = False

    def are_as_recorded(self, graph: int, form: Form, *, recording: bool, early: bool) -> bool:
        """A backward begins. Gives whether the recorded step has one with gradients of these outputs.

        Args:
            graph: its number in the record; -1: it is not in it.
            form: of each output's gradient.
            recording: this step is recorded.
            early: it is one of the first steps under a plan.
        """
        self._here |= recording
        if recording or (early and not self._here):
            self._recorded.add((graph, form))
        return graph < 0 or (graph, form) in self._recorded
