"""Max pooling that keeps one byte for each window, or nothing.

What depends on sizes alone is computed once for each: a step calls these functions with the same sizes every time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monetrun.ops.cuda.launch import THREADS, launch
from monetrun.ops.cuda.operands import is_channels_last

_RUN = 4  # elements of a thread, as kRun in cuda_ops/pooling_cuda.cuh
_KEPT = 1 << 12  # sizes whose numbers are kept

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Window:
    size: Size
    stride: Size
    padding: Size
    dilation: Size

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in (self.size, self.stride, self.padding, self.dilation)):
            raise RuntimeError("kernel_size, stride, padding and dilation must be of two numbers")
        if min(*self.size, *self.stride, *self.dilation) <= 0 or min(self.padding) < 0:
            raise RuntimeError("kernel_size, stride and dilation must be positive and padding not negative")
        if self.size[0] * self.size[1] > 255:
            size = f"{self.size[0]} x {self.size[1]}"
            raise RuntimeError(f"a window of {size} has more places than one byte can name (255)")

    @property
    def numbers(self) -> Size:
        return (*self.size, *self.stride, *self.padding, *self.dilation)

    @property
    def strides(self) -> Size:
        return _divider(self.stride[0]), _divider(self.stride[1])

    def outputs(self, height: int, width: int, ceil_mode: bool) -> Size:
        rows, columns = (self._along(length, d, ceil_mode) for d, length in enumerate((height, width)))
        if rows <= 0 or columns <= 0:
            raise RuntimeError(f"the input of {height} x {width} is smaller than the window")
        return rows, columns

    def _along(self, length: int, d: int, ceil_mode: bool) -> int:
        stride, padding = self.stride[d], self.padding[d]
        span = length + 2 * padding - self.dilation[d] * (self.size[d] - 1) - 1
        count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
        # torch drops a window that would start in the padding behind the input
        return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


@functools.lru_cache(_KEPT)
def _window(size: Size, stride: Size, padding: Size, dilation: Size) -> _Window:
    return _Window(size, stride or size, padding, dilation)


def _of(kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> _Window:
    return _window(tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation))


def _divider(divisor: int) -> int:
    """What ``Divider`` in ``cuda_ops/pooling_cuda.cuh`` divides numbers below 2^31 with: a factor and a shift."""
    shift = (divisor - 1).bit_length()
    factor = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return factor << 8 | shift


def _dividers(size: Size, last: bool) -> Size:
    """By the sizes of the two innermost dimensions of images of [..., C, H, W]."""
    channels, height, width = size[-3:]
    inner, outer = (channels, width) if last else (width, height)
    return _divider(inner), _divider(outer)


@functools.lru_cache(_KEPT)
def _pooled(size: Size, window: _Window, ceil_mode: bool) -> Size:
    """The size of what is pooled from images of ``size``."""
    return (*size[:-2], *window.outputs(size[-2], size[-1], ceil_mode))


@functools.lru_cache(_KEPT)
def _launched(size: Size, pooled: Size, window: _Window, last: bool, *, backward: bool) -> tuple[int, ...]:
    """How many threads a kernel is launched with, and what it is told behind its tensors.

    Args:
        size: of the images, [N, C, H, W] or [C, H, W].
        pooled: of the windows.
        window: of the pooling.
        last: the images are channels-last.
        backward: the kernel runs over the images, otherwise over the windows.

    Raises:
        RuntimeError: an image has more elements than the kernels can count.
    """
    over = size if backward else pooled
    images = over[0] if len(over) == 4 else 1
    if not math.prod(over):
        return (0,)
    elements = max(math.prod(size[-3:]), math.prod(pooled[-3:]))
    if elements >= 1 << 31:
        raise RuntimeError(f"an image of {elements} elements is larger than 2^31")
    runs = -(-math.prod(over[-3:]) // (_RUN * THREADS))
    numbers = (images, *size[-3:], last, *pooled[-2:], *window.numbers, *_dividers(over, last))
    return (images * runs * THREADS, *numbers, *(window.strides if backward else ()))


def _last(images: Tensor, name: str) -> bool:
    """Whether [N, C, H, W] or [C, H, W] is channels-last; a RuntimeError unless it is that or contiguous."""
    if images.dim() not in (3, 4):
        raise RuntimeError(f"{name} must be [N, C, H, W] or [C, H, W], got {images.dim()} dimensions")
    if images.is_contiguous():
        return False
    if images.dim() == 3 or not is_channels_last(images):
        raise RuntimeError(f"{name} is neither contiguous nor channels-last")
    return True


def _has_format(images: Tensor, last: bool) -> bool:
    return images.dim() == 4 and is_channels_last(images) if last else images.is_contiguous()


def _new(like: Tensor, size: Sequence[int], dtype: torch.dtype, last: bool) -> Tensor:
    form = torch.channels_last if last else torch.contiguous_format
    return torch.empty(size, dtype=dtype, device=like.device, memory_format=form)


def max_pool2d_index(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """As ``families.pooling.max_pool2d_index``."""
    window, last = _of(kernel_size, stride, padding, dilation), _last(x, "x")
    index = _new(x, _pooled(x.shape, window, ceil_mode), torch.uint8, last)
    threads, *numbers = _launched(x.shape, index.shape, window, last, backward=False)
    launch("max_pool2d_index", x, threads, x, index, *numbers)
    return index


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
    """As ``families.pooling.max_pool2d_index_backward``."""
    window = _of(kernel_size, stride, padding, dilation)
    if not (_has_format(grad, channels_last) and _has_format(index, channels_last)):
        raise RuntimeError("grad and index must both have the input's memory format")
    if index.shape != grad.shape or index.dtype != torch.uint8:
        raise RuntimeError("index is not of grad's shape, in bytes")
    if len(input_size) != grad.dim():
        raise RuntimeError("input_size and grad differ in dimensions")
    to = _new(grad, input_size, grad.dtype, channels_last)
    threads, *numbers = _launched(to.shape, grad.shape, window, channels_last, backward=True)
    launch("max_pool2d_index_backward", grad, threads, grad, index, to, *numbers)
    return to


def max_pool2d_input_backward(
    grad: Tensor,
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """As ``families.pooling.max_pool2d_input_backward``."""
    window, last = _of(kernel_size, stride, padding, dilation), _last(x, "x")
    if grad.dtype != x.dtype or grad.shape != _pooled(x.shape, window, ceil_mode):
        raise RuntimeError("grad is not of the output's shape and the input's dtype")
    if not _has_format(grad, last):
        raise RuntimeError("grad and x differ in layout")
    to = torch.empty_like(x)
    threads, *numbers = _launched(x.shape, grad.shape, window, last, backward=True)
    launch("max_pool2d_input_backward", x, threads, grad, x, to, *numbers)
    return to
