"""What the DistributedDataParallel around the model, None where there is none, holds and reduces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from monetrun.core.reductions import Reductions


def outside_buckets(parallel: Any, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters whose gradients are no views of ``parallel``'s buckets, which are always there."""
    views = parallel is not None and parallel.gradient_as_bucket_view
    within = {id(p) for p in parallel.parameters()} if views else set()
    return [p for p in parameters if id(p) not in within]


def bucket_bytes(parallel: Any) -> int:
    """What ``parallel`` holds for the gradients; with ``gradient_as_bucket_view`` the gradients themselves."""
    if parallel is None:
        return 0
    ignored, named = parallel.parameters_to_ignore, parallel.module.named_parameters()
    return sum(p.nbytes for name, p in named if p.requires_grad and name not in ignored)


def reductions(parallel: Any, given: Iterable[tuple[int, int]]) -> Reductions | None:
    """What ``parallel`` reduces of the gradients (graph, tensor) that are given, in order."""
    gradients = tuple(given)
    if parallel is None or not gradients:
        return None
    cap = int(parallel.bucket_bytes_cap)
    return Reductions(gradients, cap, min(cap, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES))
