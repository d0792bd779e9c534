"""Which modules of the process can be planned: those that own trained parameters and are of a kind we can capture."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from monetrun.capture.allocator_history import other_allocator
from monetrun.runtime import sharding
from monetrun.runtime.planned_calls import PlannedCall
from monetrun.runtime.trigger import Trigger
from monetrun.runtime.unplannable_use import Compilations


def owners(trained: set[int]) -> list[nn.Module]:
    """All modules in the process that own, directly or through a child, one of the parameters (given by ``id``)."""
    owns: dict[int, bool] = {}

    def check(module: nn.Module) -> bool:
        known = owns.get(id(module))
        if known is None:
            owns[id(module)] = False  # a cycle ends here
            direct = any(id(p) in trained for p in module._parameters.values())
            within = [check(child) for child in module._modules.values() if child is not None]
            known = owns[id(module)] = direct or any(within)
        return known

    def found() -> list[nn.Module]:
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        return [m for m in modules if "_parameters" in m.__dict__ and "_modules" in m.__dict__ and check(m)]

    if (those := found()) or not gc.get_freeze_count():
        return those
    _unfreeze()
    return found()


@functools.cache
def _unfreeze() -> None:
    """List what the script has frozen, too. Frozen again, what has come since would never be collected."""
    gc.unfreeze()


# After so many optimizers, each of one parameter of the same sizes that no module has, the next ones are taken for such
# without a look through all objects, which takes 0.2 s (an attack, or a latent code, for each batch).
_MOST_ALONE = 4


class Owners:
    """Finds the ``owners`` of parameters, by one look at all objects for all of a model: each may have an optimizer."""

    def __init__(self) -> None:
        # by the id of a parameter: no reference to it, which would forbid ``Module.to`` to swap it with another tensor
        self._found: dict[int, list[weakref.ref[nn.Module]]] = {}
        self._unowned: weakref.WeakKeyDictionary[Optimizer, set[int]] = weakref.WeakKeyDictionary()
        self._alone: Counter[tuple[torch.Size, ...]] = Counter()  # optimizers of tensors in no module, by their sizes

    def trained_by(self, optimizer: Optimizer) -> list[nn.Module]:
        """The owners of an optimizer's parameters; of those that have none when they are looked for first, nothing."""
        known = self._unowned.setdefault(optimizer, set())
        parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        sizes = tuple(p.shape for p in parameters if isinstance(p, nn.Parameter))
        if self._alone[sizes] >= _MOST_ALONE:
            return []
        found = self.of(parameters)
        self._alone[sizes] += not found and len(sizes) == 1
        known |= {id(p) for p in parameters if not self._found.get(id(p))}
        return found

    def of(self, parameters: Sequence[torch.Tensor]) -> list[nn.Module]:
        """The owners of these."""
        parameters = [p for p in parameters if isinstance(p, nn.Parameter)]  # no module has other tensors as its own
        if not all(map(self._is_known, parameters)):
            self._look(parameters)
        refs = [ref for p in parameters for ref in self._found[id(p)]]
        return list({id(module): module for ref in refs if (module := ref()) is not None}.values())

    def _is_known(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter was looked for, and not another one that had its id."""
        modules = [m for ref in self._found.get(id(parameter), ()) if (m := ref()) is not None]
        return any(own is parameter for m in modules for own in m._parameters.values())

    def _look(self, parameters: Sequence[torch.Tensor]) -> None:
        self._found = {k: refs for k, refs in self._found.items() if any(ref() is not None for ref in refs)}
        self._found |= {id(p): [] for p in parameters}
        own = owners(set(map(id, parameters)))
        known = {id(p) for module in own for p in module.parameters()}
        self._found |= {k: [] for k in known}
        for module in owners(known) if own else ():
            for p in module.parameters():
                if id(p) in known:
                    self._found[id(p)].append(weakref.ref(module))


def outermost_name(modules: Iterable[nn.Module]) -> str:
    """The kind of the module among these that no other of them contains."""
    modules = list(modules)
    within = {id(child) for module in modules for child in module.modules() if child is not module}
    return ", ".join(dict.fromkeys(type(m).__name__ for m in modules if id(m) not in within)) or "a model"


def unplannable(module: nn.Module, replicated: Container[int] | None = None) -> str | None:
    """Why a module cannot be planned, or None; ``replicated``: see ``sharding.unplannable``."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a scripted module, whose operators are hidden from capture"
    if isinstance(module, nn.DataParallel):
        return "DataParallel replicates it in one process; use DistributedDataParallel"
    if reason := sharding.unplannable(module, replicated):
        return reason
    if _is_compiled(module):
        return "it is compiled already (torch.compile); without that monetrun can plan it"
    return None


def judged(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str | None]]:
    """The ``modules`` that are judged by themselves, and why each cannot be planned, or None.

    Left out is what lies within a module that is split among ranks in a way that cannot be planned, which runs as it
    is, and each compiled part of one that is not compiled, which is captured with it.
    """
    modules = list(modules)
    replicated = sharding.replicated_within(modules)
    found = [(module, unplannable(module, replicated)) for module in modules]
    split = [module for module, reason in found if reason and sharding.unplannable(module, replicated)]
    plain = [m for m, reason in found if reason is None and not isinstance(m, nn.parallel.DistributedDataParallel)]
    left_out = {id(child) for m in split for child in m.modules() if child is not m}
    left_out |= {id(child) for m in plain for child in m.modules() if child is not m and _is_compiled(child)}
    return [(module, reason) for module, reason in found if id(module) not in left_out]


def called_compiled(optimizer: Optimizer, compilations: Compilations, planned: Sequence[nn.Module]) -> str:
    """Why what an optimizer trains, about to make its first step, runs without a plan: it is compiled; else empty.

    Args:
        optimizer: of the script.
        compilations: the script's own, within which what it trains may have been called.
        planned: the modules that are.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if not (reason := compilations.reason(trained, planned)):
        return ""
    modules = owners({id(p) for p in trained})
    if any(unplannable(module) for module in modules):
        return ""  # it was warned of
    return f"{outermost_name(modules)} runs without a plan: it is {reason}"


def _is_compiled(module: nn.Module) -> bool:
    call = module._compiled_call_impl
    return type(module).__name__ == "OptimizedModule" or not (call is None or isinstance(call, (Trigger, PlannedCall)))


def device_of(module: nn.Module) -> torch.device:
    """``device_of_parameters`` of the module's."""
    return device_of_parameters(module.parameters())


def of_another_kind(module: nn.Module) -> str:
    """Why a module cannot be planned that is called in training, as only that shows; empty where it can.

    It is on another accelerator, a stage of a pipeline, or its memory is not of torch's caching allocator's own pool;
    or it was split among ranks after its optimizer was made, as Accelerate does.
    """
    if (reason := unplannable(module)) or (reason := _on_another_device(module)):
        return reason
    if sharding.is_flattened(module):
        return sharding.FLATTENED
    if reason := sharding.stage_of_a_pipeline(module):
        return reason
    if name := other_allocator(device_of(module)):
        return f"its memory is of the allocator {name}, of which monetrun knows nothing"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "its first training forward is captured in a CUDA graph, which has memory of its own"
    return ""


# "meta": nothing is allocated there, which is no other accelerator's rules
_KINDS = ("cpu", "cuda", "meta")


def _on_another_device(module: nn.Module) -> str:
    """Why a module cannot be planned that has tensors where neither the CPU's nor CUDA's rules hold; else empty."""
    kinds = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    if others := sorted(kinds.difference(_KINDS)):
        return f"it is on {', '.join(others)}, and monetrun plans for CPUs and CUDA devices only"
    if "cuda" in kinds and torch.version.hip:
        return "nothing is planned on ROCm yet: memory is read, and kernels are counted, as on CUDA devices of NVIDIA"
    return ""


def device_of_parameters(parameters: Iterable[torch.Tensor]) -> torch.device:
    """The first device for which can be planned and that is not the CPU, or the CPU."""
    for parameter in parameters:
        if parameter.device.type in _KINDS and parameter.device.type != "cpu":
            return parameter.device
    return torch.device("cpu")
