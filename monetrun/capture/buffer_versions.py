"""Versions of batch norms' running statistics, which eager's kernels write without counting it.

AOTAutograd counts each buffer that a graph writes. Autograd would then refuse the backward of a call in evaluation mode
that saved the statistics, once a call in training mode has followed; eager lets it read what they are by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from monetrun.capture.boxed import passed_on

_STATISTICS = {1: "running_mean", 2: "running_var"}  # arguments of F.batch_norm


def uncounted(compiled: Callable[..., Any], module: fx.GraphModule) -> Callable[..., Any]:
    """``compiled``, which leaves the versions of running statistics as they were.

    Args:
        compiled: takes the inputs of ``module``.
        module: TorchDynamo's graph.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    written = {
        node.args[place] if place < len(node.args) else node.kwargs.get(name)
        for node in module.graph.find_nodes(op="call_function", target=F.batch_norm)
        for place, name in _STATISTICS.items()
    }
    places = [i for i, node in enumerate(inputs) if node in written]
    if not places:
        return compiled

    def call(*arguments: Any) -> Any:
        given = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments  # boxed
        statistics = tuple(t for i in places if not (t := given[i]).is_inference())
        with torch.autograd._unsafe_preserve_version_counter(statistics):
            return compiled(*arguments)

    return passed_on(call, compiled)
