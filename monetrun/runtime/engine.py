"""What a worker does once its model trains: record a step, plan it, run the plan, and keep other shapes within it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from monetrun.capture import cost, roofline
from monetrun.capture.cost import OperatorCost
from monetrun.capture.guards import FailedGuards
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import meter_for
from monetrun.core import codec
from monetrun.core.budget import format_bytes, parse, resolve
from monetrun.core.errors import InfeasibleBudget, MonetrunError, PlanMismatch
from monetrun.core.graph import BACKWARD, FORWARD, Graph, without
from monetrun.core.options import Options, parse_kinds
from monetrun.core.plan import Plan, Schedule, Solution
from monetrun.core.simulate import simulate
from monetrun.core.step import StepRecord, call, replay
from monetrun.machine.device import default_kind, query, smallest
from monetrun.machine.store import Store
from monetrun.ops import kernels
from monetrun.planning import planner
from monetrun.runtime import backend as backends
from monetrun.runtime.backend import Backend
from monetrun.runtime.recorder import Recorder, cost_key
from monetrun.runtime.settings import PROBE
from monetrun.solve import greedy

if TYPE_CHECKING:
    from monetrun.runtime.worker import Session

_log = logging.getLogger("monetrun")

# What a loss allocates between forward and backward, as a multiple of the model's outputs, where no trial run has
# seen it: log-probabilities, their gradient, and the logits' gradient.
_LOSS_COPIES = 3


class Engine:
    """Runs the planned models of one process.

    Attributes:
        generation: goes up when models have to be compiled anew.
        peak_bytes: the most that was allocated in any training step so far.
    """

    def __init__(self, session: Session, device: torch.device) -> None:
        self.session = session
        self.settings = session.settings
        self.device = device
        self.meter = meter_for(device)
        if not kernels.load(device.type):
            _log.info("torch.ops.monet runs its references: %s", kernels.unavailable_reason(device.type))
        self.store = Store(Path(self.settings.cache_folder)) if self.settings.cache_folder else None
        self.known: dict[str, OperatorCost] = {}
        if self.store is not None:
            self.known = self.store.get_mapping("costs", cost_key(device), OperatorCost)
        self.generation = 0
        self.peak_bytes = 0
        self.first_step_done = False
        self.steps = 0
        self._stepped = False
        self._compiled = False
        self.budget_bytes = self.settings.budget_bytes
        self.plan: Plan | None = session.plan
        self.record: StepRecord | None = None
        # what the weights forbid: (structural fingerprint of a graph, operator, name of the implementation)
        self.forbidden: set[tuple[str, int, str]] = set()
        self.schedules: dict[str, Schedule] = {}
        self.recorder: Recorder | None = None
        if self.plan is None and self.settings.plan_file:
            self.plan = codec.loads(Plan, Path(self.settings.plan_file).read_text())
        if self.plan is None:
            self.recorder = Recorder(self.meter, device, self.known, roofline.parse(self.settings.cost_model))
        else:
            self._follow(self.plan)
            if self.settings.record_file:
                self._know(codec.loads(StepRecord, Path(self.settings.record_file).read_text()))
            self._agree(self.plan.digest)

    # ---- the plan

    def _follow(self, plan: Plan) -> None:
        if plan.torch_version.split("+")[0] != torch.__version__.split("+")[0]:
            raise PlanMismatch(
                f"the plan was made with torch {plan.torch_version}, this is {torch.__version__}",
                "plan again: its graphs may differ",
            )
        self.plan = plan
        self.schedules = {g.fingerprint: g.schedule for g in plan.graphs}
        self.budget_bytes = plan.budget_bytes
        self._limit(plan.budget_bytes)

    def _limit(self, nbytes: int) -> None:
        """From now on, allocating past the budget raises torch's OutOfMemoryError."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.device)
        elif self.meter.exact:
            from monetrun.capture import cpu_allocator

            cpu_allocator.set_limit(nbytes)

    def _agree(self, digest: str) -> None:
        """All ranks run rank 0's plan.

        Raises:
            PlanMismatch: this rank has another one.
        """
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        if torch.distributed.get_world_size() == 1:
            return
        said = [digest]
        torch.distributed.broadcast_object_list(said, src=0)
        if said[0] != digest:
            raise PlanMismatch(
                f"rank {torch.distributed.get_rank()} has plan {digest}, rank 0 has {said[0]}",
                "give all nodes the same --plan, or clear their caches (monetrun cache clear)",
            )

    def plan_now(self) -> None:
        """Plan the recorded step, in rank 0 for all, and let every model be compiled to the plan."""
        assert self.recorder is not None
        self._drop_traces()
        record = self.recorder.record(self.recorder.measure(self.store))
        self.known.update(self.recorder.known)
        plan = self._of_rank_0(lambda: self._planned(record))
        self._know(record)
        self._follow(plan)
        self.recorder = None
        self.generation += 1

    def plan_without(self, failed: FailedGuards) -> None:
        """The weights forbid what a schedule uses: plan again without it, and let every model be compiled anew.

        All ranks have the same weights, so that all of them get here in the same step.

        Raises:
            InfeasibleBudget, NoPlanInTime: without it nothing fits the budget.
        """
        rest = f" and {len(failed.guards) - 1} more" if len(failed.guards) > 1 else ""
        self.session.warn(f"the weights no longer allow {failed.guards[0].name}{rest}: planning again without")
        structure, operators = failed.graph.structural_fingerprint, failed.graph.operators
        for guard in failed.guards:
            name = operators[guard.operator].implementations[guard.implementation].name
            self.forbidden.add((structure, guard.operator, name))
        self.schedules.pop(failed.graph.fingerprint, None)
        if self.record is not None:
            record = replace(self.record, graphs=tuple(self._allowed(g) for g in self.record.graphs))
            if record != self.record:
                self.record = record
                options = self.options()
                self._follow(
                    self._of_rank_0(
                        lambda: planner.plan_step(record, self.budget_bytes, self.settings.algorithm, options)
                    )
                )
        self.generation += 1

    def _know(self, record: StepRecord) -> None:
        self.record = record
        for graph in record.graphs:
            forbidden = [(op.id, impl.name) for op in graph.operators for impl in op.implementations if not impl.usable]
            self.forbidden |= {(graph.structural_fingerprint, *which) for which in forbidden}

    def _allowed(self, graph: Graph) -> Graph:
        """The graph without what the weights are known to forbid."""
        operators = {operator for _, operator, _ in self.forbidden}
        named = [
            (op, k, impl) for op in graph.operators if op.id in operators for k, impl in enumerate(op.implementations)
        ]
        structure = graph.structural_fingerprint if named else ""
        return without(graph, {(op.id, k) for op, k, impl in named if (structure, op.id, impl.name) in self.forbidden})

    def _of_rank_0(self, make: Callable[[], Plan]) -> Plan:
        """What rank 0 plans, in all ranks.

        Raises:
            PlanMismatch: rank 0 has no plan.
            MonetrunError: in rank 0, why.
        """
        plans: list[Any] = [None]
        error: MonetrunError | None = None
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if not distributed or torch.distributed.get_rank() == 0:
            try:
                plans = [codec.dumps(make())]
            except MonetrunError as failure:
                error = failure
        if distributed and torch.distributed.get_world_size() > 1:
            torch.distributed.broadcast_object_list(plans, src=0)
        if error is not None:
            raise error
        if plans[0] is None:
            raise PlanMismatch("rank 0 found no plan", "its own message says why")
        return codec.loads(Plan, plans[0])

    def _planned(self, record: StepRecord) -> Plan:
        base = planner.baseline(record)
        budget = parse(self.settings.budget)
        free = None
        if budget.kind in ("auto", "share_of_free"):
            free = smallest(query(default_kind())).free_bytes + self.meter.current_bytes()
        self.budget_bytes = self.settings.budget_bytes or resolve(budget, free, base.plain.peak_bytes)
        return planner.plan_step(record, self.budget_bytes, self.settings.algorithm, self.options(), base)

    def options(self, seconds: float | None = None) -> Options:
        """The solver's options."""
        return Options(
            seconds=self.settings.solver_seconds if seconds is None else seconds,
            recompute=self.settings.recompute,
            implementations=parse_kinds(self.settings.implementations),
            mip_solver=self.settings.mip_solver,
        )

    def _parameters(self) -> list[torch.Tensor]:
        """All that optimizers train."""
        groups = [group for optimizer in self.session.optimizers for group in optimizer.param_groups]
        return list({id(p): p for group in groups for p in group["params"]}.values())

    # ---- compiling

    def backend(self, name: str) -> Backend:
        """The compiler backend for the model called ``name``."""
        return Backend(self, name, observed=self.recorder is not None)

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The plan's schedule for this graph; for a shape the plan has not seen, one that fits (see ``_adapt``)."""
        self._compiled = True
        if self.recorder is not None:
            return self.recorder.choose(joint)
        schedule = self.schedules.get(joint.graph.fingerprint)
        if schedule is None:
            schedule = self._adapt(joint)
            self.schedules[joint.graph.fingerprint] = schedule
        return 0, schedule

    def _adapt(self, joint: JointGraph) -> Schedule:
        """A schedule for a graph that the plan does not have: carried over by structure, or solved now.

        Raises:
            InfeasibleBudget: nothing fits beside what is allocated now.
        """
        assert self.plan is not None
        self.peak_bytes = max(self.peak_bytes, self.meter.peak_bytes())
        self.known.update(cost.measure(joint, self.known, self.meter, self.device))
        self.meter.reset_peak()  # what was measured is not the step's
        graph = self._allowed(cost.as_tried(joint, self.known))
        costs = cost.costs_of(joint, self.known, str(self.device))
        available = self.budget_bytes - self.meter.current_bytes() - self._outside_bytes(joint)
        alike = [g for g in self.plan.graphs if g.structural_fingerprint == graph.structural_fingerprint]
        if self.settings.plan_given and not alike:
            raise PlanMismatch(
                f"{graph.name} has a graph of {len(graph.operators)} operators that the plan does not have",
                "the plan is of another model, or the model has changed: monetrun plan writes a new one",
            )
        for candidate in alike:
            carried = planner.carry_over(candidate.schedule, graph, costs, available)
            if carried is not None:
                return carried
        solution: Solution = greedy.solve(graph, costs, available, self.options(min(2.0, self.settings.solver_seconds)))
        if solution.schedule is not None:
            return solution.schedule
        frugal = greedy.most_frugal(graph, costs)
        peak = simulate(graph, costs, frugal).peak_bytes
        if peak <= available:
            return frugal
        fixed = self.budget_bytes - available
        raise InfeasibleBudget(
            f"{graph.name} at these shapes needs {format_bytes(fixed + peak, exact=True)} at least, "
            f"the budget is {format_bytes(self.budget_bytes)}",
            "give more (--budget), or feed smaller batches",
            budget_bytes=self.budget_bytes,
            smallest_bytes=fixed + peak,
        )

    def _outside_bytes(self, joint: JointGraph) -> int:
        """What the step will allocate outside this graph between its forward and its backward."""
        graph = joint.graph
        outputs = {joint.storage[n] for n in joint.outputs if isinstance(n, torch.fx.Node) and n in joint.storage}
        now = sum(graph.tensors[t].nbytes for t in outputs if not graph.tensors[t].external)
        if self.record is not None and self.plan is not None:
            for k, known in enumerate(self.record.graphs):
                if known.structural_fingerprint == graph.structural_fingerprint:
                    before = sum(t.nbytes for t in known.tensors if t.id in outputs and not t.external)
                    seen = _outside_of(self.record, [g.schedule for g in self.plan.graphs], k)
                    return int(seen * max(1.0, now / before)) if before else seen
        return _LOSS_COPIES * now

    def _drop_traces(self) -> None:
        """After compiling: Dynamo's trace of a frame that it left alone holds that call's batch, in a cycle."""
        if self._compiled:
            self._compiled = False
            gc.collect()

    # ---- the step

    def entering(self, phase: str, graph: int, arguments: Sequence[Any]) -> None:
        """A graph is about to run (seen while recording only)."""
        if self.recorder is not None:
            self.recorder.entering(phase, graph, arguments)

    def left(self, phase: str, graph: int, results: Sequence[Any]) -> None:
        """A graph has run (seen while recording only)."""
        if self.recorder is not None:
            self.recorder.left(phase, graph, results)

    def forward_begins(self, name: str) -> None:
        """A planned model is called in training."""
        if self.recorder is not None:
            if self.first_step_done and self.settings.mode != PROBE:
                self.plan_now()
            return
        if self._stepped or not self.steps:
            self._stepped = False
            self.meter.reset_peak()
            self.steps = max(1, self.steps)

    def gradients_dropped(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script called ``zero_grad``."""
        if self.recorder is not None and not self.first_step_done:
            self.recorder.gradients_dropped(parameters, set_to_none)

    def optimizer_begins(self, again: bool) -> None:
        """An optimizer's step begins; a probe that sees one's second step has seen enough."""
        if self.recorder is None:
            return
        if again and self.settings.mode == PROBE:
            self._leave()
        self.recorder.optimizer_begins()

    def optimizer_ended(self, name: str, all_stepped: bool) -> None:
        """An optimizer's step has ended."""
        if self.recorder is not None:
            self.recorder.optimizer_ended(name, self._parameters())
            self.first_step_done |= all_stepped and self.recorder.complete
            if all_stepped and self.settings.mode == PROBE:
                self._leave()
            return
        self.peak_bytes = max(self.peak_bytes, self.meter.peak_bytes())
        self._drop_traces()
        self.steps += not self._stepped
        self._stepped = True

    def _leave(self) -> None:
        """A probe's end: write the record, and nothing of the script runs any more."""
        from monetrun.runtime import probe

        assert self.recorder is not None
        record = self.recorder.record(self.recorder.measure(self.store))
        probe.leave(record, self.settings.record_file)

    def findings(self) -> dict[str, Any]:
        """For the report: what was planned and measured here."""
        plan = self.plan
        return {
            "measured_peak_bytes": self.peak_bytes,
            "measured_overhead": backends.measured_overhead(),
            "steps": max(0, self.steps - 1),
            "exact": self.meter.exact,
            "plan": None if plan is None else codec.to_plain(plan),
        }


def _outside_of(record: StepRecord, schedules: list[Schedule], k: int) -> int:
    """How much more lies under graph ``k``'s backward than under its forward, at most."""
    starts = list(zip(record.events, replay(record, schedules).start_bytes, strict=True))
    saved = call(record.graphs[k], record.costs[k], schedules[k]).saved_bytes
    forward = [start for event, start in starts if event.graph == k and event.kind == FORWARD]
    backward = [start - saved for event, start in starts if event.graph == k and event.kind == BACKWARD]
    return max(0, max(backward, default=0) - min(forward, default=0))
