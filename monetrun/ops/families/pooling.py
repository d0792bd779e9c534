"""Backward of 2-d max pooling from a byte per output element, or from the pooling's input.

Eager keeps an int64 per output element, and the whole input, of which its kernel reads only the shape. The place within
a window fits into one byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.definition import operator
from monetrun.ops.memory_format import has_strides_of_channels_last, memory_format
from monetrun.ops.registry import Alternative, Call, Joint, alike, argument, implementation, is_whole, source, value_of

aten = torch.ops.aten
monet = torch.ops.monet


def _images_format(x: Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _fake_index(x: Tensor, *window: Any) -> Tensor:
    out = aten.max_pool2d_with_indices.default(x, *window)[0]
    return torch.empty(out.shape, dtype=torch.uint8, device=x.device, memory_format=_images_format(x))


def _fake_index_backward(grad: Tensor, index: Tensor, input_size: Sequence[int], *arguments: Any) -> Tensor:
    form = memory_format(4, arguments[-1])
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=form)


def _window_start(count: int, dim: int, like: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Where the window of each output begins along ``dim`` (0: rows, 1: columns), shaped to broadcast over them."""
    start = torch.arange(count, device=like.device) * stride[dim] - padding[dim]
    return start.view(-1, 1) if dim == 0 else start


def _check_window(kernel_size: Sequence[int]) -> None:
    if kernel_size[0] * kernel_size[1] > 255:
        raise RuntimeError(f"a window of {list(kernel_size)} has more places than one byte can name (255)")


@operator(
    "max_pool2d_index(Tensor x, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode)"
    " -> Tensor",
    _fake_index,
)
def max_pool2d_index(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """The place of each window's largest element within the window, row by row, as one byte: the one ATen picks."""
    _check_window(kernel_size)
    stride = stride or kernel_size
    flat = aten.max_pool2d_with_indices.default(x, kernel_size, stride, padding, dilation, ceil_mode)[1]
    rows = flat // x.shape[-1] - _window_start(flat.shape[-2], 0, x, stride, padding)
    columns = flat % x.shape[-1] - _window_start(flat.shape[-1], 1, x, stride, padding)
    place = rows // dilation[0] * kernel_size[1] + columns // dilation[1]
    return place.to(torch.uint8).contiguous(memory_format=_images_format(x))


@operator(
    "max_pool2d_index_backward(Tensor grad, Tensor index, int[] input_size, int[2] kernel_size, int[2] stride,"
    " int[2] padding, int[2] dilation, bool channels_last) -> Tensor",
    _fake_index_backward,
)
def max_pool2d_index_backward(
    grad: Tensor,
    index: Tensor,
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    channels_last: bool,
) -> Tensor:
    """The gradient of max_pool2d's input from ``max_pool2d_index``.

    Bitwise identical to max_pool2d_with_indices_backward. ``channels_last`` is the format of the input, and of its
    gradient: where one pixel is left, that of ``grad`` does not show it.
    """
    _check_window(kernel_size)
    stride = stride or kernel_size
    place = index.long()
    rows = place // kernel_size[1] * dilation[0] + _window_start(grad.shape[-2], 0, grad, stride, padding)
    columns = place % kernel_size[1] * dilation[1] + _window_start(grad.shape[-1], 1, grad, stride, padding)
    flat = rows * input_size[-1] + columns
    # made-up indices (costs are measured on them) may point outside of the plane: nothing is added for those
    outside = (flat < 0) | (flat >= input_size[-2] * input_size[-1])
    flat, grad = flat.masked_fill(outside, 0), grad.clone().masked_fill_(outside, 0)
    x = _fake_index_backward(grad, index, input_size, channels_last)
    # ceil_mode changes only the shape of the output, which is known here
    backward = aten.max_pool2d_with_indices_backward.default
    window = (kernel_size, stride, padding, dilation)
    for ceil_mode in (False, True):
        if _pooled(input_size[-2:], *window, ceil_mode) == list(grad.shape[-2:]):
            return backward(grad, x, *window, ceil_mode, flat)  # type: ignore[no-any-return]
    raise RuntimeError(f"grad of {list(grad.shape)} is not what pooling {list(input_size)} gives")


def _pooled(
    size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[int]:
    x = torch.empty((1, *size), device="meta")
    return list(aten.max_pool2d_with_indices.default(x, kernel_size, stride, padding, dilation, ceil_mode)[0].shape[1:])


@operator(
    "max_pool2d_input_backward(Tensor grad, Tensor x, int[2] kernel_size, int[2] stride, int[2] padding,"
    " int[2] dilation, bool ceil_mode) -> Tensor",
    lambda grad, x, *_: torch.empty_like(x),
)
def max_pool2d_input_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """The gradient of max_pool2d's input from the input.

    Bitwise identical to max_pool2d_with_indices_backward.
    """
    window = (kernel_size, stride or kernel_size, padding, dilation, ceil_mode)
    flat = aten.max_pool2d_with_indices.default(x, *window)[1]
    return aten.max_pool2d_with_indices_backward.default(grad, x, *window, flat)  # type: ignore[no-any-return]


def _pair(value: Any) -> list[int]:
    values = list(value)
    return values * 2 if len(values) == 1 else values


@implementation(aten.max_pool2d_with_indices_backward.default)
def _max_pool2d_backward(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad: Any = node.args[0]
    indices = source(argument(node, "indices"))
    value = value_of(node.args[1])
    if value is None or not isinstance(indices, fx.Node) or not isinstance(indices.args[0], fx.Node):
        return
    pool = indices.args[0]
    if pool.target is not aten.max_pool2d_with_indices.default:
        return
    x: Any = pool.args[0]
    # the kernels read operands of one layout, and give a result with their strides; ATen copies other gradients
    given, pooled = value_of(grad), pool.meta["val"][0]
    if given is None or not is_whole(given) or given.stride() != pooled.stride():
        return
    if not alike(node, x) or value.dim() != 4 or not value.is_floating_point():
        return
    kernel = _pair(argument(node, "kernel_size"))
    stride = _pair(argument(node, "stride")) or kernel
    padding, dilation = _pair(argument(node, "padding")), _pair(argument(node, "dilation"))
    ceil_mode = bool(argument(node, "ceil_mode"))
    window = (kernel, stride, padding, dilation)
    if kernel[0] * kernel[1] < 256:
        index = joint.optional(pool, monet.max_pool2d_index.default, x, *window, ceil_mode)
        arguments = (grad, index, list(value.shape), *window, has_strides_of_channels_last(value))
        call = Call(monet.max_pool2d_index_backward.default, arguments)
        yield Alternative("intermediate:index", call)
        yield Alternative("output:input", Call(monet.max_pool2d_input_backward.default, (grad, x, *window, ceil_mode)))
