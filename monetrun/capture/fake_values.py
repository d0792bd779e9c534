"""What a script gets where it asks a fake tensor for a value: an unknown number, or an error that names its line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor

import monetrun
from monetrun.core.errors import CaptureFailed

_PACKAGES = tuple(str(Path(str(package.__file__)).parent) for package in (torch, monetrun))


class Unknown(float):
    """What ``item()`` gives for a loss: it can be added up, averaged and printed (as 1.0), but not compared."""

    __slots__ = ()
    __hash__ = float.__hash__


def needs_value(what: str) -> CaptureFailed:
    """The error for a line of the script that needs a tensor's value."""
    return CaptureFailed(
        f"{_script_line()} needs the value of a tensor ({what}), and in a trial run without memory tensors have none",
        "leave that line out while it is planned, or plan on the device itself (--cost-model measured)",
    )


def _script_line() -> str:
    """The innermost line that is neither torch's nor monetrun's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*_PACKAGES, "<")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def patches() -> list[tuple[Any, str, Callable[..., Any]]]:
    """The methods of ``torch.Tensor`` to replace while a script runs on fake tensors: (owner, name, replacement)."""
    item: Any = torch.Tensor.item
    text: Any = torch.Tensor.__format__
    numpy: Any = torch.Tensor.numpy

    def unknown_item(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor) or self.constant is not None or not self.is_floating_point():
            return item(self)
        return Unknown(1.0)

    def formatted(self: torch.Tensor, spec: str) -> str:
        return format(unknown_item(self), spec) if isinstance(self, FakeTensor) and not self.dim() else text(self, spec)

    def no_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FakeTensor):
            raise needs_value("Tensor.numpy()")
        return numpy(self, *args, **kwargs)

    return [
        (torch.Tensor, "item", unknown_item),
        (torch.Tensor, "__format__", formatted),
        (torch.Tensor, "numpy", no_numpy),
    ]


def _arithmetic(name: str) -> Callable[..., Any]:
    original = getattr(float, name)

    def compute(self: Unknown, *others: Any) -> Any:
        result = original(self, *others)
        return Unknown(result) if type(result) is float else result

    return compute


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Unknown, *others: Any) -> Any:
        raise needs_value("Tensor.item()")

    return refuse


_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow", "radd", "rsub", "rmul", "rtruediv", "rpow", "neg", "pos", "abs")
_DECISIONS = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "floor", "ceil", "trunc")
for _make, _names in ((_arithmetic, _ARITHMETIC), (_refused, _DECISIONS)):
    for _name in _names:
        setattr(Unknown, f"__{_name}__", _make(f"__{_name}__"))
