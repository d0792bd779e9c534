"""``torch.ops.monet``: operators that read, or keep, less than ATen's.

Each is defined here by a reference in plain ATen, which runs wherever there is no native kernel (see ``kernels``).

Masks hold one bit for each element in the order of *storage*: element i is bit ``i % 8`` of byte ``i // 8``. Tensors
are dense, in any order of their dimensions, and those that belong together (gradient and input, input and residual)
have the same strides; the operators refuse others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# rows of the cross entropy are worked on together, as many as fill this
CHUNK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 25}

REFERENCES: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library("monet", "FRAGMENT")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``schema``; the function below it is its meaning, ``fake`` its shape, strides and dtype."""
    name = schema.partition("(")[0]

    def define(reference: Callable[..., Any]) -> Callable[..., Any]:
        _library.define(schema)
        _library.impl(name, reference, "CompositeExplicitAutograd")
        _library.impl(name, fake, "Meta")
        REFERENCES[name] = reference
        return reference

    return define


def like_first(x: Tensor, *_: Any) -> Tensor:
    """The form of a result that is like the first argument."""
    return torch.empty_like(x)


def _first(x: Tensor, *_: Any) -> Tensor:
    return x


def _storage(x: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of storage."""
    if not aten.is_non_overlapping_and_dense.default(x):
        raise RuntimeError("the tensor is not dense; make it contiguous (in any memory format) before")
    return x.as_strided((x.numel(),), (1,))


def same_layout(x: Tensor, y: Tensor) -> None:
    """Raise RuntimeError unless shapes, strides and dtypes are the same."""
    if x.dtype != y.dtype or x.shape != y.shape or (x.numel() and x.stride() != y.stride()):
        raise RuntimeError("the tensors differ in shape, strides or dtype")


def is_images(x: Tensor) -> bool:
    """Whether [N, C, ...] is contiguous, or channels-last."""
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are computed in, as ATen does."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# --- masks -----------------------------------------------------------------------------------------------------------


def _fake_mask(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(((x.numel() + 7) // 8,), dtype=torch.uint8)


def _pack(keep: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -keep.numel() % 8)).view(-1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=keep.device)
    return (bits << places).sum(1, dtype=torch.uint8)


def _unpack(mask: Tensor, elements: int) -> Tensor:
    if mask.dtype != torch.uint8 or mask.numel() != (elements + 7) // 8:
        raise RuntimeError(f"the mask must be {(elements + 7) // 8} bytes for {elements} elements, got {mask.numel()}")
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return ((mask.unsqueeze(1) >> places) & 1).view(-1)[:elements].bool()


@operator("range_mask(Tensor x, float low, float high) -> Tensor", _fake_mask)
def range_mask(x: Tensor, low: float, high: float) -> Tensor:
    """Which elements are strictly between ``low`` and ``high`` (NaN: no bound): not (x <= low) and not (x >= high).

    NaN is within, as in torch's threshold_backward and hardtanh_backward.
    """
    values = _storage(x).to(arithmetic(x.dtype))
    return _pack(~(values <= low) & ~(values >= high))


@operator("nonzero_mask(Tensor x) -> Tensor", _fake_mask)
def nonzero_mask(x: Tensor) -> Tensor:
    """Which elements are not zero; NaN is not."""
    return _pack(_storage(x) != 0)


def _mask_backward(out: Tensor, grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    values = _storage(grad)
    other = (values.to(arithmetic(grad.dtype)) * slope).to(grad.dtype) if slope else torch.zeros_like(values)
    _storage(out).copy_(torch.where(_unpack(mask, grad.numel()), values, other))
    return out


@operator("mask_backward(Tensor grad, Tensor mask, float slope) -> Tensor", like_first)
def mask_backward(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """``grad`` where the bit is set, elsewhere ``grad * slope`` (0 where ``slope`` is 0, also of NaN).

    The bits of threshold_backward, hardtanh_backward and, unless its input is NaN, leaky_relu_backward.
    """
    return _mask_backward(torch.empty_like(grad), grad, mask, slope)


@operator("mask_backward_(Tensor(a!) grad, Tensor mask, float slope) -> Tensor(a!)", _first)
def mask_backward_(grad: Tensor, mask: Tensor, slope: float) -> Tensor:
    """``mask_backward`` in place."""
    return _mask_backward(grad, grad, mask, slope)


def _mask_scale(out: Tensor, x: Tensor, mask: Tensor, scale: float) -> Tensor:
    noise = _unpack(mask, x.numel()).to(x.dtype) * scale
    _storage(out).copy_(_storage(x) * noise)
    return out


@operator("mask_scale(Tensor x, Tensor mask, float scale) -> Tensor", like_first)
def mask_scale(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``x * (bit ? scale : 0)``, the factor rounded to the dtype of ``x``: dropout by a packed mask."""
    return _mask_scale(torch.empty_like(x), x, mask, scale)


@operator("mask_scale_(Tensor(a!) x, Tensor mask, float scale) -> Tensor(a!)", _first)
def mask_scale_(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """``mask_scale`` in place."""
    return _mask_scale(x, x, mask, scale)


def _hardswish_output_backward(out: Tensor, grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    same_layout(grad, result)
    value, values = _storage(result), _storage(grad)
    right = _unpack(mask, grad.numel())
    slope = (24 * value + 9).clamp_(min=0).sqrt_().div_(6)
    slope = torch.where(right, torch.where(value < 3, slope, 1.0), -slope)
    _storage(out).copy_(torch.where(right | (value < 0), values * slope, torch.zeros_like(values)))
    return out


@operator("hardswish_output_backward(Tensor grad, Tensor result, Tensor mask) -> Tensor", like_first)
def hardswish_output_backward(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """Hardswish' backward from its output and, for each element, whether its input was above -1.5.

    With y = x (x + 3) / 6 between -3 and 3, the slope (2 x + 3) / 6 is +-sqrt(24 y + 9) / 6: + to the right of the
    minimum at -1.5, - to its left. A rounding of y moves it by at most ``sqrt(9 eps) / 6``, 1.7e-4 in float32, and
    that only where it is as small itself.
    """
    return _hardswish_output_backward(torch.empty_like(grad), grad, result, mask)


@operator("hardswish_output_backward_(Tensor(a!) grad, Tensor result, Tensor mask) -> Tensor(a!)", _first)
def hardswish_output_backward_(grad: Tensor, result: Tensor, mask: Tensor) -> Tensor:
    """``hardswish_output_backward`` in place."""
    return _hardswish_output_backward(grad, grad, result, mask)


@operator("softplus_output_backward(Tensor grad, Tensor result, float beta, float threshold) -> Tensor", like_first)
def softplus_output_backward(grad: Tensor, result: Tensor, beta: float, threshold: float) -> Tensor:
    """Softplus' backward from its output y: ``grad * (1 - exp(-beta * y))``, ``grad`` above the threshold.

    It has no kernel of its own: each function is a pass of ATen's over the result, which takes no more memory.
    """
    slope = torch.mul(result, -beta)
    slope = torch.threshold_(slope, -threshold, -math.inf)
    return slope.expm1_().neg_().mul_(grad)


# --- max pooling -----------------------------------------------------------------------------------------------------


def _images_format(x: Tensor) -> torch.memory_format:
    return torch.contiguous_format if x.is_contiguous() else torch.channels_last


def _fake_index(x: Tensor, *window: Any) -> Tensor:
    out = aten.max_pool2d_with_indices.default(x, *window)[0]
    return torch.empty(out.shape, dtype=torch.uint8, device=x.device, memory_format=_images_format(x))


def _fake_index_backward(grad: Tensor, index: Tensor, input_size: Sequence[int], *_: Any) -> Tensor:
    return torch.empty(input_size, dtype=grad.dtype, device=grad.device, memory_format=_images_format(grad))


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
    """The place of each window's largest element within it, row by row, as one byte: the one ATen picks."""
    _check_window(kernel_size)
    stride = stride or kernel_size
    flat = aten.max_pool2d_with_indices.default(x, kernel_size, stride, padding, dilation, ceil_mode)[1]
    rows = flat // x.shape[-1] - _window_start(flat.shape[-2], 0, x, stride, padding)
    columns = flat % x.shape[-1] - _window_start(flat.shape[-1], 1, x, stride, padding)
    place = rows // dilation[0] * kernel_size[1] + columns // dilation[1]
    return place.to(torch.uint8).contiguous(memory_format=_images_format(x))


@operator(
    "max_pool2d_index_backward(Tensor grad, Tensor index, int[] input_size, int[2] kernel_size, int[2] stride,"
    " int[2] padding, int[2] dilation) -> Tensor",
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
) -> Tensor:
    """The gradient of max_pool2d's input from ``max_pool2d_index``: the bits of max_pool2d_with_indices_backward."""
    _check_window(kernel_size)
    stride = stride or kernel_size
    place = index.long()
    rows = place // kernel_size[1] * dilation[0] + _window_start(grad.shape[-2], 0, grad, stride, padding)
    columns = place % kernel_size[1] * dilation[1] + _window_start(grad.shape[-1], 1, grad, stride, padding)
    flat = rows * input_size[-1] + columns
    # an index that no pooling gave may point outside of the plane: nothing is added for it
    outside = (flat < 0) | (flat >= input_size[-2] * input_size[-1])
    flat, grad = flat.masked_fill(outside, 0), grad.clone().masked_fill_(outside, 0)
    x = _fake_index_backward(grad, index, input_size)
    # the rounding mode changes nothing but the shape of an output, which is given
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
    """The gradient of max_pool2d's input from the input: the bits of max_pool2d_with_indices_backward."""
    window = (kernel_size, stride or kernel_size, padding, dilation, ceil_mode)
    flat = aten.max_pool2d_with_indices.default(x, *window)[1]
    return aten.max_pool2d_with_indices_backward.default(grad, x, *window, flat)  # type: ignore[no-any-return]


# --- cross entropy ---------------------------------------------------------------------------------------------------


def _log_softmax_nll_backward(
    out: Tensor,
    grad_loss: Tensor,
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    dim: int,
) -> Tensor:
    if log_probabilities.dim() != 2 or dim not in (1, -1):
        raise RuntimeError(f"expected [N, C] and dim 1, got {list(log_probabilities.shape)} and dim {dim}")
    rows, classes = log_probabilities.shape
    room = CHUNK_BYTES.get(log_probabilities.device.type, CHUNK_BYTES["cuda"])
    step = max(1, room // max(1, classes * log_probabilities.element_size()))
    grad = log_probabilities.new_empty((min(step, rows), classes))
    for first in range(0, rows, step):
        chunk = slice(first, min(first + step, rows))
        part = grad[: chunk.stop - first]
        aten.nll_loss_backward.grad_input(
            grad_loss[chunk] if grad_loss.dim() else grad_loss,
            log_probabilities[chunk],
            target[chunk],
            weight,
            reduction,
            ignore_index,
            total_weight,
            grad_input=part,
        )
        # element by element once the row's gradient is summed, so that it may write over what it reads
        aten._log_softmax_backward_data.out(part, log_probabilities[chunk], 1, out.dtype, out=out[chunk])
    return out


@operator(
    "log_softmax_nll_backward(Tensor grad_loss, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction,"
    " int ignore_index, Tensor total_weight, int dim) -> Tensor",
    lambda grad_loss, log_probabilities, *_: torch.empty_like(log_probabilities),
)
def log_softmax_nll_backward(grad_loss: Tensor, log_probabilities: Tensor, *rest: Any) -> Tensor:
    """The gradient of cross entropy's logits ([N, C], dim 1), without a full-size gradient of the log-probabilities.

    The bits of nll_loss_backward and _log_softmax_backward_data, which it runs on ``CHUNK_BYTES`` of rows at a time:
    that is its workspace. This serves every device.
    """
    return _log_softmax_nll_backward(torch.empty_like(log_probabilities), grad_loss, log_probabilities, *rest)


@operator(
    "log_softmax_nll_backward_(Tensor grad_loss, Tensor(a!) log_probabilities, Tensor target, Tensor? weight,"
    " int reduction, int ignore_index, Tensor total_weight, int dim) -> Tensor(a!)",
    lambda grad_loss, log_probabilities, *_: log_probabilities,
)
def log_softmax_nll_backward_(grad_loss: Tensor, log_probabilities: Tensor, *rest: Any) -> Tensor:
    """``log_softmax_nll_backward`` over the log-probabilities."""
    return _log_softmax_nll_backward(log_probabilities, grad_loss, log_probabilities, *rest)
