"""Under which autocast a backward is traced: that in which the script calls it, as in eager.

torch advises to call it outside. AOTAutograd would trace it under the forward's: matrix products of a region in float32
(attention with dropout on a CPU, what runs with autocast off) would become ones in bfloat16 in the backward alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from monetrun.capture.joint import JointGraph
from monetrun.capture.storages import mutates, tensors_in
from monetrun.core.graph import BACKWARD

# Device types with autocast, each with its dtype.
State = tuple[tuple[str, str], ...]

OFF: State = ()


def present() -> State:
    """The autocast that is on."""
    enabled = (t for t in ("cpu", "cuda") if torch.is_autocast_enabled(t))
    return tuple((t, _name(torch.get_autocast_dtype(t))) for t in enabled)


@contextlib.contextmanager
def traced_under(state: State) -> Iterator[State]:
    """While tracing: the backward is traced under ``state``, with the forward's dtype where that is under autocast too.

    Gives what it is traced under.
    """
    others = {t: torch.get_autocast_dtype(t) for t, _ in state if not torch.is_autocast_enabled(t)}
    # with a dtype in it, the setting could not be written as JSON, which torch does with it
    options = [{"device_type": t} for t, _ in state]
    try:
        for t in others:
            torch.set_autocast_dtype(t, getattr(torch, dict(state)[t]))
        with torch._functorch.config.patch(backward_pass_autocast=options):
            yield tuple((t, _name(torch.get_autocast_dtype(t))) for t, _ in state)
    finally:
        for t, dtype in others.items():
            torch.set_autocast_dtype(t, dtype)


def off_in(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """``run``, a backward, without the autocast around its call: the casts of both passes are operators of the graph.

    Under one, what runs again of a forward outside of it would be cast, and so would what was traced without it.
    """

    def called(arguments: list[Any]) -> Any:
        with torch._C._DisableAutocast():
            return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called


def depends_on(joint: JointGraph) -> frozenset[str]:
    """The device types whose autocast changes what the backward of ``joint`` computes, traced without it."""
    types: set[str] = set()
    seen: set[str] = set()
    for op, node in zip(joint.graph.operators, joint.nodes, strict=True):
        if op.phase != BACKWARD or op.signature in seen or mutates(node) or op.target.startswith("monet."):
            continue  # monetrun's own operators have no kernels for autocast
        seen.add(op.signature)
        devices = {v.device.type for v in tensors_in(node.meta.get("val"))} - types
        types.update(t for t in devices if torch.amp.is_autocast_available(t) and _changes(node, t))
    return frozenset(types)


def _changes(node: fx.Node, device_type: str) -> bool:
    """Whether a node gives another dtype under autocast, seen on its fake tensors."""
    arguments, keywords = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    try:
        with torch.no_grad(), torch.autocast(device_type):
            found = node.target(*arguments, **keywords)  # type: ignore[operator]
    except (RuntimeError, TypeError):
        return True
    return [v.dtype for v in tensors_in(found)] != [v.dtype for v in tensors_in(node.meta.get("val"))]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
