"""Calls of captured graphs that are seen: by who records a step, and by the meter of steps under a plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import torch

from monetrun.capture.in_turn import Turns
from monetrun.core.graph import BACKWARD, Graph
from monetrun.runtime.call_timing import Run
from monetrun.runtime.output_uses import Form
from monetrun.runtime.step_meter import StepMeter

T = TypeVar("T", bound=Callable[..., Any])


class CallObserver(Protocol):
    """Sees the calls of captured graphs with their tensors."""

    def capturing(self) -> AbstractContextManager[None]:
        """A graph is captured in this context."""

    def call_begins(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph's forward or backward is about to run on these arguments (see ``execute.build``)."""

    def call_ended(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """It has run; a forward with these results."""

    def call_failed(self, error: BaseException) -> None:
        """It has failed."""

    def gradients_given(self, graph: int, operator: int, nodes: Sequence[Any], gradients: Sequence[Any]) -> None:
        """A graph's backward, which runs, is about to give gradients.

        Args:
            graph: its number.
            operator: of the backward that has run last; -1: none has.
            nodes: their nodes in the joint graph.
            gradients: the tensors.
        """


class RoomKeeper(Protocol):
    """Sees that there is room for the steps under a plan."""

    def check_room(self, fingerprint: str) -> None:
        """A graph's forward is about to run.

        Raises:
            MemoryShort: there is no room for its step.
        """

    def outputs_given(self, outputs: Sequence[Any]) -> None:
        """It has given these."""

    def saved(self, fingerprint: str, tensor: Any) -> None:
        """It has saved this for its backward, which nothing else holds."""

    def gradients_come(self, graph: int, form: Form, *, recording: bool) -> None:
        """A backward is about to run, see ``OutputUses.are_as_recorded``."""


def with_uses(keeper: RoomKeeper, number: int, positions: Sequence[int], run: T, *, recording: bool) -> T:
    """``run``, which runs the backward of the graph with this number; ``positions``: of its outputs' gradients."""

    def called(arguments: list[Any]) -> Any:
        keeper.gradients_come(number, _strides(arguments, positions), recording=recording)
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return cast(T, called)


def _strides(arguments: Sequence[Any], positions: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
    """Of the gradients at these positions; apart, since what names one of them would keep it from being freed."""
    return tuple(None if arguments[k] is None else arguments[k].stride() for k in positions)


def observed(observer: CallObserver | None, phase: str, number: int, run: Run) -> Run:
    """``run``, the forward or backward (``phase``) of the graph with this number, seen by ``observer``."""
    if observer is None:
        return run

    def called(arguments: list[Any]) -> Any:
        observer.call_begins(phase, number, arguments)
        try:
            results = run(arguments)
        except Exception as error:
            observer.call_failed(error)
            raise
        observer.call_ended(phase, number, results)
        return results

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def with_room(room: RoomKeeper, graph: Graph, outputs: int, run: Run) -> Run:
    """``run``, a forward of ``graph`` with so many ``outputs``, which begins only where ``room`` raises nothing."""
    fingerprint, own = graph.fingerprint, list[int]()  # the place of one of the saved values, once known

    def called(arguments: list[Any]) -> Any:
        room.check_room(fingerprint)
        given = set() if own else _storages(arguments)
        results = run(arguments)
        room.outputs_given(results[:outputs])
        if not own:
            own.append(_largest(results, outputs, given | _storages(results[:outputs])))
        if own[0] >= 0:
            room.saved(fingerprint, results[own[0]])
        return results

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def _largest(results: Sequence[Any], outputs: int, others: set[int]) -> int:
    """The place of the largest saved value (those after the ``outputs``) of no storage in ``others``; -1: none."""
    places = [k for k, r in enumerate(results) if k >= outputs and _storages([r]) - others]
    return max(places, key=lambda k: results[k].untyped_storage().nbytes(), default=-1)


def _storages(values: Sequence[Any]) -> set[int]:
    return {v.untyped_storage()._cdata for v in values if type(v) in (torch.Tensor, torch.nn.Parameter)}


def measured(steps: StepMeter, phase: str, number: int, run: Run) -> Run:
    """``run``, the forward or backward (``phase``) of the graph with this number, measured by ``steps``."""

    def called(arguments: list[Any]) -> Any:
        steps.call_begins()
        results = run(arguments)
        steps.call_ended(phase, number)
        return results

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def measured_by_turns(steps: StepMeter, number: int, run: Turns) -> Turns:
    """``measured`` of a backward that gives its gradients by turns."""

    def called(arguments: list[Any]) -> Generator[list[Any], None, Any]:
        steps.call_begins()
        try:
            results = yield from run(arguments)
        except GeneratorExit:  # no further gradient is wanted
            steps.call_ended(BACKWARD, number)
            raise
        steps.call_ended(BACKWARD, number)
        return results

    return called


def observed_by_turns(
    observer: CallObserver, number: int, turns: Sequence[tuple[int, Sequence[Any]]], run: Turns
) -> Turns:
    """A backward that gives its gradients by turns, seen by ``observer``.

    ``turns``: of each the operator that runs before it, and its gradients' nodes.
    """

    def called(arguments: list[Any]) -> Generator[list[Any], None, Any]:
        observer.call_begins(BACKWARD, number, arguments)
        try:
            for (operator, nodes), gradients in zip(turns, run(arguments), strict=True):
                observer.gradients_given(number, operator, nodes, gradients)
                yield gradients
        except GeneratorExit:  # no further gradient is wanted
            observer.call_ended(BACKWARD, number, ())
            raise
        except Exception as error:
            observer.call_failed(error)
            raise
        observer.call_ended(BACKWARD, number, ())
        return None

    return called
