"""Optimizers' steps in a recorded step: their state, and what they allocate for a while."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monetrun.core.event import OUTSIDE
from monetrun.core.graph import Graph
from monetrun.runtime.beside_operators import BesideOperators
from monetrun.runtime.device_recorder import DeviceRecorder
from monetrun.runtime.stretches import StretchMeter


class OptimizerSteps:
    """Those of one recorded step.

    Args:
        stretch_meter: of the step.
        end_stretch: ends its present stretch.
        memory: of the device, on CUDA.
        beside: gets what steps within a call allocate beside the operators of gradients.

    Attributes:
        state_bytes: what stays allocated.
        passing_bytes: by the stretch that is an optimizer's step: what it allocates beside that.
        state_within: part of ``state_bytes``, of steps while a backward's call runs: by the stretch.
    """

    def __init__(
        self,
        stretch_meter: StretchMeter,
        end_stretch: Callable[..., None],
        memory: DeviceRecorder | None,
        beside: BesideOperators,
    ) -> None:
        self.state_bytes = 0
        self.passing_bytes: dict[int, int] = {}
        self.state_within: Counter[int] = Counter()
        self._meter, self._stretch_meter, self._memory = stretch_meter.meter, stretch_meter, memory
        self._end_stretch = end_stretch
        # in a backward's call that has given gradients: number, graph and operator of what it has run last
        self._turn: tuple[int, Graph, int] | None = None
        self._beside = beside
        self._before_bytes = self._given_bytes = 0
        self._ended = 0  # steps within a backward, but in no call of a graph, of which ``ended`` is told later

    def gradients_given(self, number: int, graph: Graph, operator: int, gradients: Sequence[Any]) -> None:
        """The backward of a graph is about to give these, after this operator (-1: none); then a hook may step."""
        self._turn = number, graph, operator
        # those that are given before any operator come from outside, and the model may have them freed by the first
        early = operator < graph.forward_count
        self._given_bytes = sum(g.nbytes for g in gradients if isinstance(g, torch.Tensor)) if early else 0

    def call_ended(self) -> None:
        """A call of a graph has ended."""
        self._turn = None

    def begins(self) -> None:
        """An optimizer's step begins."""
        self._end_stretch(OUTSIDE)
        self._meter.watch()

    def ended(self, name: str) -> None:
        """It has ended."""
        if self._ended:
            self._ended -= 1
        else:
            self._step_ended(name)

    def _step_ended(self, name: str) -> None:
        stretches = self._stretch_meter.stretches
        self.passing_bytes[len(stretches)] = self._meter.passing_bytes() or 0
        self._end_stretch(OUTSIDE, name=f"{name}.step")
        self.state_bytes += max(0, stretches[-1].end_bytes - stretches[-1].start_bytes)

    def begins_within(self) -> None:
        """A hook begins an optimizer's step within a backward; ``begins`` is called when that has ended."""
        if self._turn is None:
            self.begins()
            return
        self._stretch_meter.keep_peak()
        self._before_bytes = self._meter.current_bytes()

    def ended_within(self, name: str) -> None:
        """It has ended."""
        if self._turn is None:
            self._step_ended(name)
            self._ended += 1
            return
        now, peak = self._meter.current_bytes(), self._meter.peak_bytes()
        if grown := max(0, now - self._before_bytes):
            self.state_bytes += grown
            self.state_within[len(self._stretch_meter.stretches)] += grown
            if self._memory is not None:
                self._memory.stays(grown)
        self._beside.add_after(*self._turn, self._given_bytes + peak - max(now, self._before_bytes))
