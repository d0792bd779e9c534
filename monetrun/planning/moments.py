"""The moments of a training step, by name: what the page of ``monetrun explain --html`` shows along its time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.plan import Schedule
from monetrun.core.step import OUTSIDE, StepRecord, events_under
from monetrun.planning.explain import module_of


@dataclass(frozen=True, slots=True)
class Moment:
    """The run of an operator, or what the script does between two calls of graphs.

    Attributes:
        event: its index in the record's events.
        nbytes: the most allocated during it, of the whole step on one device.
        part: ``"forward"``, ``"backward"``, or ``"outside"``.
        what: the operator, without its module; of the script, an optimizer's step or empty.
        module: the operator's, by its path in the model.
        how: ``"again"`` where a forward operator runs in the backward pass, and the name of an implementation that is
            not the default.
    """

    event: int
    nbytes: int
    part: str
    what: str
    module: str
    how: tuple[str, ...]


def moments(record: StepRecord, schedules: Sequence[Schedule], profile: Sequence[int]) -> tuple[Moment, ...]:
    """``profile`` (of ``Explanation``, under the same schedules) with the names of its steps and stretches."""
    heights = iter(profile)
    found = []
    for i, event in enumerate(events_under(record, schedules)):
        if event.kind == OUTSIDE:
            found.append(Moment(i, next(heights), OUTSIDE, event.name, "", ()))
            continue
        graph, schedule = record.graphs[event.graph], schedules[event.graph]
        for step in schedule.forward if event.kind == FORWARD else schedule.backward:
            op = graph.operators[step.operator]
            how = ["again"] if event.kind == BACKWARD and op.phase == FORWARD else []
            if step.implementation:
                how.append(op.implementations[step.implementation].name)
            name = op.name.rpartition(".")[2]
            found.append(Moment(i, next(heights), event.kind, name, module_of(op.name), tuple(how)))
    return tuple(found)
