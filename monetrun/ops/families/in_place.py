"""Elementwise operators that may write their result over an input that is not read again.

The same kernel, with its own input as output, gives bitwise identical results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from monetrun.ops.registry import Alternative, Call, Joint, alike, implementation, value_of

aten = torch.ops.aten

# target -> the overload that writes over the argument of that position
_OVERWRITE_ARGUMENT: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, name + "_"), overload)
    for name, overload in [
        ("relu", "default"),
        ("hardtanh", "default"),
        ("leaky_relu", "default"),
        ("elu", "default"),
        ("silu", "default"),
        ("gelu", "default"),
        ("hardswish", "default"),
        ("hardsigmoid", "default"),
        ("sigmoid", "default"),
        ("tanh", "default"),
        ("exp", "default"),
        ("neg", "default"),
        ("sqrt", "default"),
        ("rsqrt", "default"),
        ("add", "Tensor"),
        ("sub", "Tensor"),
        ("mul", "Tensor"),
        ("div", "Tensor"),
        ("mul", "Scalar"),
        ("div", "Scalar"),
        ("masked_fill", "Scalar"),
    ]
    if hasattr(aten, name + "_") and overload in getattr(aten, name + "_").overloads()
}

# a + b and b + a are bitwise identical, as are a * b and b * a of real numbers (of complex ones, a compiler may fuse
# either product with the sum of the two): these may also overwrite their second operand
_COMMUTATIVE = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}

# backward kernels that write the gradient of their input over the gradient of their output (hardswish_backward's makes
# a new tensor, and copies it)
_OVERWRITE_GRADIENT: dict[Any, tuple[Any, str]] = {
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    aten.hardtanh_backward.default: (aten.hardtanh_backward.grad_input, "grad_input"),
    aten.leaky_relu_backward.default: (aten.leaky_relu_backward.grad_input, "grad_input"),
    aten.elu_backward.default: (aten.elu_backward.grad_input, "grad_input"),
    aten.silu_backward.default: (aten.silu_backward.grad_input, "grad_input"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.sigmoid_backward.default: (aten.sigmoid_backward.grad_input, "grad_input"),
    aten.tanh_backward.default: (aten.tanh_backward.grad_input, "grad_input"),
    aten.hardsigmoid_backward.default: (aten.hardsigmoid_backward.grad_input, "grad_input"),
}


def may_overwrite(node: fx.Node, operand: Any, result: fx.Node | None = None) -> bool:
    """Whether ``node``'s result has the form of ``operand``, whose storage no other argument shares.

    ``result``: the first result, where there are several.
    """
    if value_of(operand) is None or not alike(node if result is None else result, operand):
        return False
    return [_storage(n) for n in node.all_input_nodes].count(_storage(operand)) == 1


def _storage(node: fx.Node) -> int | None:
    value = value_of(node)
    return None if value is None else value.untyped_storage()._cdata


def _commutes(node: fx.Node) -> bool:
    """Whether the result is bitwise identical with the operands exchanged.

    On a CPU, the second operand of a product in 16 bits is not rounded before where it is one wider number.
    """
    first, result = value_of(node.args[0]), node.meta["val"]
    rounded = first is None or first.dtype == result.dtype or node.target is not aten.mul.Tensor
    return bool(node.kwargs.get("alpha", 1) == 1 and not result.is_complex() and rounded)


@implementation(*_OVERWRITE_ARGUMENT)
def _over_argument(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if may_overwrite(node, node.args[0]):
        call = Call(_OVERWRITE_ARGUMENT[node.target], node.args, dict(node.kwargs))
        yield Alternative("in-place", call, node.args[0])  # type: ignore[arg-type]
    if node.target in _COMMUTATIVE and _commutes(node) and may_overwrite(node, node.args[1]):
        call = Call(_COMMUTATIVE[node.target], (node.args[1], node.args[0]), dict(node.kwargs))
        yield Alternative("in-place", call, node.args[1])  # type: ignore[arg-type]


@implementation(aten.clone.default)
def _no_copy(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    """Where the original is not read again, it serves as its own copy."""
    if may_overwrite(node, node.args[0]):
        yield Alternative("in-place", Call(aten.alias.default, (node.args[0],)), node.args[0])  # type: ignore[arg-type]


@implementation(*_OVERWRITE_ARGUMENT)
def _of_the_copy(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    """Eager copies an input that an activation overwrites and its backward reads. The activation may read that copy."""
    x = node.args[0]
    for copy in x.users if isinstance(x, fx.Node) else ():
        if copy.target is aten.clone.default and alike(copy, x, node):
            call = Call(node.target, (copy, *node.args[1:]), dict(node.kwargs))
            yield Alternative("output:copy", call, costs_as=Call.of(node))
            if _storage(copy) not in [_storage(n) for n in node.all_input_nodes if n is not copy]:
                yield Alternative("output:copy", Call(_OVERWRITE_ARGUMENT[node.target], call.args, call.kwargs), copy)


@implementation(*_OVERWRITE_GRADIENT)
def _over_gradient(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    yield from over_gradient(node, Call.of(node), "in-place")


def over_gradient(node: fx.Node, call: Call, name: str) -> Iterator[Alternative]:
    """``call``, whose first argument is the gradient of ``node``'s output, with its result over that gradient."""
    if may_overwrite(node, node.args[0]):
        overload, out = _OVERWRITE_GRADIENT[call.target]
        over = Call(overload, call.args, {**call.kwargs, out: call.args[0]})
        yield Alternative(name, over, node.args[0])  # type: ignore[arg-type]
