"""monetrun's choice of saved tensors for ``torch.compile``, as a solver of torch's partitioner.

torch's ``min_cut_rematerialization_partition`` asks a knapsack solver which operators are saved and which run again in
the backward. It hands a solver of one's own the joint graph. ``SavedTensors`` plans that graph as a launch would, and
names the forward operators that the plan runs twice. The compiler then orders and fuses what it likes.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomKnapsackSolver
from torch.utils.checkpoint import CheckpointPolicy

import monetrun
from monetrun import solve
from monetrun.capture import cost, cost_store, roofline
from monetrun.capture.joint import JointGraph, capture
from monetrun.capture.meter import meter_for
from monetrun.capture.storages import results_of
from monetrun.core import budget as budgets
from monetrun.core.errors import CaptureFailed, UsageError
from monetrun.core.graph import Costs, Graph
from monetrun.core.options import Options
from monetrun.core.plan import Schedule, Step, plain_schedule
from monetrun.core.simulate import simulate
from monetrun.ops import random
from monetrun.solve import greedy

_SEARCHES = 8  # that share the planner's time
_Result = TypeVar("_Result")


class SavedTensors(CustomKnapsackSolver):
    """Saves what monetrun's plan of the joint graph saves; for torch's ``activation_memory_budget_solver``.

    The plan bounds what the graph allocates, with gradients, without parameters and inputs: each operator by eager's
    kernel, each rerun where torch's partitioner puts it. The true peak is the compiler's, which may fuse and reorder,
    and is not limited. Operators that draw random numbers never run twice.

    Args:
        budget: ``"1GiB"``, or a share of the graph's plain peak: ``"0.6x"``.
        seconds: the planner's time, for each graph.
        algorithm: the planner's solver.
        cost_model: ``"measured"`` on the graph's device, or a roofline model (``"roofline:a100"``).

    Raises:
        BudgetSyntaxError: the budget is malformed.
        UsageError: it is a share of a device's memory, or there is no such solver or cost model.
    """

    def __init__(
        self,
        budget: str,
        *,
        seconds: float = 10.0,
        algorithm: str = "hierarchical",
        cost_model: str = "measured",
    ) -> None:
        self.budget = budgets.parse(budget)
        if self.budget.kind not in (budgets.BYTES, budgets.SHARE_OF_PLAIN):
            raise UsageError(f"a graph's budget is bytes or a share of its plain peak, got {budget!r}", "say 0.6x")
        self.algorithm, self.cost_model = algorithm, cost_model
        self.options = Options(seconds=seconds, implementations=())  # the compiler has implementations of its own
        self._model = roofline.parse(cost_model)
        self._known: dict[str, cost.OperatorCost] = {}
        solve.algorithm(algorithm)

    def uuid(self) -> str:
        """Identifies the choice in torch's caches of compiled graphs."""
        parts = (monetrun.__version__, self.budget.text, self.options, self.algorithm, self.cost_model)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def __call__(
        self,
        memory: list[float],
        joint_graph: fx.Graph,
        max_memory: float,
        node_info: Any,
        all_recomputable_banned_nodes: list[fx.Node],
    ) -> tuple[list[int], list[int]]:
        """As torch calls it; the nodes of ``joint_graph`` are marked too, since some are no candidates of torch's.

        Returns:
            The indices of the candidates (``all_recomputable_banned_nodes``) that are saved, and of those that are not.
        """
        try:
            chosen = _in_new_thread(lambda: self._choose(joint_graph, node_info))
        except CaptureFailed as error:
            warnings.warn(
                f"monetrun cannot plan this graph, all of torch's candidates are saved: {error}", stacklevel=2
            )
            return list(range(len(all_recomputable_banned_nodes))), []
        for node in joint_graph.nodes:
            if node.name in chosen and "recompute" not in node.meta:  # those in checkpointed regions are marked already
                node.meta["recompute"] = chosen[node.name]
        again = [n.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE for n in all_recomputable_banned_nodes]
        return [i for i, twice in enumerate(again) if not twice], [i for i, twice in enumerate(again) if twice]

    def _choose(self, joint_graph: fx.Graph, node_info: Any) -> dict[str, CheckpointPolicy]:
        """For the name of each forward operator's node whether the plan saves its results or runs it twice."""
        joint = _captured(joint_graph, node_info)
        graph = _without_random_reruns(joint)
        schedule = self._plan(graph, self._costs(joint))
        twice = {s.operator for s in schedule.forward} & {s.operator for s in schedule.backward}
        policies = {True: CheckpointPolicy.MUST_RECOMPUTE, False: CheckpointPolicy.MUST_SAVE}
        return {joint.nodes[s.operator].name: policies[s.operator in twice] for s in schedule.forward}

    def _costs(self, joint: JointGraph) -> Costs:
        if self._model is not None:
            return cost.modelled(joint, self._model)
        device = next((n.meta["val"].device for n in joint.primals if _is_on_gpu(n)), torch.device("cpu"))
        self._known.update(cost.measure(joint, self._known, meter_for(device), device))
        return cost.costs_of(joint, self._known, cost_store.device_name(device))

    def _plan(self, graph: Graph, costs: Costs) -> Schedule:
        """The cheapest schedule that is found whose reruns fit the budget in torch's order, or the nearest one."""
        plain = plain_schedule(graph)
        budget_bytes = budgets.resolve(self.budget, None, simulate(graph, costs, plain).peak_bytes)
        search = solve.solver(self.algorithm)
        options = dataclasses.replace(self.options, seconds=self.options.seconds / _SEARCHES)
        frugal = greedy.most_frugal(graph, costs, options)
        found = [plain, on_demand(graph, frugal)]
        low, high = min(simulate(graph, costs, frugal).peak_bytes, budget_bytes), budget_bytes
        target = budget_bytes
        for _ in range(_SEARCHES):  # what fits in the plan's order may not fit in torch's: then plan for less
            schedule = search(graph, costs, target, options, found).schedule
            if schedule is not None:
                found.append(on_demand(graph, schedule))
            if schedule is None or simulate(graph, costs, found[-1]).peak_bytes <= budget_bytes:
                low = target
            else:
                high = target
            if low >= high:
                break
            target = (low + high) // 2
        best = _cheapest_within(graph, costs, found, budget_bytes)
        if best is None:
            plain_bytes, least_bytes = (simulate(graph, costs, s).peak_bytes for s in (plain, frugal))
            targets = (least_bytes + (plain_bytes - least_bytes) * share // 4 for share in (1, 2, 3))
            more = [search(graph, costs, target, options, found).schedule for target in targets]
            found += [on_demand(graph, schedule) for schedule in more if schedule is not None]
            best = min(found, key=lambda schedule: simulate(graph, costs, schedule).peak_bytes)
            least = budgets.format_bytes(simulate(graph, costs, best).peak_bytes)
            warnings.warn(
                f"no choice of saved tensors was found with which {graph.name} takes"
                f" {budgets.format_bytes(budget_bytes)}: {least} is the smallest known",
                stacklevel=2,
            )
        return best


def _cheapest_within(graph: Graph, costs: Costs, found: Iterable[Schedule], budget_bytes: int) -> Schedule | None:
    made = [(simulate(graph, costs, schedule), schedule) for schedule in found]
    fitting = [(timeline.seconds, schedule) for timeline, schedule in made if timeline.peak_bytes <= budget_bytes]
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def on_demand(graph: Graph, schedule: Schedule) -> Schedule:
    """The reruns of ``schedule`` in the order of torch's partitioner: each once, where it is first needed."""
    again = {s.operator for s in schedule.backward if s.operator < graph.forward_count}
    steps: list[Step] = []
    for step in schedule.backward:
        if step.operator < graph.forward_count:
            continue
        needed: set[int] = set()
        waiting = [step.operator]
        while waiting:
            writers = {graph.writer[t] for t in graph.operators[waiting.pop()].inputs} & again - needed
            needed |= writers
            waiting += writers
        again -= needed
        steps += [*map(Step, sorted(needed)), step]
    return Schedule(schedule.forward, tuple(steps))


def _in_new_thread(make: Callable[[], _Result]) -> _Result:
    """``make()`` without this thread's dispatch state: torch calls its solvers where fake tensors do not work."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(make).result()


def _captured(joint_graph: fx.Graph, node_info: Any) -> JointGraph:
    """The graph as monetrun describes it; ``joint_graph`` stays as it is, and nodes keep their names.

    Raises:
        CaptureFailed: it has symbolic shapes, or an operator whose outputs are not tensors.
    """
    module = fx.GraphModule(joint_graph.owning_module or {}, copy.deepcopy(joint_graph))
    placeholders = joint_graph.find_nodes(op="placeholder")
    static = [i for i, node in enumerate(placeholders) if node in node_info.static_lifetime_input_nodes]
    results = results_of(joint_graph)
    gradients = (i for i, node in enumerate(results) if node is None or node in node_info.tangents_closure)
    forward_outputs = next(gradients, len(results))
    return capture(module, forward_outputs, "the compiled graph", static, split_convolutions=False)


def _without_random_reruns(joint: JointGraph) -> Graph:
    """The graph in which no operator that draws runs twice: a compiled one would draw other numbers."""
    operators = (
        dataclasses.replace(op, replayable=op.replayable and not random.is_random(node))
        for op, node in zip(joint.graph.operators, joint.nodes, strict=True)
    )
    return dataclasses.replace(joint.graph, operators=tuple(operators))


def _is_on_gpu(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"
