"""Plan for an absent device: capture a model of fake tensors, which have shapes but no memory.

with offline.fake_tensors():
    model = torchvision.models.resnet50()
    x, y = torch.empty(184, 3, 224, 224), torch.zeros(184, dtype=torch.int64)
    joint = offline.capture(model, (x,), loss=lambda out: F.cross_entropy(out, y))
costs = offline.costs(joint, "roofline:p100")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._guards import detect_fake_mode

from monetrun.capture import cost, roofline
from monetrun.capture.fake_tensors import fake_tensors
from monetrun.capture.joint import JointGraph
from monetrun.core.errors import CaptureFailed, MonetrunError, UsageError
from monetrun.core.graph import Costs
from monetrun.core.plan import Schedule, plain_schedule
from monetrun.runtime.backend import Backend

__all__ = ["capture", "costs", "fake_tensors"]


def capture(
    module: nn.Module,
    arguments: Sequence[Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    train: bool = True,
    name: str = "",
) -> JointGraph:
    """The joint graph of a training step of ``module``, as a worker would capture it; nothing is allocated.

    Args:
        module: made within ``fake_tensors()``; it stays in the mode that ``train`` selects.
        arguments: of its forward, made within ``fake_tensors()`` too.
        loss: maps the module's result to the scalar that backward starts from; captured with the module. None: the
            graph ends at the module's outputs, as when the script computes the loss.
        train: False captures evaluation mode, with gradients.
        name: of the graph; the class of ``module`` by default.

    Raises:
        CaptureFailed: the tensors are real, the forward breaks into several graphs, or nothing needs gradients.
    """
    name = name or type(module).__name__
    mode = detect_fake_mode([*module.parameters(), *module.buffers(), *arguments])
    if mode is None:
        raise CaptureFailed(f"{name} and its arguments are real tensors", "make them within offline.fake_tensors()")
    module.train(train)

    def step(*given: Any) -> Any:
        result = module(*given)
        return result if loss is None else loss(result)

    collector = _Collector()
    torch._dynamo.reset()
    backend = Backend(collector, name)
    try:
        with mode, torch.enable_grad():
            torch.compile(step, backend=backend, dynamic=False)(*arguments)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MonetrunError):
            raise error.inner_exception from None
        raise
    if len(collector.joints) != 1:
        raise CaptureFailed(
            f"{name} was captured as {len(collector.joints)} graphs, expected one",
            "TORCH_LOGS=graph_breaks shows where it breaks" if collector.joints else "no input needs gradients",
        )
    return collector.joints[0]


def costs(joint: JointGraph, model_name: str) -> Costs:
    """The cost of each operator of ``joint`` under a cost model (``"roofline:p100"``).

    Raises:
        UsageError: there is no such model, or it is ``"measured"``, which fake tensors cannot be.
    """
    device = roofline.parse(model_name)
    if device is None:
        raise UsageError("fake tensors cannot be measured", f"cost models: {', '.join(roofline.names()[1:])}")
    return cost.modelled(joint, device)


class _Collector:
    """Keeps the captured graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.joints: list[JointGraph] = []

    def choose(self, joint: JointGraph) -> tuple[int, Schedule]:
        """The plain schedule."""
        self.joints.append(joint)
        return 0, plain_schedule(joint.graph)
