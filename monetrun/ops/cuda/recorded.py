"""What an operator does on CUDA for tensors of known sizes: the tensors that it makes, and its kernels' launches.

A function of ``monetrun.ops.cuda`` takes the host 10 microseconds, most of it for what depends on sizes alone. Called
once on tensors without memory, it says what it would do; ``cuda_ops/launches.hpp`` does that in each step.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from monetrun.core.native import NativeBuildFailed
from monetrun.ops.cuda import launch
from monetrun.ops.cuda.operands import Aligned

aten = torch.ops.aten

_NEW = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)

_PLACE_BITS = 8  # as in launches.hpp

Launch = tuple[int, int, int, str, list[int]]  # function, blocks, threads, letters and arguments, as in launches.hpp


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call of an operator; the tensors are those given, then those made.

    Attributes:
        like: tensors of no memory, with the sizes, strides and dtypes of the call's.
        launches: in their order.
        results: which of the tensors the operator gives.
    """

    like: list[Tensor]
    launches: list[Launch]
    results: list[int]


class _Made(TorchDispatchMode):
    """Notes the tensors that a function makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _NEW and any(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns):
            raise NotImplementedError(f"{func} is no view, and launched by nobody")
        result = func(*args, **(kwargs or {}))
        if func in _NEW:
            self.tensors.append(result)
        return result


def recorded(function: Callable[..., Any], arguments: Sequence[Any], device: int) -> Recorded | None:
    """What ``function`` does on a CUDA device with arguments like these; None where that is not known beforehand.

    Args:
        function: of ``monetrun.ops.cuda``.
        arguments: of it, with any tensors for its own ones: only sizes, strides and dtypes are read.
        device: its number.
    """
    try:
        with unset_fake_temporarily(), launch.noting() as noted:
            given = [_without_memory(a) if isinstance(a, Tensor) else a for a in arguments]
            with _Made() as made:
                result = function(*given)
        tensors = [*(a for a in given if isinstance(a, Tensor)), *made.tensors]
        places = {_storage(t): i for i, t in enumerate(tensors)}
        results = [_whole(r, tensors, places) for r in (result if isinstance(result, tuple) else (result,))]
        return Recorded(tensors, [_launch(one, places, device) for one in noted], results)
    except (KeyError, TypeError, NotImplementedError, RuntimeError, NativeBuildFailed):
        return None  # it gives a view, reads values, refuses sizes, or cannot be compiled


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage(tensor: Tensor) -> int:
    """What tells tensors apart; of one there may be several objects."""
    return tensor.untyped_storage()._cdata


def _whole(result: Tensor, tensors: Sequence[Tensor], places: Mapping[int, int]) -> int:
    place = places[_storage(result)]
    like = tensors[place]
    if (result.storage_offset(), result.shape, result.stride()) != (0, like.shape, like.stride()):
        raise KeyError(place)
    return place


def _launch(noted: launch.Noted, places: Mapping[int, int], device: int) -> Launch:
    handle, letters = launch.loaded(noted.name, noted.dtype, device)
    found, arguments = "", list[int]()
    for letter, argument in zip(letters, noted.arguments, strict=True):
        if isinstance(argument, Aligned):
            found += "a"
            arguments.append(functools.reduce(operator.or_, (1 << places[_storage(t)] for t in argument.tensors)))
        else:
            found += letter
            arguments.append(_number(letter, argument, places))
    return handle, noted.blocks, launch.THREADS, found, arguments


def _place(tensor: Tensor, places: Mapping[int, int]) -> int:
    offset = int(tensor.storage_offset()) * tensor.element_size()
    return offset << _PLACE_BITS | places[_storage(tensor)]


def _number(letter: str, argument: Any, places: Mapping[int, int]) -> int:
    if letter == "O":
        return -1 if argument is None else _place(argument, places)
    if letter == "l":
        return int(argument)
    bits: int = struct.unpack("<q", struct.pack("<d", argument))[0]
    return bits
