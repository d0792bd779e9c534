"""Max pooling that keeps one byte for each window, or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monetrun.ops.cuda.launch import THREADS, launch
from monetrun.ops.cuda.operands import is_channels_last

_RUN = 4  # elements of a thread, as kRun in cuda_ops/pooling_cuda.cuh


@dataclass(frozen=True, slots=True)
class _Window:
    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in (self.size, self.stride, self.padding, self.dilation)):
            raise RuntimeError("kernel_size, stride, padding and dilation must be of two numbers")
        if min(*self.size, *self.stride, *self.dilation) <= 0 or min(self.padding) < 0:
            raise RuntimeError("kernel_size, stride and dilation must be positive and padding not negative")
        if self.size[0] * self.size[1] > 255:
            size = f"{self.size[0]} x {self.size[1]}"
            raise RuntimeError(f"a window of {size} has more places than one byte can name (255)")

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.size, *self.stride, *self.padding, *self.dilation)

    @property
    def strides(self) -> tuple[int, int]:
        return _divider(self.stride[0]), _divider(self.stride[1])

    def outputs(self, length: int, d: int, ceil_mode: bool) -> int:
        stride, padding = self.stride[d], self.padding[d]
        span = length + 2 * padding - self.dilation[d] * (self.size[d] - 1) - 1
        count = (span + (stride - 1 if ceil_mode else 0)) // stride + 1
        # torch drops a window that would start in the padding behind the input
        return count - 1 if ceil_mode and (count - 1) * stride >= length + padding else count


def _divider(divisor: int) -> int:
    """What ``Divider`` in ``cuda_ops/pooling_cuda.cuh`` divides numbers below 2^31 with: a factor and a shift."""
    shift = (divisor - 1).bit_length()
    factor = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return factor << 8 | shift


def _dividers(size: Sequence[int], last: bool) -> tuple[int, int]:
    """By the sizes of the two innermost dimensions of images of [..., C, H, W]."""
    channels, height, width = size[-3:]
    inner, outer = (channels, width) if last else (width, height)
    return _divider(inner), _divider(outer)


def _start(name: str, like: Tensor, over: Tensor, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Launch a kernel over all elements of the images ``over``.

    Raises:
        RuntimeError: an image has more elements than the kernels can count.
    """
    if not over.numel():
        return
    images = over.shape[0] if over.dim() == 4 else 1
    elements = max(t[0].numel() if t.dim() == 4 else t.numel() for t in tensors)
    if elements >= 1 << 31:
        raise RuntimeError(f"an image of {elements} elements is larger than 2^31")
    runs = -(-(over.numel() // images) // (_RUN * THREADS))
    launch(name, like, images * runs * THREADS, *tensors, images, *numbers)


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
    window = _Window(kernel_size, stride or kernel_size, padding, dilation)
    last = _last(x, "x")
    channels, height, width = x.shape[-3:]
    rows, columns = window.outputs(height, 0, ceil_mode), window.outputs(width, 1, ceil_mode)
    if rows <= 0 or columns <= 0:
        raise RuntimeError(f"the input of {height} x {width} is smaller than the window")
    index = _new(x, (*x.shape[:-2], rows, columns), torch.uint8, last)
    sizes = (channels, height, width, last, rows, columns)
    dividers = _dividers(index.shape, last)
    _start("max_pool2d_index", x, index, (x, index), (*sizes, *window.numbers, *dividers))
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
    window = _Window(kernel_size, stride or kernel_size, padding, dilation)
    if not (_has_format(grad, channels_last) and _has_format(index, channels_last)):
        raise RuntimeError("grad and index must both have the input's memory format")
    if index.shape != grad.shape or index.dtype != torch.uint8:
        raise RuntimeError("index is not of grad's shape, in bytes")
    if len(input_size) != grad.dim():
        raise RuntimeError("input_size and grad differ in dimensions")
    to = _new(grad, input_size, grad.dtype, channels_last)
    sizes = (*input_size[-3:], channels_last, *grad.shape[-2:])
    dividers = (*_dividers(to.shape, channels_last), *window.strides)
    _start("max_pool2d_index_backward", grad, to, (grad, index, to), (*sizes, *window.numbers, *dividers))
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
    window = _Window(kernel_size, stride or kernel_size, padding, dilation)
    last = _last(x, "x")
    pooled = (window.outputs(x.shape[-2], 0, ceil_mode), window.outputs(x.shape[-1], 1, ceil_mode))
    if grad.dtype != x.dtype or grad.shape != (*x.shape[:-2], *pooled):
        raise RuntimeError("grad is not of the output's shape and the input's dtype")
    if not _has_format(grad, last):
        raise RuntimeError("grad and x differ in layout")
    to = torch.empty_like(x)
    sizes = (*x.shape[-3:], last, *pooled)
    dividers = (*_dividers(to.shape, last), *window.strides)
    _start("max_pool2d_input_backward", x, to, (grad, x, to), (*sizes, *window.numbers, *dividers))
    return to
