"""Operators computed for some of the images, or channels, at a time, which takes less workspace.

A convolution's kernels copy their whole input and result into a format of their own. ATen's backward of a batch norm on
a CPU allocates its result twice. Computed in parts, these copies are as large as one part, and a batch norm's gradient
may be written over the gradient that it was computed from.

Images are independent in a convolution, and channels in a batch norm, but kernels may be chosen by size: a trial on the
device shows whether parts are bitwise identical to the whole. The gradients of a convolution's weight and bias are sums
over the images, which parts add in another order; in 16 bits each part would round once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from monetrun.ops.definition import Cost, operator
from monetrun.ops.families.convolution import WINDOW, input_gradient
from monetrun.ops.families.in_place import may_overwrite
from monetrun.ops.memory_format import is_images, memory_format
from monetrun.ops.registry import Alternative, Call, Joint, alike, element, implementation, value_of, wide

aten = torch.ops.aten
monet = torch.ops.monet

# Timed with 2, 4, 8 and 16 parts (convolutions of VGG-16 at batch 16, batch norms of ResNets, float32, 2 cores of a
# Xeon, 2026-11): 2 save nothing where the result is copied; 16 take longer than 8.
PARTS = 8

# ATen has kernels of its own for one image, whose results may have another memory format.
LEAST_IMAGES = 2

# In channels-last format, kernels round the elements beyond the last whole vector differently.
VECTOR = 8

# Calls that read and write less than this share of the largest one's bytes are not worth the time to measure them.
LEAST_SHARE = 1 / 8

_OFFERED_FOR = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.native_batch_norm_backward.default,
)

_NORM = (
    "Tensor x, Tensor? weight, Tensor? running_mean, Tensor? running_var, Tensor? mean, Tensor? invstd, bool train,"
    " float eps, bool[3] output_mask, int channels"
)
# the operands are copied in parts (a read and a write) and read twice; the result is copied from its parts
_NORM_COST = Cost(reads=4, writes=3)

_largest_bytes: WeakKeyDictionary[Joint, int] = WeakKeyDictionary()


def _is_large(node: fx.Node, joint: Joint) -> bool:
    """Whether a call may matter to the graph's smallest peak."""
    if joint not in _largest_bytes:
        find = joint.module.graph.find_nodes
        calls = (call for target in _OFFERED_FOR for call in find(op="call_function", target=target))
        _largest_bytes[joint] = max(map(_nbytes, calls))
    return 0 < _nbytes(node) >= LEAST_SHARE * _largest_bytes[joint]


def _nbytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes, without weights (a gradient is as large as what it is the gradient of)."""
    operands = (node.args[0], node) if node.target is aten.convolution.default else node.args[:2]
    return sum(v.nbytes for v in map(value_of, operands) if v is not None)


# ---- convolution


def _fake_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    *window, last, _ = arguments
    shape = aten.convolution.default(x, weight, bias, *window).shape
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(len(shape), last))


@operator(
    f"convolution_in_parts(Tensor x, Tensor weight, Tensor? bias, {WINDOW}, bool channels_last, int images) -> Tensor",
    _fake_convolution,
    cost=Cost(writes=3, like=aten.convolution.default),
)
def convolution_in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """``convolution`` of ``images`` at a time; the result is in the memory format that ``channels_last`` names."""
    *window, last, images = arguments
    first, *rest = x.split(images)
    part = aten.convolution.default(first, weight, bias, *window)
    form = memory_format(x.dim(), last)
    y = torch.empty((x.shape[0], *part.shape[1:]), dtype=part.dtype, device=part.device, memory_format=form)
    into, *others = y.split(images)
    into.copy_(part)
    del part
    for other, of_x in zip(others, rest, strict=True):
        other.copy_(aten.convolution.default(of_x, weight, bias, *window))
    return y


def _whole_weight_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
    *rest, (_, of_weight, of_bias), _ = arguments
    mask = [False, of_weight, of_bias]
    return aten.convolution_backward.default(grad, x, weight, *rest, mask)  # type: ignore[no-any-return]


@operator(
    "convolution_weight_backward_in_parts(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes,"
    f" {WINDOW}, bool[3] output_mask, int images) -> (Tensor, Tensor, Tensor)",
    _whole_weight_backward,
    cost=Cost(writes=3, like=aten.convolution_backward.default),
)
def convolution_weight_backward_in_parts(
    grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of weight and bias, ``images`` at a time; of ``weight`` only the shape is read."""
    sums: Sequence[Tensor | None] = ()
    for of_grad, of_x in zip(grad.split(arguments[-1]), x.split(arguments[-1]), strict=True):
        found = _whole_weight_backward(of_grad, of_x, weight, *arguments)
        pairs = zip(sums, found, strict=True)
        sums = tuple(t if t is None or part is None else t.add_(part) for t, part in pairs) if sums else found
        del found
    return tuple(sums)


@implementation(aten.convolution.default)
def _forward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    if _is_large(node, joint):
        yield from _convolution_in_parts(Call.of(node), value_of(node))


@implementation(aten.convolution_backward.default)
def _backward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    arguments: Any = node.args
    of_input, of_weight, of_bias = arguments[-1]
    if not _is_large(node, joint):
        return
    if of_input and not (of_weight or of_bias):
        call = input_gradient(node)
        if call is not None:
            yield from _convolution_in_parts(call, node.meta["val"][0])
    elif of_weight and not of_input:
        images = _images_of(value_of(arguments[1]))
        if images and wide(*arguments[:2]):
            call = Call(monet.convolution_weight_backward_in_parts.default, (*arguments, images))
            yield Alternative("conv:parts", call, exact=False, no_faster_than_default=True)


def _convolution_in_parts(whole: Call, result: Tensor | None) -> Iterator[Alternative]:
    images = _images_of(result)
    if result is not None and images and is_images(result):
        arguments = (*whole.args, not result.is_contiguous(), images)
        call = Call(monet.convolution_in_parts.default, arguments, only=whole.only)
        yield Alternative("conv:parts", call, exact=None, no_faster_than_default=True)


def _images_of(value: Tensor | None) -> int:
    """How many images each part but the last has; 0 where there would be one part."""
    size = 0 if value is None else value.shape[0]
    images = max(LEAST_IMAGES, -(-size // PARTS))
    return images if images < size else 0


# ---- batch norm


def _norm_backward_into(into: Tensor, grad: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    *vectors, train, eps, output_mask, channels = arguments
    found: list[tuple[Tensor | None, ...]] = []
    for start in range(0, x.shape[1], channels):
        here = slice(start, start + channels)
        of_vectors = (None if v is None else v[here] for v in vectors)
        operands = (grad[:, here].clone(), x[:, here].clone(), *of_vectors)
        of_x, *of_parameters = aten.native_batch_norm_backward.default(*operands, train, eps, output_mask)
        into[:, here].copy_(of_x)
        found.append(tuple(of_parameters))
        del operands, of_x
    of_weight, of_bias = (None if None in column else torch.cat(column) for column in zip(*found, strict=True))
    return into, of_weight, of_bias


def _fake_norm_backward(grad: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
    return aten.native_batch_norm_backward.default(grad, *arguments[:-1])  # type: ignore[no-any-return]


@operator(
    f"batch_norm_backward_in_parts(Tensor grad, {_NORM}) -> (Tensor, Tensor, Tensor)",
    _fake_norm_backward,
    cost=_NORM_COST,
)
def batch_norm_backward_in_parts(grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """``native_batch_norm_backward`` with a gradient of the input, ``channels`` at a time."""
    return _norm_backward_into(torch.empty_like(grad), grad, *arguments)


@operator(
    f"batch_norm_backward_in_parts_(Tensor(a!) grad, {_NORM}) -> (Tensor(a!), Tensor, Tensor)",
    lambda grad, *arguments: (grad, *_fake_norm_backward(grad, *arguments)[1:]),
    cost=_NORM_COST,
)
def batch_norm_backward_in_parts_(grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """``batch_norm_backward_in_parts`` over ``grad``."""
    return _norm_backward_into(grad, grad, *arguments)


@implementation(aten.native_batch_norm_backward.default)
def _of_norm(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x = node.args[:2]
    of_x = element(node, 0)
    if of_x is None or not alike(grad, x, of_x) or not _is_large(node, joint):
        return
    value: Any = value_of(x)
    channels = -(-value.shape[1] // PARTS)
    if not value.is_contiguous():
        channels += -channels % VECTOR
    call = Call(monet.batch_norm_backward_in_parts.default, (*node.args, channels))
    yield Alternative("fused:batch-norm-parts", call, exact=None, no_faster_than_default=True)
    if may_overwrite(node, grad, of_x):
        over = Call(monet.batch_norm_backward_in_parts_.default, call.args)
        yield Alternative("fused:batch-norm-parts", over, grad, exact=None, no_faster_than_default=True)  # type: ignore[arg-type]
