"""Train a model plainly and under a plan, in turns in one process: peaks are the allocator's, seconds are per step."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from monetrun.capture.meter import Meter
from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, MonetrunError, NoPlanInTime
from monetrun.core.options import Options
from monetrun.core.plain_step import plain_step
from monetrun.core.plan import Plan, Schedule
from monetrun.core.round_graph import RoundGraph
from monetrun.core.step import StepRecord, replay
from monetrun.planning import planner
from monetrun.planning.planner import Baseline
from monetrun.runtime.allocation_limit import set_limit
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings
from monetrun.solve import greedy
from monetrun.solve.least import least_budget

WARM_UP_STEPS = 6  # compilation, and the early calls that are timed one by one
PEAK_STEPS = 2


class Trainer:
    """A model, its loss and its optimizer; ``step`` trains once and gives the seconds.

    Attributes:
        peak: the highest that was seen within steps, in bytes of the process. Under a plan monetrun starts new peaks
            when a step's forward begins and when its optimizer has ended: they are read before.
    """

    def __init__(self, model: nn.Module, loss: Callable[[], torch.Tensor], meter: Meter) -> None:
        self.model, self.loss, self.meter = model, loss, meter
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self.look())
        self.peak = Peak(0, None)

    def step(self) -> float:
        """One training step, waited for."""
        self.meter.synchronize()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.look()
        self.loss().backward()
        self.optimizer.step()
        self.meter.synchronize()
        return time.perf_counter() - start

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile the model is not on the GPU, where what is reserved cannot be told apart by model."""
        device = next(self.model.parameters()).device
        if device.type != "cuda":
            release_cached()
            yield
            return
        self._move(torch.device("cpu"))
        release_cached()
        try:
            yield
        finally:
            self._move(device)

    def _move(self, device: torch.device) -> None:
        self.optimizer.zero_grad()
        self.model.to(device)
        for state in self.optimizer.state.values():
            state.update({k: v.to(device) for k, v in state.items() if isinstance(v, torch.Tensor)})

    def look(self) -> None:
        """Read the counters."""
        reserved = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else None
        if reserved is not None:
            reserved = max(reserved, self.peak.reserved or 0)
        self.peak = Peak(max(self.peak.allocated, self.meter.peak_bytes()), reserved)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most that was allocated, and reserved (None on a CPU), over some steps, in bytes."""

    allocated: int
    reserved: int | None

    @property
    def bounded(self) -> int:
        """What a budget bounds: reserved bytes where there are any."""
        return self.allocated if self.reserved is None else self.reserved

    def less(self, others: Peak) -> Peak:
        """Without what lies there beside the model."""
        reserved = None if self.reserved is None or others.reserved is None else self.reserved - others.reserved
        return Peak(self.allocated - others.allocated, reserved)


def peak_of(trainer: Trainer, steps: int = PEAK_STEPS) -> Peak:
    """The peaks of the process over ``steps`` steps, with nothing cached before them."""
    release_cached()
    trainer.meter.reset_peak()
    trainer.peak = Peak(0, None)
    for _ in range(steps):
        trainer.step()
    trainer.look()
    return trainer.peak


def held_now(meter: Meter) -> Peak:
    """What the process holds, with nothing cached."""
    release_cached()
    return Peak(meter.current_bytes(), torch.cuda.memory_reserved() if torch.cuda.is_initialized() else None)


def release_cached() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def paired(plain: Trainer, other: Trainer, pairs: int) -> list[tuple[float, float]]:
    """Seconds of both models' steps, in turns; who begins a pair changes from one to the next."""
    plain.step(), other.step()
    rows = []
    for i in range(pairs):
        seconds = {t: t.step() for t in ((plain, other) if i % 2 == 0 else (other, plain))}
        rows.append((seconds[plain], seconds[other]))
    return rows


class Reference:
    """A model trained eagerly: what it holds between steps, and its peak, in bytes, measured while it is alone."""

    def __init__(self, make: Callable[[], Trainer], meter: Meter) -> None:
        before = held_now(meter)
        self.trainer = make()
        self.seconds = [self.trainer.step() for _ in range(3)][-1]
        self.peak = peak_of(self.trainer).less(before)
        self.held_bytes = held_now(meter).allocated - before.allocated
        with self.trainer.aside():
            self._beside_bytes = held_now(meter).reserved

    @property
    def activation_bytes(self) -> int:
        """The activation peak: without weights, buffers, gradients, optimizer state and batch."""
        return self.peak.allocated - self.held_bytes

    def share(self, peak: Peak) -> float:
        """``peak`` of such a model, as a share of the activation peak."""
        return (peak.allocated - self.held_bytes) / self.activation_bytes

    def others(self) -> Peak:
        """What the process holds between steps beside one such model; on a GPU while this one is ``aside``."""
        return Peak(self.trainer.meter.current_bytes() - self.held_bytes, self._beside_bytes)


class Recorded:
    """Such a model, to be trained under plans: its step is recorded, and its operators are timed, once."""

    def __init__(self, make: Callable[[], Trainer]) -> None:
        release_cached()  # what is not needed any more would count as held beside the model
        session = Session(Settings(mode=RUN, strict=True))
        session.watch_process()
        try:
            self.trainer = make()
            session.put_triggers([self.trainer.model])
            self.trainer.step()
            recorder = session.engine.recorder
            self.record: StepRecord = recorder.record(recorder.measure(None))
        finally:
            session.close()
            torch._dynamo.reset()
        self.plain = replay(*plain_step(self.record))
        self._frugal: dict[tuple[bool, tuple[str, ...] | None], tuple[Schedule, ...]] = {}

    def baseline(self, options: Options) -> Baseline:
        """The plain step, and the most frugal one of what ``options`` allow: planning begins with it."""
        key = (options.recompute, options.implementations)
        if key not in self._frugal:
            pairs = zip(self.record.graphs, self.record.costs, strict=True)
            self._frugal[key] = tuple(greedy.most_frugal(g, c, replace(options, seconds=6.0)) for g, c in pairs)
        return planner.baseline(self.record, self._frugal[key])

    def plan(self, budget_bytes: int, algorithm: str, options: Options) -> Plan:
        """The plan for a budget of the process.

        Raises:
            InfeasibleBudget, NoPlanInTime: as ``planner.plan_step``.
        """
        base = self.baseline(options)
        if base.frugal.peak_bytes > budget_bytes and algorithm == "greedy":
            # looking further takes the other solvers
            raise planner.BudgetBelowSmallest(self.record, budget_bytes, base)
        return planner.plan_step(self.record, budget_bytes, algorithm, options, base)

    def least_peaks(self, seconds: float) -> tuple[int, int]:
        """The lowest peak that is known, and one that no schedule is below, in bytes of the process.

        Args:
            seconds: of search.

        Raises:
            MonetrunError: the step is not one forward and one backward pass.
        """
        base = planner.baseline(self.record)
        if len(self.record.rounds) != 1 or not isinstance(base.rounds[0], RoundGraph):
            raise MonetrunError("the step is not one forward and one backward pass")
        joined = base.rounds[0]
        found = least_budget(joined.graph, joined.costs, Options(seconds=seconds))
        beside = base.frugal.start_bytes[self.record.rounds[0][0]]  # weights, the batch, the optimizer's state
        return beside + found.peak_bytes, beside + found.bound_bytes

    @contextlib.contextmanager
    def following(self, plan: Plan) -> Iterator[Session]:
        """Meanwhile the model trains under ``plan``, and the process may allocate no more than its budget."""
        session = Session(Settings(mode=RUN, strict=True, quiet=True), plan)
        session.watch_process()
        try:
            session.optimizer_made(self.trainer.optimizer)
            session.put_triggers([self.trainer.model])
            yield session
        finally:
            session.close()
            torch._dynamo.reset()


def run_planned(
    plain: Reference,
    recorded: Recorded,
    plan: Plan,
    pairs: int,
    look: Callable[[Trainer], Mapping[str, Any]] = lambda trainer: {},
) -> dict[str, Any]:
    """Train under ``plan``: its peak while the budget is enforced, then its seconds beside the eager model's.

    ``look`` is called while the plan still runs, for more to say.
    """
    started = time.perf_counter()
    trainer = recorded.trainer
    device = next(trainer.model.parameters()).device
    with recorded.following(plan) as session:
        peak = refused = None
        with plain.trainer.aside():
            try:
                peak = warm_peak(trainer)
            except torch.OutOfMemoryError as error:  # on CUDA the cap is on what is reserved: fragments count
                refused = first_line(error)
            if peak is None:  # only here, since the exception held the step's tensors
                set_limit(device, None)
                peak = warm_peak(trainer)
            set_limit(device, None)
            others = plain.others()
        if set(session.engine.running.schedules) != {g.fingerprint for g in plan.graphs}:
            raise MonetrunError("the graph that was captured is not the one that was planned")
        rows = paired(plain.trainer, trainer, pairs)
        seen = look(trainer)
    peak, planned = peak.less(others), Peak(plan.planned_peak_bytes - others.allocated, None)
    return {
        "budget_bytes": plan.budget_bytes - others.bounded,
        "planned_peak_bytes": planned.allocated,
        "planned_share": plain.share(planned),
        "planned_ratio": 1 + plan.overhead,
        "bound_ratio": 1 + plan.bound,
        "planned_seconds": statistics.median(a for a, _ in rows) + plan.overhead * recorded.plain.seconds,
        "refused_by_the_cap": refused,
        **measured(plain, peak, rows),
        **seen,
        "seconds_until_measured": time.perf_counter() - started,
    }


def warm_peak(trainer: Trainer) -> Peak:
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    return peak_of(trainer)


def measured(plain: Reference, peak: Peak, rows: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """What every cell beside the eager one says; ``peak`` is the model's own."""
    ratios = [b / a for a, b in rows]
    quartiles = statistics.quantiles(ratios, method="inclusive")[::2] if len(ratios) > 1 else ratios * 2
    return {
        "allocated_bytes": peak.allocated,
        "reserved_bytes": peak.reserved,
        "measured_share": plain.share(peak),
        "seconds": statistics.median(b for _, b in rows),
        "eager_seconds": statistics.median(a for a, _ in rows),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": quartiles,
        "pairs": len(rows),
    }


def refusal(error: InfeasibleBudget | NoPlanInTime, budget_bytes: int, others_bytes: int) -> str:
    """Why there is no plan for a budget of one model, in its bytes; those of ``error`` are of the process.

    ``others_bytes``: what the process holds beside the model.
    """
    budget = format_bytes(budget_bytes)
    if isinstance(error, NoPlanInTime):
        return f"no plan within {budget} was found in the solver's time"
    return f"budget {budget} < smallest feasible {format_bytes(error.smallest_bytes - others_bytes, exact=True)}"


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
