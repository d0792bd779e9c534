"""How much of a step is planned, where its model is not captured whole."""

from __future__ import annotations

from monetrun.core.plain_step import plain_step
from monetrun.core.step import LAST_GRADIENTS, LAST_OUTPUTS, OUTSIDE, StepRecord, replay


def planned_share(record: StepRecord) -> float:
    """The share of the plain step's peak, beyond what is allocated before the forward, that captured graphs allocate.

    The rest is allocated by what the script and the model run outside of them, where nothing can be chosen.
    """
    timeline = replay(*plain_step(record))
    last = [e.name in (LAST_GRADIENTS, LAST_OUTPUTS) for e in record.events]
    before = [(e, kept) for e, kept in zip(record.events, last, strict=True)][: timeline.peak_event]
    outside = sum(e.delta_bytes for e, kept in before if e.kind == OUTSIDE and not kept)
    held = sum(e.delta_bytes for e, kept in before if kept)
    if record.events and record.events[timeline.peak_event].kind == OUTSIDE:
        outside += record.events[timeline.peak_event].peak_bytes
    step = timeline.peak_bytes - record.base_bytes - held
    return min(1.0, max(0.0, 1.0 - outside / step)) if step > 0 else 0.0


# of steps as recorded; of others a share is an estimate, and a line says so
HOLDS = "the budget holds for all of a step like the recorded one"


def coverage(record: StepRecord) -> str:
    """One line on a model that is not captured whole: what breaks it, what is planned; empty where it is whole."""
    models = {b.module.partition(".")[0]: b for b in reversed(record.breaks)}
    if not models:
        return ""
    broken = "; ".join(f"{b.name} is planned in parts: {b.reason} ({b.where})" for b in reversed(models.values()))
    return f"{broken}; {planned_share(record):.0%} of the step's peak is planned, {HOLDS}"
