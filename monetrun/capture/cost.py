"""What each operator costs: measured on this device, one call at a time, or estimated from bytes and flops.

Every distinct call (target, shapes, dtypes, layouts, constants) is timed in interleaved rounds, and the median is kept
in the store, so that a second run plans with the same numbers. The allocator counts a call's workspace: the bytes that
it allocates beside its outputs.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves

from monetrun.capture import roofline
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import Meter
from monetrun.capture.storages import block_bytes
from monetrun.core.graph import Costs, Graph, Operator, counterpart
from monetrun.ops import random
from monetrun.ops.registry import Call

ROUNDS = 3

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """What a call of one signature costs.

    Attributes:
        seconds: of one call.
        workspace_bytes: allocated in the call beside its outputs.
        measured: False where it was estimated.
        eagers_bits: whether a trial showed it bitwise identical to the default; False where no trial was needed.
    """

    seconds: float
    workspace_bytes: int
    measured: bool = True
    eagers_bits: bool = False


def costs_of(joint: JointGraph, known: Mapping[str, OperatorCost], device: str) -> Costs:
    """Assemble the costs of a graph from those of its implementations' signatures.

    An implementation in place costs at most as much as the same one out of place: elsewhere a higher figure is noise,
    and on a CPU it is truly faster, since new pages take longer to get than to fill (a ReLU of 430 MB took 24 ms in
    place, 190 out of place, on 2 cores of a Zen 4, 2026-11). One marked as no faster than the default costs at least as
    much as the default.
    """
    seconds, workspaces = [], []
    for op, row in zip(joint.graph.operators, joint.signatures, strict=True):
        costs = [known[signature] for signature in row]
        least_workspace = _bytes_to_save_generator_state(joint, op)
        pairs = [(costs[k], costs[counterpart(op, k)]) for k in range(len(costs))]
        floors = [costs[0].seconds if (op.id, k) in joint.no_faster_than_default else 0.0 for k in range(len(costs))]
        seconds.append(tuple(max(s, min(c.seconds for c in pair)) for s, pair in zip(floors, pairs, strict=True)))
        workspaces.append(tuple(max(least_workspace, min(c.workspace_bytes for c in pair)) for pair in pairs))
    return Costs(device, tuple(seconds), tuple(workspaces))


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
    joint: JointGraph, known: Mapping[str, OperatorCost], meter: Meter, device: torch.device
) -> dict[str, OperatorCost]:
    """Measure the implementations of ``joint`` whose signature is not in ``known``; gives the new entries only.

    Inputs are made up with the captured shapes, strides and dtypes (integers are zero, which is a valid index
    everywhere). Only one call's inputs and outputs are allocated at a time. The random number generators are left as
    they were. A call that fails on such inputs is estimated, with a workspace as large as its results.
    """
    todo = {signature: call for signature, (call, _) in joint.timed.items() if signature not in known}
    if not todo:
        return {}
    seconds: dict[str, list[float]] = {signature: [] for signature in todo}
    workspace: dict[str, int] = {}
    failed: dict[str, OperatorCost] = {}
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for round_ in range(ROUNDS):
            for signature, call in todo.items():
                if signature in failed:
                    continue
                try:
                    if round_ == 0:
                        workspace[signature] = _warm_up(call, meter)
                    seconds[signature].append(_timed(call, meter))
                except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
                    _log.debug("%s cannot be timed alone (%s): estimated", call.target, error)
                    failed[signature] = _estimate_after_failure(*joint.timed[signature])
        trials = {s: calls for s, calls in joint.exactness_trials.items() if s in todo and s not in failed}
        exact = {signature for signature, calls in trials.items() if _is_bitwise_identical(*calls)}
    measured = {
        signature: OperatorCost(statistics.median(seconds[signature]), workspace[signature], True, signature in exact)
        for signature in todo
        if signature not in failed
    }
    return {**measured, **failed}


def _estimate_after_failure(call: Call, like: fx.Node) -> OperatorCost:
    results = (v for v in tree_leaves(like.meta.get("val")) if isinstance(v, torch.Tensor))
    return replace(estimate(call, like), workspace_bytes=sum(v.nbytes for v in results))


def as_tried(joint: JointGraph, known: Mapping[str, OperatorCost]) -> Graph:
    """The graph with implementations marked exact where a trial (see ``measure``) showed them bitwise identical."""
    exact = {signature for signature in joint.exactness_trials if signature in known and known[signature].eagers_bits}

    def marked(op: Operator) -> Operator:
        pairs = zip(op.implementations, joint.signatures[op.id], strict=True)
        return replace(op, implementations=tuple(replace(i, exact=i.exact or s in exact) for i, s in pairs))

    concerned = {k for k, row in enumerate(joint.signatures) if not exact.isdisjoint(row)}
    operators = (marked(op) if op.id in concerned else op for op in joint.graph.operators)
    return replace(joint.graph, operators=tuple(operators))


def _is_bitwise_identical(call: Call, default: Call) -> bool:
    """Whether both calls give bitwise identical results of the same random operands (False where memory runs out)."""
    operands: dict[fx.Node, Any] = {}

    def result(of: Call) -> Any:
        arguments, keywords = _arguments(of, operands, torch.Tensor.normal_)
        return of.target(*arguments, **keywords)

    try:
        expected, given = result(default), result(call)  # which may write over an operand
    except torch.OutOfMemoryError:
        return False
    pairs = zip(tree_leaves(given), tree_leaves(expected if call.only is None else expected[call.only]), strict=True)
    return all(torch.equal(one, other) for one, other in pairs if isinstance(other, torch.Tensor))


def _arguments(
    call: Call,
    made: dict[fx.Node, Any] | None = None,
    fill: Callable[[torch.Tensor], Any] = lambda tensor: tensor.fill_(0.5),
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments, each node a made-up tensor (floating-point ones filled by ``fill``); ``made`` holds them."""
    made = {} if made is None else made

    def make(argument: fx.Node) -> Any:
        if argument not in made:
            value = argument.meta.get("val")
            if isinstance(value, (tuple, list)):
                made[argument] = type(value)(_made_up(v, fill) if isinstance(v, torch.Tensor) else v for v in value)
            else:
                made[argument] = _made_up(value, fill) if isinstance(value, torch.Tensor) else value
        return made[argument]

    return fx.map_arg((call.args, call.kwargs), make)  # type: ignore[return-value]


def _made_up(value: torch.Tensor, fill: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    whole = tensor.as_strided((_span(value),), (1,)) if tensor.numel() else tensor
    if value.dtype.is_floating_point or value.dtype.is_complex:
        fill(whole)
    else:
        whole.zero_()
    return tensor


def _span(value: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _warm_up(call: Call, meter: Meter) -> int:
    """Call once, and return the bytes allocated during the call beside its results."""
    arguments, keywords = _arguments(call)
    before = meter.current_bytes()
    meter.reset_peak()
    result = call.target(*arguments, **keywords)
    if not meter.exact:
        return 0
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
    return max(0, peak - before - sum(new.values()))


def _timed(call: Call, meter: Meter) -> float:
    arguments, keywords = _arguments(call)
    meter.synchronize()
    start = time.perf_counter()
    result = call.target(*arguments, **keywords)
    meter.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


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
