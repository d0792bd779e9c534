"""BatchNorm as cuDNN computes it, which is what eager runs on CUDA: the same kernel, with its reserve space.

``aten.cudnn_batch_norm`` writes the running statistics without saying so in its schema, and AOTAutograd replaces it by
ATen's own kernel, whose roundings differ. While a model is traced, ``traced`` stands in for it (see
``capture.tracing``): it calls an operator that gives the new running statistics, as ATen's functional one does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monetrun.ops.definition import kernel, operator, register_autograd
from monetrun.ops.memory_format import is_channels_last, memory_format

aten = torch.ops.aten
monet = torch.ops.monet

_ARGUMENTS = "Tensor x, Tensor weight, Tensor? bias"


def _like_input(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=_format(x))


def _format(x: Tensor) -> torch.memory_format:
    return memory_format(x.dim(), bool(is_channels_last(x)))


# ---- in training


def _fake_again(x: Tensor, weight: Tensor, bias: Any, eps: float, reserve_bytes: int) -> tuple[Tensor, ...]:
    mean, invstd = torch.empty_like(weight), torch.empty_like(weight)
    return _like_input(x), mean, invstd, x.new_empty((reserve_bytes,), dtype=torch.uint8)


def _fake(x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> tuple[Tensor, ...]:
    *statistics, _, eps, reserve_bytes = rest
    updated = (x.new_empty((0,)) if s is None else torch.empty_like(s) for s in statistics)
    return *_fake_again(x, weight, bias, eps, reserve_bytes), *updated


@operator(
    f"cudnn_batch_norm({_ARGUMENTS}, Tensor? running_mean, Tensor? running_var, float momentum, float eps,"
    " int reserve_bytes) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
def cudnn_batch_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Training: the result, mean, inverse deviation, cuDNN's reserve space, and the new running mean and variance.

    ``reserve_bytes`` are those of ``reserve_bytes_of``. Statistics that are not given are empty.
    """
    running_mean, running_var, momentum, eps, reserve_bytes = rest
    reserve = x.new_zeros((reserve_bytes,), dtype=torch.uint8)
    if running_mean is None:
        found = aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
        return *found, reserve, x.new_empty((0,)), x.new_empty((0,))
    y, mean, invstd, *updated = aten._native_batch_norm_legit_functional(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    return y, mean, invstd, reserve, *updated


@kernel("cudnn_batch_norm", "CUDA")
def _by_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *statistics, momentum, eps, _ = rest
    updated = [None if s is None else s.clone() for s in statistics]
    found = aten.cudnn_batch_norm.default(x, weight, bias, *updated, True, momentum, eps)
    return *found, *(x.new_empty((0,)) if s is None else s for s in updated)


@operator(
    f"cudnn_batch_norm_again({_ARGUMENTS}, float eps, int reserve_bytes) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_again,
)
def cudnn_batch_norm_again(x: Tensor, weight: Tensor, bias: Any, eps: float, reserve_bytes: int) -> tuple[Tensor, ...]:
    """``cudnn_batch_norm`` without running statistics: what a second run computes."""
    return cudnn_batch_norm(x, weight, bias, None, None, 0.0, eps, reserve_bytes)[:4]


@kernel("cudnn_batch_norm_again", "CUDA")
def _again_by_cudnn(x: Tensor, weight: Tensor, bias: Any, eps: float, reserve_bytes: int) -> tuple[Tensor, ...]:
    return _by_cudnn(x, weight, bias, None, None, 0.0, eps, reserve_bytes)[:4]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, *_, eps, _ = inputs
    _, mean, invstd, reserve, *_ = output
    ctx.save_for_backward(x, weight, mean, invstd, reserve)
    ctx.eps = eps
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    x, weight, mean, invstd, reserve = ctx.saved_tensors
    grad = grad.contiguous(memory_format=_format(x))
    found = aten.cudnn_batch_norm_backward.default(x, grad, weight, None, None, mean, invstd, ctx.eps, reserve)
    wanted = (g if needed else None for g, needed in zip(found, ctx.needs_input_grad, strict=False))
    return *wanted, *(None,) * 5


register_autograd("cudnn_batch_norm", _gradients, _keep)


# ---- in evaluation


@operator(
    f"cudnn_batch_norm_inference({_ARGUMENTS}, Tensor running_mean, Tensor running_var, float eps) -> Tensor",
    lambda x, *_: _like_input(x),
)
def cudnn_batch_norm_inference(x: Tensor, weight: Tensor, bias: Any, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """By the running statistics, which stay as they are."""
    return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, 0.0, eps)[0]  # type: ignore[no-any-return]


@kernel("cudnn_batch_norm_inference", "CUDA")
def _inference_by_cudnn(x: Tensor, weight: Tensor, bias: Any, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    return aten.cudnn_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)[0]  # type: ignore[no-any-return]


def _keep_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, mean, var, eps = inputs
    ctx.save_for_backward(x, weight, mean, var)
    ctx.eps = eps


def _inference_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, var = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    arguments = (grad, x, weight, mean, var, None, None, False, ctx.eps, mask)
    found = aten.native_batch_norm_backward.default(*arguments)
    return *(g if needed else None for g, needed in zip(found, mask, strict=True)), None, None, None


register_autograd("cudnn_batch_norm_inference", _inference_gradients, _keep_inference)


# ---- while tracing


def reserve_bytes_of(x: Tensor) -> int:
    """Bytes that cuDNN's forward leaves for its backward; 0 where there is no device to ask."""
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(x, True))  # type: ignore[attr-defined]


def traced(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``aten.cudnn_batch_norm`` gives and does, by the operators above."""
    if not training:
        y = monet.cudnn_batch_norm_inference.default(x, weight, bias, running_mean, running_var, eps)
        return y, weight.new_empty((0,)), weight.new_empty((0,)), x.new_empty((0,), dtype=torch.uint8)
    y, mean, invstd, reserve, new_mean, new_var = monet.cudnn_batch_norm.default(
        x, weight, bias, running_mean, running_var, momentum, eps, reserve_bytes_of(x)
    )
    with torch.no_grad():
        for statistic, updated in ((running_mean, new_mean), (running_var, new_var)):
            if statistic is not None:
                statistic.copy_(updated)
    return y, mean, invstd, reserve
