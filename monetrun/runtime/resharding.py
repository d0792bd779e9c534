"""Whether modules sharded by FSDP2 keep their parameters between forward and backward: sees it, and chooses it.

``fully_shard(reshard_after_forward=True)`` frees a module's gathered parameters after its forward, and gathers them
again before its backward. Where they are kept, memory is held for one all-gather less; the results are the same. What
is chosen holds within a planned call only: evaluation does as the script says. So does what the script sees: where it
says that they are freed, it finds a module's own part of the parameters after the forward, though the gathered ones are
still there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from monetrun.capture.gradient_terms import within_backward
from monetrun.core.event import FREE, GATHER, OUTSIDE, REDUCE, WAIT, Action, Event, is_optimizer_step
from monetrun.core.plan import Plan
from monetrun.core.sharding import ShardedModule
from monetrun.runtime.collectives import through_gloo
from monetrun.runtime.sharding import is_sharded, parameter_groups
from monetrun.runtime.trigger import Nesting, NotCopied, called

_kept: weakref.WeakSet[Any] = weakref.WeakSet()  # groups that kept their parameters though the script has them freed

# Attributes of torch's ``FSDPParamGroup``; in a torch where one is missing, modules do as the script says.
_USED = ("post_forward_mesh_info", "mesh_info", "fsdp_params", "_training_state", "_all_gather_result", "is_unsharded")
_USED_OF_PARAMETERS = ("_setattr_on_modules", "sharded_param")


def within_planned_call(
    module: nn.Module, name: str, recorder: ShardingRecorder | None, plan: Plan | None
) -> contextlib.AbstractContextManager[None]:
    """Within a planned call of ``module``, it keeps or frees its parameters after the forward as is planned.

    While a step is recorded, all free theirs: what keeping them changes follows from that (``core.keeping``).
    """
    if recorder is not None:
        return recorder.within_call(module, name)
    return within_call(module, None if plan is None else plan.keeps_parameters.get(name))


class RunsAsPlanned(NotCopied):
    """Runs a sharded module as it is, but keeps or frees its parameters as is planned; stands on it.

    Other ranks may run the plan: collectives have to match theirs.
    """

    def __init__(self, module: nn.Module, nesting: Nesting, keeps: bool | None) -> None:
        self._module, self._nesting, self._keeps = weakref.ref(module), nesting, keeps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        own = self._module()
        module = called(own)
        if module is not own:
            return module._call_impl(*args, **kwargs)
        forward_begins(module)
        trains = torch.is_grad_enabled() and (module.training or self._nesting.any_mode)
        with within_call(module, self._keeps if trains else None):
            return module._call_impl(*args, **kwargs)


def left_as_planned(module: nn.Module, nesting: Nesting, name: str, plan: Plan | None) -> RunsAsPlanned | None:
    """What runs a module from now on, none of whose calls is planned any more; None: it runs as it is.

    ``name``: in the plan, which has nothing of a root.
    """
    if plan is None or not plan.keeps_parameters or not is_sharded(module):
        return None
    keeps = plan.keeps_parameters.get(name)
    return RunsAsPlanned(module, nesting, keeps) if keeps is not None or _is_root(module) else None


@contextlib.contextmanager
def within_call(module: nn.Module, keeps: bool | None) -> Iterator[None]:
    """Within a call of ``module``, have it keep its parameters after the forward, or free them; None: as it is."""
    group = parameter_group(module) if keeps is not None else None
    if group is None or not is_choice(module):
        yield
        return
    scripted = group.post_forward_mesh_info
    group.post_forward_mesh_info = None if keeps else group.mesh_info
    if keeps and scripted is not None:
        _kept.add(group)
    try:
        yield
    finally:
        group.post_forward_mesh_info = scripted
        if keeps and scripted is not None and not within_backward():
            _have_own_parts_seen(group)


def _have_own_parts_seen(group: Any) -> None:
    """Until something has the parameters gathered, the modules have this rank's part of them, as if they were freed."""
    if not group.is_unsharded:
        return
    _set_parameters(group, "sharded_param")

    def unshard(async_op: bool = False) -> None:
        if group.__dict__.get("unshard") is unshard:
            del group.unshard
        if group.is_unsharded:
            _set_parameters(group, "unsharded_param")
        type(group).unshard(group, async_op)

    group.unshard = unshard


def _set_parameters(group: Any, which: str) -> None:
    for parameter in group.fsdp_params:
        parameter._setattr_on_modules(getattr(parameter, which))


def forward_begins(module: nn.Module) -> None:
    """Before a forward, in training or not: that of a root frees what no backward of an earlier one has freed.

    So does FSDP2 after each forward: the script may have changed the parameters since.
    """
    if _kept and is_sharded(module) and _is_root(module) and not within_backward():
        free_kept()


def free_kept() -> None:
    """Free what no backward has freed (a forward without one): the gathered parameters are not those of now."""
    while _kept:
        group = _kept.pop()
        if group.is_unsharded and group._training_state.name == "IDLE":  # not within a backward
            group.reshard()


def parameter_group(module: nn.Module) -> Any:
    """The parameters that FSDP2 gathers for ``module`` (an ``FSDPParamGroup``); None if there is no or no single one.

    Nor is there one for modules that share it, ``fully_shard([norm, head])``: which of them is called last is not
    known.
    """
    if not is_sharded(module):
        return None
    groups, sharing = parameter_groups(module), module._get_fsdp_state()._modules  # type: ignore[operator]
    if len(groups) != 1 or len(sharing) != 1 or not all(hasattr(groups[0], name) for name in _USED):
        return None
    if not all(hasattr(p, name) for p in groups[0].fsdp_params for name in _USED_OF_PARAMETERS):
        return None
    return groups[0]


def _is_root(module: nn.Module) -> bool:
    """Whether a sharded module is in no other one, once FSDP2 has initialized that."""
    return module._get_fsdp_state()._is_root is True  # type: ignore[operator, no-any-return]


def is_choice(module: nn.Module) -> bool:
    """Whether it can be chosen for a module with a ``parameter_group``, once FSDP2 has initialized its root.

    Not for the root, whose backward comes right after its forward, and whose parameters the script may read between
    the two; nor where they are resharded to fewer ranks.
    """
    group = parameter_group(module)
    if module._get_fsdp_state()._is_root is not False or not hasattr(group.mesh_info, "shard_mesh_size"):  # type: ignore[operator]
        return False
    return group.post_forward_mesh_info is None or group.post_forward_mesh_info is group.mesh_info


class ShardingRecorder:
    """Sees what FSDP2 does with the sharded modules while a step is recorded.

    Args:
        begins: called when an action begins; gives whether the step is being recorded.
        ended: called with the action once it has ended.

    """

    def __init__(self, begins: Callable[[], bool], ended: Callable[[Action], None]) -> None:
        self._begins, self._ended = begins, ended
        self._watched: list[_Watched] = []
        self._numbers: dict[int, int] = {}  # index of a group, by its id
        self._called: set[int] = set()  # modules whose planned call is running
        self._freed: set[int] = set()  # modules that were freed after a forward, and not gathered since
        self._again: set[int] = set()  # modules that are gathered again
        self._stopped = False

    @contextlib.contextmanager
    def within_call(self, module: nn.Module, name: str) -> Iterator[None]:
        """Within a planned call of ``module``, have it free its parameters after the forward if that is a choice."""
        group = parameter_group(module)
        if group is None or (self._stopped and id(group) not in self._numbers):
            yield
            return
        if id(group) not in self._numbers:
            self._watch(group, module, name)
        i = self._numbers[id(group)]
        self._called.add(i)
        try:
            with within_call(module, False if self._watched[i].choice else None):
                yield
        finally:
            self._called.discard(i)

    def stop(self) -> tuple[ShardedModule, ...]:
        """Nothing is recorded from now on; gives the modules, in the order in which they were called first."""
        self._stopped = True
        for watched in self._watched:
            for name in ("unshard", "wait_for_unshard", "reshard"):
                watched.group.__dict__.pop(name, None)
        return tuple(map(_described, self._watched))

    def _watch(self, group: Any, module: nn.Module, name: str) -> None:
        i = self._numbers[id(group)] = len(self._watched)
        self._watched.append(_Watched(group, name, group.post_forward_mesh_info is None, is_choice(module)))
        group.unshard = partial(self._unshard, group, i, group.unshard)
        group.wait_for_unshard = partial(self._wait, group, i, group.wait_for_unshard)
        group.reshard = partial(self._reshard, group, i, group.reshard)

    def _unshard(self, group: Any, i: int, run: Callable[..., None], async_op: bool = False) -> None:
        if group._all_gather_result is not None or group.is_unsharded or not self._begins():
            run(async_op)
            return
        run(async_op)
        if group._all_gather_result is not None:
            if i in self._freed:
                self._freed.remove(i)
                self._again.add(i)
            self._ended(Action(GATHER, i, unless_kept=i in self._again))

    def _wait(self, group: Any, i: int, run: Callable[[], None]) -> None:
        if group._all_gather_result is None or not self._begins():
            run()
            return
        run()
        self._ended(Action(WAIT, i, unless_kept=i in self._again))
        self._again.discard(i)

    def _reshard(self, group: Any, i: int, run: Callable[[], None]) -> None:
        if not group.is_unsharded or not self._begins():
            run()
            return
        after_forward = group._training_state.name == "FORWARD"
        run()
        if group.is_unsharded:
            return
        if after_forward and i in self._called and self._watched[i].choice:
            self._freed.add(i)
            self._ended(Action(FREE, i, unless_kept=True))
        else:
            self._ended(Action(REDUCE if not after_forward and group.reduce_grads else FREE, i))


def with_lingering_copies(
    events: Sequence[Event], modules: Sequence[ShardedModule], device: torch.device
) -> list[Event]:
    """The events where gloo's copy of a module's gradients may be held until the next call of a graph.

    Which it is depends on when gloo's thread runs; a plan has to do for both.
    """
    if not modules or device.type != "cpu" or not through_gloo(device):
        return list(events)
    found, copied, reduced = [], 0, None
    for event in events:
        if event.kind != OUTSIDE or is_optimizer_step(event.kind, event.name):
            copied = 0
        high = max(event.peak_bytes, event.delta_bytes) if copied else 0
        found.append(replace(event, peak_bytes=high + copied) if copied else event)
        if reduced is not None:  # the reduce-scatter itself, whose own peak has the copy
            copied, reduced = max(copied, modules[reduced].reduced_bytes), None
        if event.action is not None and event.action.kind == REDUCE:
            reduced = event.action.module
    return found


@dataclass(frozen=True, slots=True)
class _Watched:
    """A module of which a step is recorded: see ``ShardedModule``."""

    group: Any
    name: str
    kept: bool
    choice: bool


def _described(watched: _Watched) -> ShardedModule:
    group = watched.group
    ranks = group._all_gather_process_group.size() if hasattr(group.mesh_info, "shard_mesh_size") else 1
    gathered = reduced = 0
    for parameter in group.fsdp_params:
        count = ranks * parameter._sharded_param_data.numel()
        own = parameter.sharded_param
        gathered += count * (parameter.param_dtype or own.dtype).itemsize
        if own.requires_grad:
            reduced += count * (parameter.reduce_dtype or parameter.param_dtype or own.dtype).itemsize
    return ShardedModule(watched.name, gathered, reduced, ranks, watched.kept, watched.choice)
