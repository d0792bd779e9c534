"""A trial's models compared with eager: results, gradients and buffers, bit for bit.

This is done when the step was recorded, with the values that each model was called with first (kept in the host's
memory, where no allocator counts them), and with random gradients of its results. What is captured runs on the recorded
schedules, with recomputation, as the recorded step did.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from monetrun.core.errors import DeviceQueryFailed
from monetrun.core.plain_step import plain_step
from monetrun.core.step import StepRecord, replay
from monetrun.machine.device import cpu_memory
from monetrun.runtime.sharding import is_sharded
from monetrun.runtime.tensor_distance import distance
from monetrun.runtime.trigger import Nesting
from monetrun.runtime.unguarded import attention_kernels

# A step that takes longer than this is not made again.
_MOST_SECONDS = 10.0

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

_log = logging.getLogger("monetrun")


class Compared(Protocol):
    """A planned call: see ``PlannedCall``."""

    name: str
    nesting: Nesting

    @property
    def module(self) -> Callable[[], nn.Module | None]:
        """Gives the module, while it is there."""

    @property
    def parts(self) -> Sequence[Compared]:
        """Calls of the modules in it."""

    @property
    def captured(self) -> int:
        """How many graphs were captured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""


class EagerComparison:
    """Keeps what models are called with first, and compares them with eager at the trial's end."""

    def __init__(self) -> None:
        self._given: list[_Given] = []

    def of_first_call(self, call: Compared) -> Callable[..., Any]:
        """What makes the first call of ``call`` in its place."""

        def first(*args: Any, **kwargs: Any) -> Any:
            try:
                given = _given(call, args, kwargs)
            except Exception as error:  # noqa: BLE001 - a tensor may be of any kind
                _log.info("what %s is given cannot be kept: %s", call.name, error, exc_info=error)
                given = None
            if given is not None:
                self._given.append(given)
            return call(*args, **kwargs)

        return first

    def forget(self) -> None:
        """Nothing is compared any more."""
        self._given.clear()

    def differences(self, record: StepRecord, device: torch.device) -> tuple[str, ...]:
        """What differs from eager, a sentence each; none where a model cannot run again, or the step does not fit.

        Args:
            record: of the step.
            device: of the models.
        """
        found: list[str] = []
        for given in self._given if _fits(record, device) else ():
            try:
                found += _differences(given)
            except Exception as error:  # noqa: BLE001 - of the script's own code, which runs once more than in training
                _log.info("%s is not compared with eager: %s", given.call.name, error, exc_info=error)
        return tuple(found)


def _fits(record: StepRecord, device: torch.device) -> bool:
    """Whether the plain step is short, and twice what it takes is free; a GPU raises an error where it is not.

    Twice: results and gradients of one way are held while the other one computes, and all results have a gradient.
    """
    plain = replay(*plain_step(record))
    if plain.seconds > _MOST_SECONDS:
        return False
    try:
        return device.type != "cpu" or 2 * plain.peak_bytes < cpu_memory().free_bytes
    except DeviceQueryFailed:
        return False


@dataclass(frozen=True)
class _Value:
    """A tensor in the host's memory."""

    data: Any
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> _Value | None:
        """The value of ``tensor``; None for those that are not simply memory."""
        if tensor.is_conj() or tensor.is_neg():
            return None
        overlaps = any(step == 0 < size - 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or overlaps:
            return None
        data = tensor.detach().view(_SAME_SIZE[tensor.element_size()]).cpu().numpy().copy()
        return _Value(data, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """A new tensor of this value."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        made.view(_SAME_SIZE[self.dtype.itemsize]).copy_(torch.from_numpy(self.data))
        return made.requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class _Given:
    """What a model was called with."""

    call: Compared
    leaves: list[Any]
    spec: TreeSpec
    autocasts: tuple[Callable[[], contextlib.AbstractContextManager[Any]], ...]
    attention: tuple[bool, ...]  # the kernels that may compute it: the script may choose them around its forward

    def values(self) -> tuple[Any, Any, list[torch.Tensor]]:
        """Arguments, keyword arguments, and those of their tensors that are differentiated."""
        made: dict[int, torch.Tensor] = {}
        leaves = [made.setdefault(id(v), v.tensor()) if isinstance(v, _Value) else v for v in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs, [tensor for tensor in made.values() if tensor.requires_grad]


def _given(call: Compared, args: Any, kwargs: Any) -> _Given | None:
    """What a call is given; None if it can't be given again, or runs with hooks of FSDP2."""
    if (module := call.module()) is None or any(map(is_sharded, module.modules())):
        return None
    leaves, spec = tree_flatten((args, kwargs))
    known: dict[int, Any] = {}
    for leaf in leaves:
        known[id(leaf)] = _Value.of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)) or (known[id(leaf)] is None and leaf is not None):
            return None
    devices = {"cpu", *(v.device.type for v in known.values() if isinstance(v, _Value))}
    devices.update(p.device.type for p in module.parameters())
    autocasts = [
        partial(torch.autocast, d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in sorted(devices)
    ]
    return _Given(call, [known[id(leaf)] for leaf in leaves], spec, tuple(autocasts), attention_kernels())


@dataclass(frozen=True)
class _Values:
    """What a call has computed, each a list of tensors or None."""

    results: list[Any]
    gradients: list[Any]
    buffers: list[Any]


def _differences(given: _Given) -> list[str]:
    call = given.call
    if (module := call.module()) is None or not call.captured or given.attention != attention_kernels():
        return []
    with call.nesting.aside():
        eager, captured = _computed(given, module, _as_it_is), _computed(given, module, _planned)
        found = _told(call.name, eager, captured)
        if found:  # either may give other values in each call
            again = [eager, *(_computed(given, module, run) for run in (_as_it_is, _as_it_is))]
            alike = all(not _told("", one, other) for one, other in itertools.pairwise(again))
            found = found if alike and not _told("", captured, _computed(given, module, _planned)) else []
    return found


def _as_it_is(call: Compared, module: nn.Module, args: Any, kwargs: Any) -> Any:
    parts = [part for one in call.parts if (part := one.module()) is not None]
    put = [part._compiled_call_impl for part in parts]
    for part in parts:
        part._compiled_call_impl = None
    try:
        with call.nesting.entered():
            return module._call_impl(*args, **kwargs)
    finally:
        for part, own in zip(parts, put, strict=True):
            part._compiled_call_impl = own


def _planned(call: Compared, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return call(*args, **kwargs)


def _computed(given: _Given, module: nn.Module, run: Callable[[Compared, nn.Module, Any, Any], Any]) -> _Values:
    """What ``run`` computes, with its gradients; buffers and random numbers are as before afterwards."""
    args, kwargs, inputs = given.values()
    inputs = [*(p for p in module.parameters() if p.requires_grad), *inputs]
    with contextlib.ExitStack() as stack:
        buffers = stack.enter_context(_restored(module))
        stack.enter_context(_same_random_numbers({p.device for p in module.parameters() if p.is_cuda}))
        stack.enter_context(torch.enable_grad())
        with contextlib.ExitStack() as autocasts:
            for autocast in given.autocasts:
                autocasts.enter_context(autocast())
            results = [
                leaf for leaf in tree_leaves(run(given.call, module, args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
        roots = [r for r in results if r.requires_grad and r.is_floating_point()]
        gradients: Iterable[Any] = ()
        # in parts, autograd adds up the terms of what results have in common: of those that training differentiates
        if roots and inputs and not given.call.parts:
            grad: Any = inspect.unwrap(torch.autograd.grad)  # the script's calls of it are counted
            gradients = grad(roots, inputs, [_random_like(r) for r in roots], allow_unused=True)
        results = [r.detach() for r in results]
        return _Values(results, list(gradients), [b.detach().clone() for b in buffers()])


def _random_like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return made.to(tensor.device, tensor.dtype)


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Buffers are what they were before, afterwards; gives what gives the present ones."""
    owners = [
        (m, name, b, b.detach().clone()) for m in module.modules() for name, b in m._buffers.items() if b is not None
    ]
    try:
        yield lambda: [b for m, name, *_ in owners if (b := m._buffers.get(name)) is not None]
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in owners:
                owner._buffers[name] = buffer
                if _difference(value, buffer) > 0:
                    buffer.copy_(value)


@contextlib.contextmanager
def _same_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])


def _told(name: str, eager: _Values, captured: _Values) -> list[str]:
    """What of the model called ``name`` differs, in one sentence; empty: nothing does."""
    found, most = [], 0.0
    for what, ones, others in (
        ("results", eager.results, captured.results),
        ("gradients", eager.gradients, captured.gradients),
        ("buffers", eager.buffers, captured.buffers),
    ):
        if len(ones) != len(others):
            return [f"{name} gives {len(others)} {what}, and {len(ones)} in eager"]
        differing = [d for one, other in zip(ones, others, strict=True) if (d := _difference(one, other)) > 0]
        if differing:
            found.append(f"{len(differing)} of {len(ones)} {what}")
            most = max(most, *differing)
    return (
        [f"{name}: {', '.join(found)} differ from eager's, by up to {most:.1g} of the largest value"] if found else []
    )


def _difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The largest difference of two tensors, as a part of the largest value; 0 if none, infinite for other shapes."""
    if one is None or other is None:
        given = other if one is None else one
        return 0.0 if given is None or not bool(given.count_nonzero()) else math.inf
    largest = distance(one, other)[0] if one.dtype == other.dtype else math.inf
    if not largest:
        return 0.0
    most = distance(torch.where(one.isfinite(), one, 0), None)[0]
    return max(largest / most, sys.float_info.min) if most else math.inf
