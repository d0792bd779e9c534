"""Gives a backward the gradients of outputs with the strides that they arrive with, as eager does.

AOTAutograd has to guess these strides before the loss is known, and copies each gradient that arrives with others. The
copy takes memory that eager does not, and kernels sum a copy in another order, so that results differ by rounding. Here
a gradient is copied only where the traced backward cannot run without.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from monetrun.capture.output_gradients import is_tangent
from monetrun.capture.strides import alike, is_form_bound, with_strides

_LEFT_OPEN = "monetrun_left_open"  # in the guess of a gradient's strides: it is not copied before the backward


@contextlib.contextmanager
def left_open() -> Iterator[None]:
    """While tracing: have AOTAutograd pass gradients of outputs on as they arrive; ``fitting`` then copies them."""
    _install()
    original = MemoryFormatMeta.from_tensor

    def from_tensor(*args: Any, **kwargs: Any) -> Any:
        guess = original(*args, **kwargs)
        if guess is not None:
            setattr(guess, _LEFT_OPEN, True)
        return guess

    MemoryFormatMeta.from_tensor = staticmethod(from_tensor)  # type: ignore[method-assign]
    try:
        yield
    finally:
        MemoryFormatMeta.from_tensor = staticmethod(original)  # type: ignore[method-assign]


@functools.cache
def _install() -> None:
    original = runtime_wrappers.coerce_to_expected_memory_format

    def coerce(gradient: torch.Tensor, guess: Any) -> torch.Tensor:
        return gradient if hasattr(guess, _LEFT_OPEN) else original(gradient, guess)

    runtime_wrappers.coerce_to_expected_memory_format = coerce  # type: ignore[assignment]


def fitting(run: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """``run``, which runs a backward module, where gradients of outputs have other strides than were traced.

    Args:
        run: takes a list of arguments.
        module: the backward.
        inputs: fake tensors of its arguments, as traced.
    """
    forms = {
        position: (torch.Size(v.shape), v.stride())
        for position, (node, v) in enumerate(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        if is_tangent(node) and isinstance(v, torch.Tensor) and v.layout == torch.strided
    }
    traced = [_form(v) for v in inputs]
    copied: dict[tuple[tuple[int, Any], ...], frozenset[int]] = {}  # by strides that differ: which are copied

    def called(arguments: list[Any]) -> Any:
        others = _with_other_strides(arguments, forms)
        if others:
            if others not in copied:
                copied[others] = _to_copy(module, traced, others)
            for position in copied[others]:
                arguments[position] = with_strides(arguments[position], forms[position][1])
        return run(arguments)

    called._boxed_call = True  # type: ignore[attr-defined]
    return called if forms else run


def _with_other_strides(arguments: Sequence[Any], forms: Mapping[int, tuple[torch.Size, Any]]) -> tuple[Any, ...]:
    """Positions and strides of gradients that arrive with others than ``forms``'.

    A function of its own: a gradient that a name of the caller's holds is not freed before its backward has ended.
    """
    arriving = ((position, arguments[position], form) for position, form in forms.items())
    return tuple(
        (position, given.stride())
        for position, given, (shape, strides) in arriving
        if given is not None and not alike(shape, given.stride(), strides)
    )


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"), value.device


def _to_copy(module: fx.GraphModule, traced: Sequence[Any], others: Sequence[tuple[int, Any]]) -> frozenset[int]:
    """Those of ``others`` (positions, strides) with which the backward does not run unless they are copied."""
    kept: dict[int, Any] = {}
    for position, strides in others:
        if _runs(module, traced, {**kept, position: strides}):
            kept[position] = strides
    return frozenset(position for position, _ in others if position not in kept)


def _runs(module: fx.GraphModule, traced: Sequence[Any], strides: dict[int, Any]) -> bool:
    """Whether the backward runs on fake tensors, those in ``strides`` with these."""
    with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True):  # type: ignore[no-untyped-call]
        arguments = [
            torch.empty_strided(form[0].shape, strides.get(i, form[0].stride()), dtype=form[0].dtype, device=form[1])
            if isinstance(form, tuple)
            else form
            for i, form in enumerate(traced)
        ]
        try:
            _Checker(module).run(*arguments, enable_io_processing=False)
        except Exception:  # noqa: BLE001 - a view that these strides do not have, or what a library's operator raises
            return False
    return True


class _Checker(fx.Interpreter):
    """Runs a module on fake tensors; an operator that is bound to one layout must find that."""

    def run_node(self, n: fx.Node) -> Any:
        if is_form_bound(n):
            given, value = self.env[n.args[0]], n.args[0].meta.get("val")  # type: ignore[index, union-attr]
            if value is None or given.stride() != value.stride():
                raise RuntimeError(f"{n.name} needs other strides")
        return super().run_node(n)
