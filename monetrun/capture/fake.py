"""Tensors without memory: a mode in which whatever is made has a shape, a dtype and strides, and nothing else.

In it a training script runs as it is, and what it would have allocated is added up. What it cannot do is look at
values; see ``Unknown`` for the one exception, and ``refused`` for the error.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
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

from monetrun.core.errors import CaptureFailed

_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode; see ``fake_tensors`` and ``start``.

    Attributes:
        meter: counts what is made, once ``start`` was called.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.meter: FakeMeter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` on shapes; outside of compilation count what it makes, and refuse what needs values."""
        if self.meter is None or TracingContext.try_get() is not None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise refused(str(func)) from error
        for leaf in tree_leaves(result):
            self.meter.saw(leaf)
        return result


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensors]:
    """A context in which every tensor that is made is fake; real ones that operators are given are taken as such."""
    original = nn.init._no_grad_trunc_normal_

    def shaped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor  # from torch 2.15 on it looks at the values that it draws

    nn.init._no_grad_trunc_normal_ = shaped
    try:
        with FakeTensors() as mode:
            yield mode
    finally:
        nn.init._no_grad_trunc_normal_ = original


# ---- a whole script


class FakeMeter:
    """Counts the bytes of fake storages, from where they are made to where the last tensor on them is gone.

    As exact as an allocator for what tensors hold; what kernels take beside them is not known here.
    """

    exact = True

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._current = 0
        self._peak = 0

    def saw(self, value: Any) -> None:
        """Something was made, or passed on: its storage is counted if it is new."""
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return
        storage = value.untyped_storage()
        key, nbytes = storage._cdata, int(storage.nbytes())
        if key in self._alive:
            return

        def died(_: Any) -> None:
            del self._alive[key]
            self._current -= nbytes

        self._alive[key] = weakref.ref(storage, died)
        self._current += nbytes
        self._peak = max(self._peak, self._current)

    def current_bytes(self) -> int:
        """Held now."""
        return self._current

    def peak_bytes(self) -> int:
        """The most since ``reset_peak``."""
        return self._peak

    def reset_peak(self) -> None:
        """Start a new peak, from what is held now."""
        self._peak = self._current

    def synchronize(self) -> None:
        """Nothing runs."""


_running: FakeTensors | None = None


def meter() -> FakeMeter | None:
    """Of the script that runs on fake tensors, if this is one."""
    return None if _running is None else _running.meter


def start(undo: contextlib.ExitStack) -> None:
    """From here on, what the script makes is fake and counted; ``undo`` has what ends that.

    Data loaders work for real, and what they give is taken by its shape; ``torch.save`` writes nothing.
    ``Tensor.item()`` of a floating-point tensor is an ``Unknown``; what else asks for values raises ``CaptureFailed``.
    """
    global _running
    mode = undo.enter_context(fake_tensors())
    mode.meter = FakeMeter()
    _running = mode

    def stop() -> None:
        global _running
        _running = None

    undo.callback(stop)
    loader, iterator = torch.utils.data.DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter
    begin: Any = loader.__iter__
    following: Any = iterator.__next__
    item: Any = torch.Tensor.item
    text: Any = torch.Tensor.__format__
    numpy: Any = torch.Tensor.numpy
    deep: Any = torch.Tensor.__deepcopy__
    swap: Any = torch.utils.swap_tensors

    def begin_for_real(self: Any) -> Any:
        with unset_fake_temporarily():
            return begin(self)

    def following_for_real(self: Any) -> Any:
        with unset_fake_temporarily():
            batch = following(self)
        return tree_map_only(torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else torch.empty_like(t), batch)

    def unknown_item(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor) or self.constant is not None or not self.is_floating_point():
            return item(self)
        return Unknown(1.0)

    def formatted(self: torch.Tensor, spec: str) -> str:
        return format(unknown_item(self), spec) if isinstance(self, FakeTensor) and not self.dim() else text(self, spec)

    def no_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            raise refused("Tensor.numpy()")
        return numpy(self, *args, **kwargs)

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
        # Module.to() swaps parameters that are fake, and refuses those of which the mode has a weak reference
        remembered = mode.fake_tensor_converter.meta_converter.tensor_memo
        for key in [k for k, tensor in remembered.items() if tensor is one or tensor is other]:
            del remembered[key]
        swap(one, other)

    def unsaved(*args: Any, **kwargs: Any) -> None:
        """There is nothing to save, and a checkpoint that is there must stay."""

    for owner, name, function in (
        (torch.Tensor, "__deepcopy__", copied),
        (torch, "save", unsaved),
        (torch.utils, "swap_tensors", swapped),
        (loader, "__iter__", begin_for_real),
        (iterator, "__next__", following_for_real),
        (torch.Tensor, "item", unknown_item),
        (torch.Tensor, "__format__", formatted),
        (torch.Tensor, "numpy", no_numpy),
    ):
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)


def refused(what: str) -> CaptureFailed:
    """The error for a line of the script that asks for a value."""
    return CaptureFailed(
        f"{_line()} needs the value of a tensor ({what}), and in a trial run without memory tensors have none",
        "leave that line out while it is planned, or plan on the device itself (--cost-model measured)",
    )


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Unknown(float):
    """What ``item()`` gives for a loss: it can be added up, averaged and printed (as 1.0), but not compared."""

    __slots__ = ()
    __hash__ = float.__hash__


def _computed(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compute(self: Unknown, *others: Any) -> Any:
        result = original(self, *others)
        return Unknown(result) if type(result) is float else result

    return compute


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Unknown, *others: Any) -> Any:
        raise refused("Tensor.item()")

    return refuse


_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "rpow", "neg", "pos", "abs")
_DECISIONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "floor", "ceil", "trunc")
for _make, _names in ((_computed, _ARITHMETIC), (_refused, _DECISIONS)):
    for _name in _names:
        setattr(Unknown, f"__{_name}__", _make(f"__{_name}__"))
