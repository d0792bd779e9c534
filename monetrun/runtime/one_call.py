"""One call of a module: what it is given and gives, and what is at work around it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from monetrun.capture.gradient_terms import within_backward

_TRACE_AND_GUARD = ("torch._dynamo.symbolic_convert", "torch._dynamo.guards")


def leaves(args: Any, kwargs: Any) -> list[Any]:
    """The values of a call, out of whatever holds them."""
    if type(args) is tuple and not kwargs and all(type(value) is torch.Tensor for value in args):
        return list(args)  # what models are given most often
    return torch.utils._pytree.tree_leaves((args, kwargs))


def is_without_gradients(result: Any) -> bool:
    """Whether a call gives tensors, of which none needs a gradient: nothing is captured for training then."""
    tensors = [value for value in leaves(result, {}) if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module itself has hooks, which its call runs besides its forward."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return any(kinds)


def autograd_is_at_work() -> bool:
    """Whether a backward runs, or the script's hooks take what is saved for one, as in a checkpointed region."""
    return within_backward() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def without_dynamo(run: Callable[..., Any], *args: Any) -> Any:
    """Call ``run`` without Dynamo, which may be at work on the caller's frame; ``run`` may start it again."""
    from torch._dynamo.eval_frame import DisableContext

    return DisableContext()(run)(*args)


def capture_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises where it cannot capture a model whole; the second is raised as it is by its bookkeeping.

    And its own assertions, where the exception that is being handled is one that it came upon as it traced, or as it
    made guards: numbers that are left open may not fulfil what it derives from them.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    found = torch._dynamo.exc.TorchDynamoException, GuardOnDataDependentSymNode
    traceback = sys.exc_info()[2]
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") in _TRACE_AND_GUARD:
            return *found, AssertionError
        traceback = traceback.tb_next
    return found
