"""An operator computed for some of the images, or channels, at a time, which takes less memory beside its result.

A convolution's kernels convert their operands to a format of their own: copies of the input and the result, whole.
ATen's backward of a batch norm on a CPU allocates its result twice. Of a part these are that part's, and the last of
them may be written over the gradient that it was computed from.

An image's convolution is its own, as is a channel's norm, but kernels may be chosen by size: a trial on the device
tells whether parts have the bits of the whole. The gradients of a convolution's weight and bias are sums over the
images, which parts add in another order, and of 16 bits would round once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.convolution import input_gradient
from monetrun.ops.definitions import is_images
from monetrun.ops.in_place import may_overwrite
from monetrun.ops.layout import WINDOW, memory_format
from monetrun.ops.registry import Alternative, Call, Joint, alike, element, implementation, value_of, wide

aten = torch.ops.aten
monet = torch.ops.monet

# Timed with 2, 4, 8 and 16 (convolutions of VGG-16 at batch 16, batch norms of ResNets, float32, 2 cores of a Xeon,
# 2026-11): with 2 there is nothing saved where the result is copied; 16 take longer than 8.
PARTS = 8

# ATen has other kernels for one image than for several, which give another memory format, too.
LEAST_IMAGES = 2

# In channels-last format, kernels round other elements otherwise than those of whole vectors.
VECTOR = 8

# Smaller ones, beside the graph's largest by bytes of input and result, are not worth the time to measure them.
LEAST_SHARE = 1 / 8

_OFFERED_FOR = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.native_batch_norm_backward.default,
)

_library = torch.library.Library("monet", "FRAGMENT")
_library.define(
    f"convolution_in_parts(Tensor x, Tensor weight, Tensor? bias, {WINDOW}, bool channels_last, int images) -> Tensor"
)
_library.define(
    "convolution_weight_backward_in_parts(Tensor grad, Tensor x, Tensor weight, int[]? bias_sizes,"
    f" {WINDOW}, bool[3] output_mask, int images) -> (Tensor, Tensor, Tensor)"
)
_NORM = (
    "Tensor x, Tensor? weight, Tensor? running_mean, Tensor? running_var, Tensor? mean, Tensor? invstd, bool train,"
    " float eps, bool[3] output_mask, int channels"
)
_library.define(f"batch_norm_backward_in_parts(Tensor grad, {_NORM}) -> (Tensor, Tensor, Tensor)")
_library.define(f"batch_norm_backward_in_parts_(Tensor(a!) grad, {_NORM}) -> (Tensor(a!), Tensor, Tensor)")


def _is_large(node: fx.Node, joint: Joint) -> bool:
    """Whether a call can have to do with the graph's least peak."""
    if _is_large not in joint.notes:
        find = joint.module.graph.find_nodes
        calls = (call for target in _OFFERED_FOR for call in find(op="call_function", target=target))
        joint.notes[_is_large] = LEAST_SHARE * max(map(_nbytes, calls))
    return 0 < _nbytes(node) >= joint.notes[_is_large]


def _nbytes(node: fx.Node) -> int:
    """What a call reads and writes, a gradient and its operand being of one size, without weights."""
    operands = (node.args[0], node) if node.target is aten.convolution.default else node.args[:2]
    return sum(v.nbytes for v in map(value_of, operands) if v is not None)


# ---- convolution


@torch.library.impl(_library, "convolution_in_parts", "CompositeExplicitAutograd")
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    """``convolution``, so many images at a time, in the memory format that is told."""
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


@torch.library.impl(_library, "convolution_in_parts", "Meta")
def _fake_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    *window, last, _ = arguments
    shape = aten.convolution.default(x, weight, bias, *window).shape
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=memory_format(len(shape), last))


@torch.library.impl(_library, "convolution_weight_backward_in_parts", "CompositeExplicitAutograd")
def _weight_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """The gradients of weight and bias, so many images at a time; of ``weight`` only the shape is read."""
    sums: Sequence[Tensor | None] = ()
    for of_grad, of_x in zip(grad.split(arguments[-1]), x.split(arguments[-1]), strict=True):
        found = _whole_weight_backward(of_grad, of_x, weight, *arguments)
        pairs = zip(sums, found, strict=True)
        sums = tuple(t if t is None or part is None else t.add_(part) for t, part in pairs) if sums else found
        del found
    return tuple(sums)


@torch.library.impl(_library, "convolution_weight_backward_in_parts", "Meta")
def _whole_weight_backward(grad: Tensor, x: Tensor, weight: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
    *rest, (_, of_weight, of_bias), _ = arguments
    mask = [False, of_weight, of_bias]
    return aten.convolution_backward.default(grad, x, weight, *rest, mask)  # type: ignore[no-any-return]


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
            yield Alternative("conv:parts", call, exact=False, no_faster=True)


def _convolution_in_parts(whole: Call, result: Tensor | None) -> Iterator[Alternative]:
    images = _images_of(result)
    if result is not None and images and is_images(result):
        arguments = (*whole.args, not result.is_contiguous(), images)
        call = Call(monet.convolution_in_parts.default, arguments, only=whole.only)
        yield Alternative("conv:parts", call, exact=None, no_faster=True)


def _images_of(value: Tensor | None) -> int:
    """How many each part has, but the last; 0 where there would be one part."""
    size = 0 if value is None else value.shape[0]
    images = max(LEAST_IMAGES, -(-size // PARTS))
    return images if images < size else 0


# ---- batch norm


@torch.library.impl(_library, "batch_norm_backward_in_parts", "CompositeExplicitAutograd")
def _norm_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """``native_batch_norm_backward`` with a gradient of the input, one part after another."""
    return _norm_backward_into(torch.empty_like(grad), grad, *arguments)


@torch.library.impl(_library, "batch_norm_backward_in_parts_", "CompositeExplicitAutograd")
def _norm_backward_(grad: Tensor, *arguments: Any) -> tuple[Tensor | None, ...]:
    """``batch_norm_backward_in_parts`` over ``grad``."""
    return _norm_backward_into(grad, grad, *arguments)


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


@torch.library.impl(_library, "batch_norm_backward_in_parts", "Meta")
def _fake_norm_backward(grad: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
    return aten.native_batch_norm_backward.default(grad, *arguments[:-1])  # type: ignore[no-any-return]


@torch.library.impl(_library, "batch_norm_backward_in_parts_", "Meta")
def _fake_norm_backward_(grad: Tensor, *arguments: Any) -> Sequence[Tensor | None]:
    return grad, *_fake_norm_backward(grad, *arguments)[1:]


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
    yield Alternative("fused:batch-norm-parts", call, exact=None, no_faster=True)
    if may_overwrite(node, grad, of_x):
        over = Call(monet.batch_norm_backward_in_parts_.default, call.args)
        yield Alternative("fused:batch-norm-parts", over, grad, exact=None, no_faster=True)  # type: ignore[arg-type]
