"""Whose the bytes are that a process holds on its device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.utils._pytree import tree_leaves

from monetrun.core.budget import format_bytes
from monetrun.runtime import hooks
from monetrun.runtime.sharding import local

REST = "activations, batches and other tensors of the script"


def holdings(device: torch.device, held_bytes: int) -> dict[str, int]:
    """What ``held_bytes`` consist of, by kind: of all optimizers in the process, and the rest."""
    parameters = _parameters()
    seen: set[int] = set()
    rows = {
        "parameters": _new_bytes(parameters, device, seen),
        "gradients": _new_bytes((p.grad for p in parameters), device, seen),
        "optimizer state": _new_bytes(_states(), device, seen),
    }
    return {**rows, REST: max(0, held_bytes - sum(rows.values()))}


def gradient_storages(device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Of the gradients of all optimizers' parameters, those in DDP's buckets too; one may come several times."""
    return storages((p.grad for p in _parameters()), device)


def state_bytes(device: torch.device) -> int:
    """Bytes of the state of all optimizers in the process."""
    return _new_bytes(_states(), device, set())


def gradients(device: torch.device) -> dict[int, int]:
    """Bytes of the gradients of all optimizers' parameters, by their address; not those in DDP's buckets."""
    own = (g for p in _parameters() if (g := p.grad) is not None and not _is_in_bucket(g))
    return {s.data_ptr(): s.nbytes() for s in storages(own, device)}


def table(now: Mapping[str, int], planned: Mapping[str, int], held_bytes: int) -> str:
    """Lines that compare what is held with the plan's ledger, and with ``held_bytes`` planned before this forward."""
    then = {name: planned.get(name, 0) for name in now if name != REST}
    then[REST] = max(0, held_bytes - then["parameters"] - then["optimizer state"])
    then["gradients"] = 0 if now["gradients"] == 0 else then["gradients"]
    then[REST] = max(0, then[REST] - then["gradients"])
    rows = (f"{name} {format_bytes(now[name])} (planned {format_bytes(then[name])})" for name in now)
    return "\n".join(f"  {row}" for row in rows)


def _is_in_bucket(gradient: torch.Tensor) -> bool:
    """Whether a gradient is a part of something larger, with which it is freed; FSDP2's are freed with each other."""
    whole = local(gradient) is gradient and gradient.layout == torch.strided
    return whole and gradient.untyped_storage().nbytes() > gradient.nbytes


def _parameters() -> list[torch.Tensor]:
    return [p for o in hooks.optimizers() for group in o.param_groups for p in group["params"]]


def _states() -> list[object]:
    """Of all optimizers; one that stands around another may have none of its own, or none that is a mapping."""
    states = (getattr(optimizer, "state", None) for optimizer in hooks.optimizers())
    found = (of_one for state in states if isinstance(state, Mapping) for of_one in state.values())
    return [value for of_one in found for value in _values(of_one)]


def _values(state: object) -> list[object]:
    """What a parameter's state has, also in lists: LBFGS keeps its history in some."""
    return tree_leaves(dict(state) if isinstance(state, Mapping) else state)


def storages(tensors: Iterable[object], device: torch.device) -> Iterator[torch.UntypedStorage]:
    """Of those that are tensors on ``device``, one after the other."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == device.type:
            yield local(tensor).untyped_storage()


def _new_bytes(tensors: Iterable[object], device: torch.device, seen: set[int]) -> int:
    """Bytes of the storages on ``device`` that are not in ``seen``, to which they are added."""
    total = 0
    for storage in storages(tensors, device):
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
