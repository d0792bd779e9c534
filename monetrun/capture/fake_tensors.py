"""Runs a script on tensors without memory, which have a shape, a dtype and strides only, and counts their bytes.

An unmodified training script runs so, and ``FakeMeter`` adds up what it would have allocated. What needs a tensor's
values fails, with few exceptions (see ``fake_values``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from monetrun.capture import fake_values
from monetrun.capture.peaks import NotWatching, Peaks
from monetrun.core.patched import patched


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode that makes tensors fake; see ``fake_tensors`` and ``start``.

    Attributes:
        meter: counts the tensors that are made; set by ``start``.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.meter: FakeMeter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on shapes; outside of compilation, count its results and refuse what needs values."""
        if self.meter is None or TracingContext.try_get() is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise fake_values.needs_value(str(func)) from error
        for leaf in tree_leaves(result):
            self.meter.count(leaf)
        return result


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensors]:
    """A context in which every new tensor is fake; operators also accept real tensors, and use only their shapes."""
    original = nn.init._no_grad_trunc_normal_

    def unchanged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor  # torch's own reads the values that it draws, from torch 2.15 on

    nn.init._no_grad_trunc_normal_ = unchanged
    try:
        with FakeTensors() as mode:
            yield mode
    finally:
        nn.init._no_grad_trunc_normal_ = original


# ---- a whole script


class FakeMeter(NotWatching):
    """Counts the bytes of fake storages, each from its allocation until no tensor uses it.

    As exact as an allocator for tensors; the workspace of kernels is not counted.
    """

    exact = True

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._nbytes: dict[int, int] = {}  # of each of them
        self._current = 0
        self._peak = 0

    def count(self, value: Any) -> None:
        """Count the storage of an operator's result if it is new."""
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        key, nbytes = storage._cdata, int(storage.nbytes())
        if key in self._alive:
            return

        def freed(_: Any) -> None:
            del self._alive[key]
            self._current -= self._nbytes.pop(key)

        self._alive[key] = weakref.ref(storage, freed)
        self._grows(key, nbytes)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size, 0 where its bytes are freed (as FSDP2 frees parameters)."""
        if storage._cdata in self._alive:
            self._grows(storage._cdata, int(storage.nbytes()))

    def _grows(self, key: int, nbytes: int) -> None:
        self._current += nbytes - self._nbytes.get(key, 0)
        self._nbytes[key] = nbytes
        self._peak = max(self._peak, self._current)

    def current_bytes(self) -> int:
        """Allocated now."""
        return self._current

    def peak_bytes(self) -> int:
        """The most since ``reset_peak``."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak, from what is allocated now."""
        self._peak = self._current

    def peaks(self) -> Peaks:
        """Nothing is cached."""
        return Peaks(self._peak)

    def synchronize(self) -> None:
        """Nothing runs."""


_running: FakeTensors | None = None


def meter() -> FakeMeter | None:
    """The meter of the script that runs on fake tensors; None where none does."""
    return None if _running is None else _running.meter


def start(undo: contextlib.ExitStack) -> None:
    """From here on, make the script's tensors fake and count them; closing ``undo`` ends this.

    Data loaders work as usual, and their batches are replaced by fake tensors of the same shapes; ``torch.save`` writes
    nothing. ``Tensor.item()`` of a floating-point tensor gives an ``Unknown``; whatever else needs values raises
    ``CaptureFailed``.
    """
    global _running
    mode = undo.enter_context(fake_tensors())
    mode.meter = FakeMeter()
    _running = mode

    def stop() -> None:
        global _running
        _running = None

    undo.callback(stop)
    patches = (*_loader_patches(), *_tensor_patches(mode), *_mesh_patches(), *fake_values.patches())
    for owner, name, function in patches:
        undo.enter_context(patched(owner, name, function))


def _loader_patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Data loaders that work on real tensors: (owner, name, replacement)."""
    loader, iterator = torch.utils.data.DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter
    begin: Any = loader.__iter__
    following: Any = iterator.__next__

    def begin_for_real(self: Any) -> Any:
        with unset_fake_temporarily():
            return begin(self)

    def following_for_real(self: Any) -> Any:
        with unset_fake_temporarily():
            batch = following(self)
        return tree_map_only(torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else torch.empty_like(t), batch)

    return [(loader, "__iter__", begin_for_real), (iterator, "__next__", following_for_real)]


def _mesh_patches() -> list[tuple[Any, str, Any]]:
    """Device meshes, whose tensors of ranks are real: (owner, name, replacement)."""
    if not torch.distributed.is_available():
        return []
    from torch.distributed import device_mesh

    def for_real(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return run

    make = for_real(device_mesh.init_device_mesh)
    found: list[tuple[Any, str, Any]] = [
        (owner, "init_device_mesh", make) for owner in (device_mesh, torch.distributed)
    ]
    for name, member in vars(device_mesh.DeviceMesh).items():
        if isinstance(member, property):
            found.append((device_mesh.DeviceMesh, name, property(for_real(member.fget), member.fset)))  # type: ignore[arg-type]
        elif isinstance(member, (staticmethod, classmethod)):
            found.append((device_mesh.DeviceMesh, name, type(member)(for_real(member.__func__))))
        elif inspect.isfunction(member):
            found.append((device_mesh.DeviceMesh, name, for_real(member)))
    return found


def _tensor_patches(mode: FakeTensors) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Copying, swapping and saving of fake tensors, and steps under a scaler: (owner, name, replacement)."""
    deep: Any = torch.Tensor.__deepcopy__
    swap: Any = torch.utils.swap_tensors
    resize: Any = torch.UntypedStorage.resize_

    def copied(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(self, FakeTensor):
            return deep(self, memo)
        if id(self) not in memo:  # torch's own would copy the mode too
            new = self.detach().clone()
            parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = (
                nn.Parameter(new, self.requires_grad) if parameter else new.requires_grad_(self.requires_grad)
            )
        return memo[id(self)]

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        # Module.to() swaps fake parameters, and fails for those to which the mode has a weak reference
        remembered = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [k for k, tensor in remembered.items() if tensor is one or tensor is other]:
            del remembered[key]
        swap(one, other)

    def resized(self: torch.UntypedStorage, size: int) -> Any:
        result = resize(self, size)
        if mode.meter is not None:
            mode.meter.resized(self)
        return result

    def stepped(self: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # no gradient has overflown

    def unsaved(*args: Any, **kwargs: Any) -> None:
        """Fake tensors have nothing to save, and an existing checkpoint must not be overwritten."""

    return [
        (torch.Tensor, "__deepcopy__", copied),
        (torch.utils, "swap_tensors", swapped),
        (torch.UntypedStorage, "resize_", resized),
        (torch, "save", unsaved),
        (torch.amp.GradScaler, "_maybe_opt_step", stepped),
    ]
