"""What each operator costs: measured on this device, one call at a time, or estimated from bytes and flops.

Every distinct operator (target, shapes, dtypes, layouts, constants) is timed once, in interleaved rounds, and the
median is kept in the store, so that a second run plans with the same numbers. The bytes that a call allocates beside
its outputs (its workspace) are counted by the allocator in the same calls.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

from monetrun.capture import JointGraph
from monetrun.graph import Costs
from monetrun.meter import Meter

ROUNDS = 3

# Of no device in particular: only for an operator that cannot be called on made-up inputs.
_BYTES_PER_SECOND = 2e10
_FLOPS_PER_SECOND = 1e11

_log = logging.getLogger("monetrun")


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Of one signature: seconds of a call, bytes it allocates beside its outputs, and whether it was measured."""

    seconds: float
    workspace_bytes: int
    measured: bool = True


def costs_of(joint: JointGraph, known: Mapping[str, OperatorCost], device: str) -> Costs:
    """Assemble the costs of a graph from those of its operators' signatures.

    An implementation in place launches the same kernel and costs the same.
    """
    seconds, workspace = [], []
    for op in joint.graph.operators:
        cost = known[op.signature]
        seconds.append((cost.seconds,) * len(op.implementations))
        workspace.append((cost.workspace_bytes,) * len(op.implementations))
    return Costs(device, tuple(seconds), tuple(workspace))


def measure(
    joint: JointGraph, known: Mapping[str, OperatorCost], meter: Meter, device: torch.device
) -> dict[str, OperatorCost]:
    """Measure the operators of ``joint`` whose signature is not in ``known``; gives the new entries only.

    Inputs are made up with the captured shapes, strides and dtypes (integers are zero, which is a valid index
    everywhere). Only the inputs and outputs of one operator are alive at a time. The state of the random number
    generators is as before afterwards.
    """
    todo: dict[str, fx.Node] = {}
    for op, node in zip(joint.graph.operators, joint.nodes, strict=True):
        if op.signature not in known:
            todo.setdefault(op.signature, node)
    if not todo:
        return {}
    seconds: dict[str, list[float]] = {signature: [] for signature in todo}
    workspace: dict[str, int] = {}
    failed: dict[str, OperatorCost] = {}
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for round_ in range(ROUNDS):
            for signature, node in todo.items():
                if signature in failed:
                    continue
                try:
                    if round_ == 0:
                        workspace[signature] = _warm_up(node, meter)
                    seconds[signature].append(_timed(node, meter))
                except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError) as error:
                    _log.debug("%s cannot be timed alone (%s): estimated", node.name, error)
                    failed[signature] = estimate(node)
    measured = {
        signature: OperatorCost(statistics.median(seconds[signature]), workspace[signature])
        for signature in todo
        if signature not in failed
    }
    return {**measured, **failed}


def _arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    made: dict[fx.Node, Any] = {}

    def make(argument: fx.Node) -> Any:
        if argument not in made:
            value = argument.meta.get("val")
            if isinstance(value, (tuple, list)):
                made[argument] = type(value)(_made_up(v) if isinstance(v, torch.Tensor) else v for v in value)
            else:
                made[argument] = _made_up(value) if isinstance(value, torch.Tensor) else value
        return made[argument]

    return fx.map_arg((node.args, node.kwargs), make)  # type: ignore[return-value]


def _made_up(value: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    whole = tensor.as_strided((_span(value),), (1,)) if tensor.numel() else tensor
    if value.dtype.is_floating_point or value.dtype.is_complex:
        whole.fill_(0.5)
    else:
        whole.zero_()
    return tensor


def _span(value: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))


def _warm_up(node: fx.Node, meter: Meter) -> int:
    """Call once; gives the bytes allocated during the call beside what it returned."""
    arguments, keywords = _arguments(node)
    before = meter.current_bytes()
    meter.reset_peak()
    result = node.target(*arguments, **keywords)  # type: ignore[operator]
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
            new[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return max(0, peak - before - sum(new.values()))


def _timed(node: fx.Node, meter: Meter) -> float:
    arguments, keywords = _arguments(node)
    meter.synchronize()
    start = time.perf_counter()
    result = node.target(*arguments, **keywords)  # type: ignore[operator]
    meter.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def estimate(node: fx.Node) -> OperatorCost:
    """Seconds from the bytes that the operator reads and writes and from its flops, whichever takes longer."""
    from torch.utils.flop_counter import flop_registry

    nbytes = 0
    for n in itertools.chain(node.all_input_nodes, [node]):
        for leaf in tree_flatten(n.meta.get("val"))[0]:
            if isinstance(leaf, torch.Tensor):
                nbytes += leaf.numel() * leaf.element_size()
    flops = 0
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda a: a.meta.get("val"))
        flops = flop_registry[packet](*arguments, **keywords, out_val=node.meta.get("val"))
    return OperatorCost(max(nbytes / _BYTES_PER_SECOND, flops / _FLOPS_PER_SECOND), 0, measured=False)
