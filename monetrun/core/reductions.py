"""Which gradients a step reduces over all ranks, and in which buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from monetrun.core.graph import Graph


@dataclass(frozen=True, slots=True)
class Reductions:
    """What DistributedDataParallel reduces in a step.

    Attributes:
        gradients: (graph, tensor) of each, in the order in which the backward gives them.
        bucket_bytes: a bucket is full with so many bytes.
        first_bucket_bytes: the first one is.
    """

    gradients: tuple[tuple[int, int], ...]
    bucket_bytes: int
    first_bucket_bytes: int

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: a size is not positive.
        """
        if self.bucket_bytes < 1 or self.first_bucket_bytes < 1:
            raise ValueError(f"buckets of {self.first_bucket_bytes} and {self.bucket_bytes} bytes")

    def check_in(self, graphs: Sequence[Graph]) -> None:
        """Check what was read against the graphs of its step.

        Raises:
            ValueError: there is no such gradient.
        """
        for k, t in self.gradients:
            if not 0 <= k < len(graphs) or not 0 <= t < len(graphs[k].tensors):
                raise ValueError(f"it reduces tensor {t} of graph {k}, which does not exist")

    def buckets(self, nbytes: Sequence[int]) -> list[range]:
        """The buckets as DistributedDataParallel forms them after the first step: ranges of ``gradients``.

        Args:
            nbytes: of each gradient.
        """
        found: list[range] = []
        start = size = 0
        for i, each in enumerate(nbytes):
            size += each
            if size >= (self.bucket_bytes if found else self.first_bucket_bytes):
                found.append(range(start, i + 1))
                start, size = i + 1, 0
        if start < len(nbytes):
            found.append(range(start, len(nbytes)))
        return found
