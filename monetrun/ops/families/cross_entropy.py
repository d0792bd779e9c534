"""The gradient of the logits of a cross entropy in one pass over the log-probabilities, over which it may be written.

Eager first writes the gradient of the log-probabilities, which has one nonzero number per row, into a tensor as large
as the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from monetrun.ops.definition import operator
from monetrun.ops.families.in_place import may_overwrite
from monetrun.ops.registry import Alternative, Call, Joint, argument, implementation, is_whole, source, value_of

aten = torch.ops.aten
monet = torch.ops.monet

# rows are worked on in chunks of about this size
CHUNK_BYTES = {"cpu": 1 << 19, "cuda": 1 << 25}


def _backward_in_chunks(
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
    chunk_bytes = CHUNK_BYTES.get(log_probabilities.device.type, CHUNK_BYTES["cuda"])
    step = max(1, chunk_bytes // max(1, classes * log_probabilities.element_size()))
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
        # it sums the row first and then works element by element, so that it may write over what it reads
        aten._log_softmax_backward_data.out(part, log_probabilities[chunk], 1, out.dtype, out=out[chunk])
    return out


@operator(
    "log_softmax_nll_backward(Tensor grad_loss, Tensor log_probabilities, Tensor target, Tensor? weight, int reduction,"
    " int ignore_index, Tensor total_weight, int dim) -> Tensor",
    lambda grad_loss, log_probabilities, *_: torch.empty_like(log_probabilities),
)
def log_softmax_nll_backward(grad_loss: Tensor, log_probabilities: Tensor, *rest: Any) -> Tensor:
    """The gradient of cross entropy's logits ([N, C], dim 1), without a full-size gradient of the log-probabilities.

    Bitwise identical to nll_loss_backward and _log_softmax_backward_data, which it runs on ``CHUNK_BYTES`` of rows at a
    time: that is its workspace. There is no native kernel; this serves every device.
    """
    return _backward_in_chunks(torch.empty_like(log_probabilities), grad_loss, log_probabilities, *rest)


@operator(
    "log_softmax_nll_backward_(Tensor grad_loss, Tensor(a!) log_probabilities, Tensor target, Tensor? weight,"
    " int reduction, int ignore_index, Tensor total_weight, int dim) -> Tensor(a!)",
    lambda grad_loss, log_probabilities, *_: log_probabilities,
)
def log_softmax_nll_backward_(grad_loss: Tensor, log_probabilities: Tensor, *rest: Any) -> Tensor:
    """``log_softmax_nll_backward`` over the log-probabilities."""
    return _backward_in_chunks(log_probabilities, grad_loss, log_probabilities, *rest)


@implementation(aten._log_softmax_backward_data.default)
def _from_targets(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    gradient, output = source(node.args[0]), source(node.args[1])
    value = value_of(output)
    if value is None or value.dim() != 2 or not is_whole(value) or not value.is_contiguous():
        return
    if not isinstance(gradient, fx.Node) or gradient.target is not aten.nll_loss_backward.default:
        return
    if source(argument(gradient, "self")) is not output or argument(node, "dim") not in (1, -1):
        return
    if argument(node, "input_dtype") != value.dtype:
        return
    names = ("target", "weight", "reduction", "ignore_index", "total_weight")
    rest = [argument(gradient, name) for name in names]
    arguments = (argument(gradient, "grad_output"), output, *rest, 1)
    call = Call(monet.log_softmax_nll_backward.default, arguments)
    yield Alternative("fused:cross-entropy", call)
    if may_overwrite(node, output):
        over = Call(monet.log_softmax_nll_backward_.default, arguments)
        yield Alternative("fused:cross-entropy", over, output)
