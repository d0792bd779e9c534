"""Models sharded by FSDP2 (``fully_shard``): which modules are, and how only their forward is captured.

FSDP2 gathers a module's parameters in a hook before its forward, and frees them in one after it; in the backward, hooks
on the module's outputs and inputs do the same, and reduce the gradients. Each time the parameters have the same
storages, so that what a graph saves of them is valid whenever the graph runs. The hooks run as they are: what they
allocate lies between the calls of graphs.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import nn

from monetrun.core.step import Break

FLATTENED = "FSDP1 flattens its parameters, which a plan does not see; FSDP2 (fully_shard) is planned"


def is_sharded(module: nn.Module) -> bool:
    """Whether the module has hooks of ``fully_shard``."""
    return "torch.distributed.fsdp" in sys.modules and isinstance(module, torch.distributed.fsdp.FSDPModule)


def break_between_blocks(module: nn.Module, path: str) -> Break | None:
    """Why a module with sharded modules in it is not captured whole; None where it has none."""
    count = sum(is_sharded(child) for child in module.modules() if child is not module)
    if not count:
        return None
    modules = f"{count} sharded modules" if count > 1 else "1 sharded module"
    return Break(path, type(module).__name__, modules, "hooks of fully_shard run within it", in_python=False)


def unplannable(module: nn.Module, replicated: Container[int] | None = None) -> str | None:
    """Why a module that is split among ranks cannot be planned, or None.

    ``replicated``: parameters that FSDP2 manages for a module around it, by ``replicated_within``.
    """
    if type(module).__name__ == "FullyShardedDataParallel":
        return FLATTENED
    if "torch.distributed.tensor" not in sys.modules:
        return None
    replicated = replicated_within([module]) if replicated is None else replicated
    for owner in module.modules():
        managed = getattr(owner, "_is_fsdp_managed_module", False)
        parameter: Any
        for parameter in owner._parameters.values():
            cuts = _cuts(parameter)
            if cuts is not None and (cuts > bool(managed) or not (managed or id(parameter) in replicated)):
                return "tensor parallelism splits its operators among ranks, which the plan of one rank does not see"
            if cuts is not None and parameter.device.type == "cpu" != parameter.device_mesh.device_type:
                return "its parameters are offloaded to the CPU (CPUOffloadPolicy): a plan is of one device's memory"
    return None


def replicated_within(modules: Iterable[nn.Module]) -> set[int]:
    """The ``id`` of each parameter that FSDP2 keeps whole in each rank for one of the modules (``replicate``)."""
    managing = {id(m): m for module in modules for m in module.modules() if is_sharded(m)}.values()
    groups = [group for module in managing for group in parameter_groups(module)]
    return {id(p.sharded_param) for g in groups if not hasattr(g.mesh_info, "shard_mesh_size") for p in g.fsdp_params}


def parameter_groups(module: Any) -> list[Any]:
    """What FSDP2 gathers together for a module that ``is_sharded`` (each an ``FSDPParamGroup``)."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 has flattened the parameters of a module, or of one around it, after its optimizer was made."""
    if not getattr(module, "_is_fsdp_managed_module", False) or is_sharded(module):
        return False
    kind: type = torch.distributed.fsdp.FullyShardedDataParallel
    around = (thing for thing in gc.get_objects() if issubclass(type(thing), kind))
    return any(child is module for one in around for child in one.modules())


def stage_of_a_pipeline(module: nn.Module) -> str | None:
    """Why a module that is a stage of a pipeline cannot be planned; None where it is none."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return None
    kind: type = torch.distributed.pipelining.stage._PipelineStageBase  # type: ignore[attr-defined]
    if any(issubclass(type(thing), kind) and thing.submod is module for thing in gc.get_objects()):
        return "it is a stage of a pipeline: ranks run different graphs, for which there is no common plan"
    return None


def around_forward(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module with all its hooks, and ``run`` with what they give in place of its forward.

    What the script sets as the instance's forward meanwhile stays (Lightning's strategies set one for a single call).
    """
    scripts = module.__dict__.get("forward", _ABSENT)

    def forward(*given: Any, **named: Any) -> Any:
        nonlocal scripts
        _set_forward(module, scripts)
        try:
            return run(module, given, named)
        finally:
            scripts = module.__dict__.get("forward", _ABSENT)
            _set_forward(module, forward)

    _set_forward(module, forward)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        if module.__dict__.get("forward") is forward:
            _set_forward(module, scripts)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that this rank has; another tensor itself."""
    return tensor if _cuts(tensor) is None else tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def _cuts(tensor: Any) -> int | None:
    """By how many dimensions of a mesh a tensor is cut into shards; None where it is no DTensor."""
    if "torch.distributed.tensor" not in sys.modules or not isinstance(tensor, torch.distributed.tensor.DTensor):
        return None
    return sum(placement.is_shard() for placement in tensor.placements)


_ABSENT = object()


def _set_forward(module: nn.Module, value: Any) -> None:
    """Set ``forward`` of the instance; with ``_ABSENT`` its class's."""
    if value is _ABSENT:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = value
