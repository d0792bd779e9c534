"""Under autocast casts a weight once for all that use it, as eager's cache does.

Eager keeps the cast of a float32 weight until the outermost autocast ends. What uses it several times shares one cast,
whose backward gets the sum of the gradient's terms in the lower precision. AOTAutograd traces without that cache, and
would cast for each use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import proxy_tensor

from monetrun.capture.gradient_terms import within_backward
from monetrun.capture.python_entries import replace_entry

_CAST = torch.ops.aten._to_copy.default
_ENTERS = torch.amp.autocast_mode._enter_autocast
# methods of a tensor that cast because the script says so: such a cast is not kept
_EXPLICIT = frozenset({"to", "type", "type_as", "bfloat16", "half"})


@contextlib.contextmanager
def casts_once(module: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """While tracing: casts of autocast are kept where eager keeps them.

    Args:
        module: TorchDynamo's graph.
        inputs: its (fake) inputs.
    """
    if not _caches(module):
        yield
        return
    kept: dict[int, tuple[Any, Any]] = {}  # by the tensor's id: it, which so stays alive, and its cast

    def cast(x: torch.Tensor, **keywords: Any) -> Any:
        if id(x) in kept and keywords == {"dtype": kept[id(x)][1].dtype} and _is_of_autocast():
            return kept[id(x)][1]
        replace_entry(_CAST, DispatchKey.Autograd, None)
        try:
            result = _CAST(x, **keywords)
        finally:
            replace_entry(_CAST, DispatchKey.Autograd, cast)
        if _is_kept(x, keywords, inputs) and _is_of_autocast():
            kept[id(x)] = x, result
        return result

    clear = torch.clear_autocast_cache

    def cleared() -> None:
        kept.clear()
        clear()

    replaced = replace_entry(_CAST, DispatchKey.Autograd, cast)
    torch.clear_autocast_cache = cleared
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear
        replace_entry(_CAST, DispatchKey.Autograd, replaced)


def _caches(module: fx.GraphModule) -> bool:
    """Whether autocast is on around or within a graph, and keeps casts."""
    regions = [node for node in module.graph.nodes if node.target is _ENTERS]
    if not torch.is_autocast_cache_enabled() or any(False in node.args[3:] for node in regions):
        return False  # while tracing it is not known in which of the regions
    return bool(regions) or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _is_kept(x: torch.Tensor, keywords: Any, inputs: Sequence[Any]) -> bool:
    """Whether eager keeps the cast of ``x``, if it is one of autocast."""
    if not x.requires_grad or x.dtype != torch.float32 or not torch.is_grad_enabled():
        return False
    if keywords != {"dtype": torch.get_autocast_dtype(x.device.type)}:
        return False
    position = _position(x)
    given = inputs[position] if position is not None and position < len(inputs) else None
    if not isinstance(given, torch.Tensor) or given.shape != x.shape:
        return False
    return given.is_leaf and given.requires_grad and not given._is_view()


def _is_of_autocast() -> bool:
    """Whether a cast is made by autocast in a forward, and not by the script or in a backward."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return False  # autocast's own calls are made without it
    if within_backward():
        return False
    nodes = fx_traceback.get_current_meta().get("from_node", ())
    return bool(nodes) and nodes[-1].target not in _EXPLICIT


def _position(x: torch.Tensor) -> int | None:
    """Which of a joint graph's inputs a tensor is, while that is traced; None: none."""
    mode, wrapped = proxy_tensor.get_proxy_mode(), getattr(x, "elem", None)
    if mode is None or wrapped is None or not torch._is_functional_tensor(wrapped):
        return None
    inner = torch._from_functional_tensor(wrapped)
    slot: Any = proxy_tensor.get_proxy_slot(inner, mode.tracer, None)
    node = None if slot is None else slot.proxy.node
    if node is None or node.op != "placeholder":
        return None
    _, _, number = str(node.target).rpartition("_")
    return int(number) - 1 if str(node.target).startswith("primals_") else None
