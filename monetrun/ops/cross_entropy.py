"""The gradient of the logits of a cross entropy in one pass over the log-probabilities, over which it may be written.

Eager writes the gradient of the log-probabilities first, one number per row that is not zero, in a tensor as large as
the logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from monetrun.ops.in_place import may_overwrite
from monetrun.ops.registry import Alternative, Call, Joint, argument, implementation, is_whole, source, value_of

aten = torch.ops.aten
monet = torch.ops.monet


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
