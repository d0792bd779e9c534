"""What each operator costs: measured on this device, one call at a time, or estimated from bytes and flops.

Every distinct call (target, shapes, dtypes, layouts, constants) is timed in interleaved rounds (see ``timer``), and the
median is kept in the store, so that a second run plans with the same numbers. The allocator counts a call's workspace:
the bytes that it allocates beside its outputs.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves

from monetrun.capture import data_sheet, integer_operands, operands, roofline
from monetrun.capture.allocator_history import requests_of
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import Meter
from monetrun.capture.storages import block_bytes
from monetrun.capture.timer import Timer, timer_for
from monetrun.core.errors import is_out_of_memory
from monetrun.core.graph import Costs, Graph, Operator, Requests, check_cost, counterpart
from monetrun.ops import device_errors, random
from monetrun.ops.collective_operators import is_collective
from monetrun.ops.registry import Call

ROUNDS = 3
_ASSERTIONS = (torch.ops.aten._assert_async, torch.ops.aten._functional_assert_async)
_NOISE = 0.02  # of a call's seconds: on an H100 (2026-11) cuDNN's first plan took 0.987 to 1.008 of the default's time

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What a call of one signature costs.

    Attributes:
        seconds: of one call.
        workspace_bytes: allocated in the call beside its outputs.
        measured: False where it was estimated.
        eagers_bits: whether a trial showed it bitwise identical to the default; False where no trial was needed.
        requests: of a caching allocator.
        failed: whether the call raised, for another reason than a lack of memory, when it was tried.
        others_share: of the processors' time while it was measured, what other processes took: it may be too slow.
    """

    seconds: float
    workspace_bytes: int
    measured: bool = True
    eagers_bits: bool = False
    requests: Requests = field(default_factory=Requests)
    failed: bool = False
    others_share: float = 0.0

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: a number cannot be right.
        """
        check_cost(self.seconds, self.workspace_bytes)
        if not 0.0 <= self.others_share <= 1.0:
            raise ValueError(f"others that took {self.others_share} of the processors' time")


def others_share(joints: Iterable[JointGraph], known: Mapping[str, OperatorCost]) -> float:
    """The largest ``OperatorCost.others_share`` among the operators of ``joints``, also of an earlier launch's."""
    signatures = {signature for joint in joints for row in joint.signatures for signature in row}
    return max((known[s].others_share for s in signatures if s in known), default=0.0)


def costs_of(joint: JointGraph, known: Mapping[str, OperatorCost], device: str) -> Costs:
    """Assemble the costs of a graph from those of its implementations' signatures.

    An implementation in place takes at most as long as the same one out of place: elsewhere a higher figure is noise,
    and on a CPU it is truly faster, since new pages take longer to get than to fill (a ReLU of 430 MB took 24 ms in
    place, 190 out of place, on 2 cores of a Zen 4, 2026-11). One marked as no faster than the default costs at least as
    much as the default; so does one that may differ from it by rounding, and was measured hardly faster.
    """
    seconds, workspaces, requests = [], [], []
    for op, row in zip(joint.graph.operators, joint.signatures, strict=True):
        costs = [known[signature] for signature in row]
        least_workspace = _bytes_to_save_generator_state(joint, op)
        pairs = [(costs[k], costs[counterpart(op, k)]) for k in range(len(costs))]
        floors = [_least_seconds(joint, op, k, costs) for k in range(len(costs))]
        seconds.append(tuple(max(s, min(c.seconds for c in pair)) for s, pair in zip(floors, pairs, strict=True)))
        workspaces.append(tuple(max(least_workspace, c.workspace_bytes) for c in costs))
        requests.append(tuple(_fitting(c.requests, op, k) for k, c in enumerate(costs)))
    seen = any(r.results for row in requests for r in row)
    return Costs(device, tuple(seconds), tuple(workspaces), tuple(requests) if seen else ())


def _least_seconds(joint: JointGraph, op: Operator, k: int, costs: Sequence[OperatorCost]) -> float:
    """What the operator's k-th implementation costs at least, whatever was measured."""
    default, own = costs[0], costs[k]
    hardly_faster = default.measured and own.measured and own.seconds > (1 - _NOISE) * default.seconds
    differs = not op.implementations[k].exact
    return default.seconds if (op.id, k) in joint.no_faster_than_default or (differs and hardly_faster) else 0.0


def _fitting(requests: Requests, op: Operator, k: int) -> Requests:
    """Those of the operator's k-th implementation; none where they do not give each of its outputs."""
    new = len(op.outputs) - (op.implementations[k].in_place_of is not None)
    return requests if len(requests.results) == new else Requests()


def _bytes_to_save_generator_state(joint: JointGraph, op: Operator) -> int:
    """Workspace of drawing again: bytes of the generator's state, saved meanwhile, beyond those of the outputs."""
    state = random.state_of(joint.nodes[op.id])
    if state is None:
        return 0
    tensors = joint.graph.tensors
    return max(0, tensors[joint.storage[state]].nbytes - sum(tensors[t].nbytes for t in op.outputs))


def modelled(joint: JointGraph, model: roofline.Device) -> Costs:
    """The costs of a graph on ``model``, without workspaces."""
    known = {signature: estimate(*timed, model) for signature, timed in joint.timed.items()}
    return costs_of(joint, known, roofline.PREFIX + model.name)


def measure(
    joint: JointGraph,
    known: Mapping[str, OperatorCost],
    meter: Meter,
    device: torch.device,
    timer: Timer | None = None,
    *,
    rounds: int = ROUNDS,
    only: Collection[str] | None = None,
) -> dict[str, OperatorCost]:
    """Measure the implementations of ``joint`` whose signature is not in ``known``; gives the new entries only.

    Operands are made up (see ``operands``), and only one call's are allocated at a time. The random number generators
    are left as they were. A call that fails on such operands, or for lack of memory, is estimated by the device's
    roofline, with a workspace as large as its results; so are collectives, which other ranks do not measure as often,
    and what could write anywhere with made-up integers (see ``integer_operands``).

    Args:
        joint: the captured graph.
        known: costs by signature.
        meter: of the device.
        device: that of the graph's tensors.
        timer: by default the device's.
        rounds: how often each call is timed; 0: its seconds are estimated, and its bytes alone are measured.
        only: these signatures; None: all.

    Raises:
        RuntimeError: the device itself failed (see ``device_errors``): torch's own error.
    """
    wanted = joint.timed.keys() if only is None else only
    todo = {s: call for s, (call, _) in joint.timed.items() if s in wanted and s not in known}
    if not todo:
        return {}
    timer = timer or timer_for(meter, device)
    seconds: dict[str, list[float]] = {signature: [] for signature in todo}
    memory: dict[str, tuple[int, Requests]] = {}  # workspace, requests
    estimated = {s: _estimate_alone(*joint.timed[s], device) for s, call in todo.items() if _must_not_run(call, device)}
    devices = [device.index or 0] if device.type == "cuda" else []
    # the script may be under an autocast now: graphs have their casts
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch._C._DisableAutocast():
        for round_ in range(max(1, rounds)):
            for signature, call in todo.items():
                if signature in estimated:
                    continue
                try:
                    if round_ == 0:
                        memory[signature] = _memory(call, meter, timer, device)
                    if rounds:
                        seconds[signature].append(timer.seconds(call))
                except Exception as error:
                    if device_errors.is_sticky(error, meter.synchronize):
                        raise
                    _log.debug("%s cannot be timed alone (%s): estimated", call.target, error)
                    estimate_ = _estimate_alone(*joint.timed[signature], device)
                    estimated[signature] = replace(estimate_, failed=not is_out_of_memory(error))
        trials = {s: calls for s, calls in joint.exactness_trials.items() if s in todo and s not in estimated}
        exact = {s for s, calls in trials.items() if _is_bitwise_identical(*calls, timer.spread_indices)}
    measured = {}
    for signature in (s for s in todo if s not in estimated):
        timed = seconds[signature]
        took = statistics.median(timed) if timed else estimate(*joint.timed[signature]).seconds
        workspace_bytes, requests = memory[signature]
        measured[signature] = OperatorCost(took, workspace_bytes, bool(timed), signature in exact, requests)
    return {**measured, **estimated}


def _must_not_run(call: Call, device: torch.device) -> bool:
    """Whether a call cannot be tried alone: other ranks would have to make it, too, or values decide whether it fails.

    On CUDA an assertion that fails on made-up values ends all that the process does on the device.
    """
    if is_collective(call.target) or getattr(call.target, "overloadpacket", None) in _ASSERTIONS:
        return True
    return not integer_operands.may_be_made_up(call, device.type)


def _estimate_alone(call: Call, like: fx.Node, device: torch.device) -> OperatorCost:
    results = (v for v in tree_leaves(like.meta.get("val")) if isinstance(v, torch.Tensor))
    estimated = estimate(call, like, data_sheet.present(device))
    return replace(estimated, workspace_bytes=sum(v.nbytes for v in results))


def as_tried(joint: JointGraph, known: Mapping[str, OperatorCost]) -> Graph:
    """The graph with implementations marked exact where a trial (see ``measure``) showed them bitwise identical.

    An alternative that failed where the default did not is marked as not usable.
    """
    exact = {signature for signature in joint.exactness_trials if signature in known and known[signature].eagers_bits}
    failed = {signature for signature in joint.timed if signature in known and known[signature].failed}

    def marked(op: Operator) -> Operator:
        row = joint.signatures[op.id]
        pairs = zip(op.implementations, row, strict=True)
        unusable = failed if row[0] not in failed else set()
        marked = (replace(i, exact=i.exact or s in exact, usable=i.usable and s not in unusable) for i, s in pairs)
        return replace(op, implementations=tuple(marked))

    concerned = {k for k, row in enumerate(joint.signatures) if not (exact | failed).isdisjoint(row)}
    operators = (marked(op) if op.id in concerned else op for op in joint.graph.operators)
    return replace(joint.graph, operators=tuple(operators))


def _is_bitwise_identical(call: Call, default: Call, spread_indices: bool) -> bool:
    """Whether both calls give bitwise identical results of the same random operands (False where memory runs out)."""
    made: dict[fx.Node, Any] = {}

    def result(of: Call) -> Any:
        arguments, keywords = operands.make(of, made=made, random=True, spread_indices=spread_indices)
        return of.target(*arguments, **keywords)

    try:
        expected, given = result(default), result(call)  # which may write over an operand
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    pairs = zip(tree_leaves(given), tree_leaves(expected if call.only is None else expected[call.only]), strict=True)
    return all(torch.equal(one, other) for one, other in pairs if isinstance(other, torch.Tensor))


def _memory(call: Call, meter: Meter, timer: Timer, device: torch.device) -> tuple[int, Requests]:
    """Call once, after the timer's first calls; gives the bytes allocated beside its results, and its requests."""
    arguments, keywords = operands.make(call, spread_indices=timer.spread_indices)
    for _ in range(timer.first_calls):
        call.target(*arguments, **keywords)
    before = meter.current_bytes()
    meter.reset_peak()
    sizes: tuple[int, ...] = ()
    places: dict[int, int] = {}
    if device.type == "cuda":
        result, sizes, places = requests_of(device, lambda: call.target(*arguments, **keywords))
    else:
        result = call.target(*arguments, **keywords)
    if not meter.exact:
        return 0, Requests()
    peak = meter.peak_bytes()
    existing = {
        a.untyped_storage().data_ptr()
        for a in tree_flatten((arguments, keywords))[0]
        if isinstance(a, torch.Tensor) and a.numel()
    }
    new: dict[int, int] = {}
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in existing:
            new[leaf.untyped_storage().data_ptr()] = block_bytes(leaf.untyped_storage())
    requests = Requests(sizes, tuple(places[n] for n in new)) if places.keys() >= new.keys() else Requests()
    return max(0, peak - before - sum(new.values())), requests


def estimate(call: Call, like: fx.Node, model: roofline.Device | None = None) -> OperatorCost:
    """Seconds by the roofline model, and no workspace.

    Args:
        call: what to estimate.
        like: a node whose result has the shapes, strides and dtypes of the call's.
        model: the device; by default a CPU of no particular make.
    """
    arguments, keywords = fx.map_arg((call.args, call.kwargs), lambda a: a.meta.get("val"))
    result = like.meta.get("val")
    seconds = roofline.estimate(call.target, arguments, keywords, result, model or roofline.DEVICES["cpu"])
    return OperatorCost(seconds, 0, measured=False)
