"""Gradients that eager fills in place, and whose strides a traced graph would lose.

The derivatives of ``maximum``, ``minimum``, ``fmax``, ``fmin`` and ``clamp`` by tensors fill what ``where`` has made in
place. While a graph is traced they call ``masked_fill`` instead (torch does so for whatever is like a subclass of a
tensor), whose result is contiguous. What is summed from it next would differ by rounding. Filled through a view that
is contiguous, it has the strides of what is filled.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from monetrun.capture.strides import is_dense
from monetrun.core.patched import patched

aten = torch.ops.aten

_FILL = aten.masked_fill.Scalar
_FORMULAS = re.compile(r"(Maximum|Minimum|Fmax|Fmin|Clamp|ClampMin|ClampMax)Backward\d")


@contextlib.contextmanager
def kept_where_eager_fills_in_place() -> Iterator[None]:
    """While tracing: such gradients have the strides that eager's have."""
    original = FunctionalTensorMode.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        order = _order(args[0]) if func is _FILL and _in_a_formula() else None
        if order is None:
            return original(self, func, types, args, kwargs)
        run = functools.partial(_run, original, self, types)
        x, mask, value = args
        turned = run(aten.permute.default, run(aten.expand.default, mask, list(x.shape)), order)
        filled = run(func, run(aten.permute.default, x, order), turned, value)
        return run(aten.permute.default, filled, [order.index(d) for d in range(x.dim())])

    with patched(FunctionalTensorMode, "__torch_dispatch__", dispatch):
        yield


def _run(dispatch: Callable[..., Any], mode: Any, types: Any, func: Any, *args: Any) -> Any:
    return dispatch(mode, func, types, args, {})


def _in_a_formula() -> bool:
    node = torch._C._current_autograd_node()
    return node is not None and _FORMULAS.fullmatch(node.name()) is not None


def _order(x: torch.Tensor) -> list[int] | None:
    """The order of its dimensions in which a dense tensor is contiguous; None: it is so already, or it is not dense."""
    shape, strides = x.shape, x.stride()
    order = sorted(range(x.dim()), key=lambda d: (-strides[d], d))
    return order if is_dense(shape, strides, order) and order != list(range(x.dim())) else None
