"""Whether an alternative gives what its operator gives: results of the same shapes, dtypes and strides.

What reads a result was traced with the strides of the operator's own. In another order of the dimensions a sum is
rounded otherwise, and a packed mask, which is read in the order of storage, is applied to the wrong elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from monetrun.capture.kernel_strides import as_kernels_give_them
from monetrun.capture.strides import alike
from monetrun.ops.memory_format import has_strides_of_channels_last
from monetrun.ops.registry import Alternative, Call, element

_log = logging.getLogger("monetrun")


class ResultForms:
    """Compares alternatives with their operators; those whose arguments have the same forms once.

    Args:
        signature: of a call, the same for all that have the same target and the same forms of arguments.
    """

    def __init__(self, signature: Callable[[Call], str]) -> None:
        self._signature = signature
        self._known: dict[Any, bool] = {}

    def same(self, node: fx.Node, alternative: Alternative) -> bool:
        """Whether ``alternative`` gives what ``node`` gives, tried with fake tensors.

        Where it does not run on these, nothing is known, and it counts as the same.
        """
        call = alternative.call
        if alternative.overwrites is not None:  # the first result is what it overwrites
            return _alike(alternative.overwrites.meta.get("val"), _first(node))
        read = (0,) if call.only is not None else _read(node)
        key = self._signature(Call.of(node)), self._signature(call), call.only, read
        if key not in self._known:
            self._known[key] = _gives_the_same(node, call, read)
        return self._known[key]


def _first(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value if isinstance(value, torch.Tensor) else value[0]


def _read(node: fx.Node) -> tuple[int, ...]:
    """Which of a call's results are read; the only one counts as number 0."""
    value = node.meta["val"]
    return (0,) if isinstance(value, torch.Tensor) else tuple(i for i in range(len(value)) if element(node, i))


def _gives_the_same(node: fx.Node, call: Call, read: tuple[int, ...]) -> bool:
    expected = node.meta["val"] if call.only is None else node.meta["val"][call.only]
    try:
        given = _called(call)
    except Exception as error:  # noqa: BLE001 - another library's operator may have no fake kernel
        _log.debug("%s does not run on fake tensors (%s)", call.target, error)
        return True
    several = not isinstance(expected, torch.Tensor)
    if several != isinstance(given, tuple | list):
        return False
    return all(_alike(given[i], expected[i]) if several else _alike(given, expected) for i in read)


def _called(call: Call) -> Any:
    """What a call gives of its arguments' fake tensors."""
    arguments, keywords = fx.map_arg((call.args, call.kwargs), lambda n: n.meta["val"])
    modes = (getattr(v, "fake_mode", None) for v in tree_leaves((arguments, keywords)))
    mode = next(m for m in modes if m is not None)
    with mode, as_kernels_give_them(), torch.no_grad(), torch._C._DisableAutocast():
        return call.target(*arguments, **keywords)


def _alike(one: Any, other: Any) -> bool:
    """Whether two tensors have the same form; strides of dimensions of one element may differ within a format."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (
        (one.shape, one.dtype) == (other.shape, other.dtype)
        and alike(one.shape, one.stride(), other.stride())
        and has_strides_of_channels_last(one) == has_strides_of_channels_last(other)
    )
