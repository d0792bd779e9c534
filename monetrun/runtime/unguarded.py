"""What a module computes by, and TorchDynamo has no guard for: functions of classes, and the kernels of attention."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_ALWAYS = ("forward", "__call__", "_call_impl")
_ALLOWED = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)


class Unguarded:
    """The classes of a module and of the modules in it, and their functions; of torch's own the forward and call.

    And the methods of tensors, and which kernels ``scaled_dot_product_attention`` may use, on a CPU too.

    Attributes:
        now: what they are, since the last ``changed``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._captured: object = None
        self._look(module)

    def _look(self, module: nn.Module) -> None:
        children = list(module.modules())
        self._children = [(weakref.ref(child), type(child)) for child in children]
        classes = {base: None for child in children for base in type(child).__mro__ if base is not object}
        self._places: list[tuple[Callable[[str], Any], str]] = [
            (vars(base).get, name) for base in classes for name in _names(base)
        ]
        self.now = self._read()

    def look_again(self, module: nn.Module, captured: object) -> None:
        """After a call: where ``captured`` is new, others were compiled, perhaps for classes that have come since."""
        if captured != self._captured:
            self._captured = captured
            self._look(module)

    def changed(self) -> bool:
        """Whether something has changed since the last call, or since this was made."""
        before, self.now = self.now, self._read()
        return before != self.now

    def _read(self) -> tuple[Any, ...]:
        # torch 2.11 has no guard for these either; one that has left the model is as it was
        classes = [before if (child := of()) is None else type(child) for of, before in self._children]
        return (*[get(name) for get, name in self._places], *classes, *attention_kernels(), _tensors_methods())


_methods: list[tuple[Any, ...]] = [tuple(vars(torch.Tensor).values())]  # those of tensors, as each state had them
_state = 0  # which of these is now


def _tensors_methods() -> int:
    """A number for what the methods of tensors are."""
    global _state
    now = tuple(vars(torch.Tensor).values())
    if not _same(now, _methods[_state]):
        _state = next((k for k, methods in enumerate(_methods) if _same(now, methods)), len(_methods))
        if _state == len(_methods):
            _methods.append(now)
    return _state


def _same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def attention_kernels() -> tuple[bool, ...]:
    """Which kernels ``scaled_dot_product_attention`` may use now."""
    return tuple([allowed() for allowed in _ALLOWED])


def _names(base: type) -> list[str]:
    if base.__module__.partition(".")[0] == "torch":
        return list(_ALWAYS)
    return list(dict.fromkeys([*_ALWAYS, *(n for n, v in vars(base).items() if isinstance(v, types.FunctionType))]))
