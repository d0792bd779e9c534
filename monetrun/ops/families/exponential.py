"""Backward of ELU (and SELU, CELU, which are ELUs with factors) and of softplus from their outputs.

ATen's own backward of ELU takes input or output. Where the function is flat, ``exp(x)`` is recovered as
``result / alpha + 1``, whose error is a rounding of 1 rather than of itself: negligible beside the other gradients in
float32, too much in reduced precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from monetrun.ops.definition import like_first, operator
from monetrun.ops.families.in_place import over_gradient
from monetrun.ops.registry import Alternative, Call, Joint, alike, argument, implementation, source, wide

aten = torch.ops.aten
monet = torch.ops.monet

_CONSTANTS = ("alpha", "scale", "input_scale")

# above this input, softplus differs from it by less than 2e-9
_LINEAR_FROM = 20.0


@operator("softplus_output_backward(Tensor grad, Tensor result, float beta, float threshold) -> Tensor", like_first)
def softplus_output_backward(grad: Tensor, result: Tensor, beta: float, threshold: float) -> Tensor:
    """Softplus's backward from its output y: ``grad * (1 - exp(-beta * y))``, ``grad`` above the threshold.

    It has no native kernel: the reference works in place on its result, so that it needs no more memory than one would.
    """
    slope = torch.mul(result, -beta)
    slope = torch.threshold_(slope, -threshold, -math.inf)
    return slope.expm1_().neg_().mul_(grad)


@implementation(aten.elu_backward.default)
def _from_result(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x = node.args[0], source(argument(node, "self_or_result"))
    constants = [argument(node, name) for name in _CONSTANTS]
    if argument(node, "is_result") or not wide(x):
        return
    if float(constants[0]) < 0:
        return  # the output's sign does not show the input's
    for result in x.users:
        same = result.target is aten.elu.default and [argument(result, name) for name in _CONSTANTS] == constants
        if same and alike(node, result):
            call = Call(node.target, (grad, *constants, True, result))
            yield Alternative("output:elu", call, exact=False, costs_as=Call.of(node))
            for over in over_gradient(node, call, "output:elu"):
                yield replace(over, exact=False)
            return


@implementation(aten.softplus_backward.default)
def _softplus_from_result(node: fx.Node, joint: Joint) -> Iterator[Alternative]:
    grad, x, beta, threshold = node.args[0], source(node.args[1]), *_numbers(node)
    if not wide(x) or beta <= 0 or threshold < _LINEAR_FROM:
        return
    for result in x.users:
        if result.target is aten.softplus.default and _numbers(result) == (beta, threshold) and alike(node, result):
            call = Call(monet.softplus_output_backward.default, (grad, result, beta, threshold))
            yield Alternative("output:softplus", call, exact=False)
            return


def _numbers(node: fx.Node) -> tuple[float, float]:
    """Beta and threshold of a softplus or its backward."""
    beta, threshold = (float(argument(node, name)) for name in ("beta", "threshold"))
    return beta, threshold
