"""Fake tensors with the strides that kernels give, where torch's own fake kernels are wrong.

For some forty operators whose operands are not contiguous torch's fake kernels give other strides than the kernels do:
a weight norm in channels-last format, say, or a group norm (seen with every sample of torch's own tests of operators,
on a CPU). A graph that is traced with them lacks the copies that eager makes, has views that do not exist, or sums in
another order: a weight norm's gradients are wrong by a factor of hundreds, under ``torch.compile`` alone too. So while
tracing, what such an operator gives is asked of the kernel itself: once for each form of its operands, on tensors of a
few elements where it runs on these.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from monetrun.capture import integer_operands
from monetrun.capture.kernel_storages import with_kernels_storage
from monetrun.capture.strides import alike, dense, is_dense
from monetrun.core.errors import CaptureFailed, is_out_of_memory
from monetrun.core.patched import patched
from monetrun.ops import device_errors

aten = torch.ops.aten
_log = logging.getLogger(__name__)

# Operators whose fake strides are right, and so common that the kernel need not be asked: always, and
# fmt: off
_RIGHT = {
    "addmm", "avg_pool2d", "avg_pool2d_backward", "baddbmm", "bmm", "cat", "clone", "constant_pad_nd", "convolution",
    "convolution_backward", "copy", "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "mean", "mm", "sum",
    "upsample_nearest2d", "upsample_nearest2d_backward", "_to_copy", "_adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward", "_softmax",
}
# where each operand has one format. Images of one pixel lie in both at once, and where all operands do, eager gives
# what it computes element by element the strides of contiguous tensors; torch's fake kernels those of an operand.
_RIGHT_FOR_ONE_FORMAT = {
    "abs", "add", "cos", "div", "eq", "exp", "gelu", "gelu_backward", "hardtanh", "hardtanh_backward", "log",
    "logical_not", "lt", "gt", "le", "ge", "masked_fill", "mul", "ne", "neg", "relu", "rsqrt", "sgn", "sigmoid",
    "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sqrt", "sub", "tanh", "tanh_backward",
    "threshold_backward", "where",
}
# fmt: on
# On larger operands nothing is asked of a kernel.
_MOST_BYTES = 1 << 30

_Form = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
_Orders = list[tuple[int, ...] | None]  # of each result's dimensions; None: it is not dense


@contextlib.contextmanager
def as_kernels_give_them() -> Iterator[None]:
    """While tracing: the results of operators have the strides that eager's have, and storages of their size."""
    original = FakeTensorMode.dispatch

    def dispatch(
        self: FakeTensorMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = with_kernels_storage(self, func, args, original(self, func, types, args, kwargs or {}))
        if (matters := _operands_that_matter(func)) is not None:
            forms = [_form(a) for a in tree_leaves((args, kwargs)) if isinstance(a, FakeTensor)]
            if any(form is not None and matters(*form) for form in forms):
                return _corrected(self, func, args, kwargs or {}, result)
        return result

    with patched(FakeTensorMode, "dispatch", dispatch):
        yield


@functools.cache
def _operands_that_matter(func: Any) -> Callable[[Sequence[int], Sequence[int]], bool] | None:
    """With which operands, by sizes and strides, the kernel is asked; None: never.

    Nor is it asked where the result is no new tensor, or a random one.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten" or func._schema.is_mutable:
        return None
    returns = func._schema.returns
    if torch.Tag.nondeterministic_seeded in func.tags or not returns or any(r.alias_info for r in returns):
        return None
    name = func.overloadpacket.__name__
    if name in _RIGHT:
        return None
    return _has_two_formats if name in _RIGHT_FOR_ONE_FORMAT and func is not aten.div.Tensor_mode else _is_out_of_order


def _is_out_of_order(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether strides are not a contiguous tensor's."""
    return not is_dense(sizes, strides, range(len(sizes)))


def _has_two_formats(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether they are, but for dimensions of one element."""
    return _is_out_of_order(sizes, strides) and alike(sizes, strides, dense(sizes, range(len(sizes))))


def _form(value: torch.Tensor) -> _Form | None:
    """Sizes and strides, of open ones the present values; None where one has no value, or nothing is strided."""
    if value.layout != torch.strided:
        return None
    try:
        sizes, strides = (tuple(_number(n) for n in ns) for ns in (value.shape, value.stride()))
    except ValueError:
        return None
    return sizes, strides


def _number(value: Any) -> int:
    if isinstance(value, torch.SymInt):
        if not value.node.has_hint():
            raise ValueError("it has no value yet")
        return int(value.node.hint)  # type: ignore[arg-type]
    return int(value)


# ---- asking the kernel


def _corrected(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """``result``, each tensor of it with the kernel's strides."""
    results = [r for r in tree_leaves(result) if isinstance(r, FakeTensor)]
    forms = [form for r in results if (form := _form(r)) is not None]
    if not results or len(forms) < len(results):
        return result
    orders = _orders(func, args, kwargs, [sizes for sizes, _ in forms])
    if orders is None:
        return result
    chosen = iter(zip(orders, forms, strict=True))

    def with_order(value: FakeTensor) -> torch.Tensor:
        order, (sizes, strides) = next(chosen)
        if order is None or is_dense(sizes, strides, order):
            return value
        _log.debug("%s: %s x %s has strides in the order %s", func, sizes, strides, order)
        with mode:
            return torch.empty_strided(value.shape, dense(value.shape, order), dtype=value.dtype, device=value.device)

    return tree_map_only(FakeTensor, with_order, result)


_asked: dict[Any, _Orders | None] = {}
_MOST_ASKED = 1 << 14  # of every size so far


def _orders(func: Any, args: Any, kwargs: Any, expected: Sequence[Sequence[int]]) -> _Orders | None:
    """For each result, of the ``expected`` sizes, the order that the kernel gives it; None where nothing is known."""
    others = tree_map_only(torch.Tensor, lambda a: (_form(a), a.dtype, a.device), (args, kwargs))
    key = (func, repr(others))
    if key in _asked:
        return _asked[key]
    tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
    device_type = "cuda" if any(t.device.type == "cuda" for t in tensors) else "cpu"
    if not integer_operands.zeros_are_valid(func, tensors, device_type):
        return None
    operands = [(_form(a), a.element_size()) for a in tensors]
    forms = [(form, nbytes) for form, nbytes in operands if form is not None]
    if len(forms) < len(operands) or sum(nbytes * _span(form) for form, nbytes in forms) > _MOST_BYTES:
        return None
    found = None
    sizes = sorted({n for form, _ in forms for n in form[0] if n > 1})
    for smaller in ({n: 2 + i for i, n in enumerate(sizes)}, {}):
        found = _run(func, args, kwargs, expected, smaller)
        if found is not None:
            break
    if len(_asked) >= _MOST_ASKED:
        _asked.clear()
    _asked[key] = found
    return found


def _span(form: _Form) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(*form, strict=True) if n)


def _run(
    func: Any, args: Any, kwargs: Any, expected: Sequence[Sequence[int]], smaller: Mapping[int, int]
) -> _Orders | None:
    """``_orders``, on tensors with ``smaller`` sizes; None: it does not run on these, or gives other ones."""

    def make(value: torch.Tensor) -> torch.Tensor:
        form = _form(value)
        assert form is not None
        return _filled([smaller.get(n, n) for n in form[0]], form[1], value)

    with _disable_current_modes(), torch.no_grad():
        try:
            given_args, given_kwargs = tree_map_only(torch.Tensor, make, (args, kwargs))
            given_args, given_kwargs = tree_map_only(torch.SymInt, _number, (given_args, given_kwargs))
            found = [r for r in tree_leaves(func(*given_args, **given_kwargs)) if isinstance(r, torch.Tensor)]
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError) as error:  # the last: no such device
            device = next(a.device for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor))
            if device_errors.is_sticky(error, lambda: torch.cuda.synchronize(device)):
                raise
            if is_out_of_memory(error):  # traced with torch's strides, the graph may be a wrong one
                raise CaptureFailed(f"there is no memory to ask {func} for the strides of its results") from error
            return None
    if [list(r.shape) for r in found] != [[smaller.get(n, n) for n in sizes] for sizes in expected]:
        return None
    return [_order(r) for r in found]


def _filled(sizes: Sequence[int], strides: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor whose dimensions lie in memory in the order of ``strides``; what is broadcast there is broadcast."""
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    whole = [1 if strides[d] == 0 else n for d, n in enumerate(sizes)]
    value = torch.empty_strided(whole, dense(whole, order), dtype=like.dtype, device=like.device)
    value.fill_(0.5 if like.dtype.is_floating_point or like.dtype.is_complex else 0)  # see _orders
    return value.expand(sizes)


def _order(value: torch.Tensor) -> tuple[int, ...] | None:
    if value.layout != torch.strided:
        return None
    sizes, strides = value.shape, value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], -sizes[d], d)))
    return order if is_dense(sizes, strides, order) else None
