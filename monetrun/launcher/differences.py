"""Compares tensors that two runs of a script have kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from monetrun.planning.check import Difference
from monetrun.runtime.tensor_distance import distance, same_bits

Values = Mapping[tuple[str, str], torch.Tensor]  # by kind and name


def read_values(folder: Path) -> Values:
    """What a run has kept of its first step, by kind and name; the tensors are mapped, not read."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for path in sorted(folder.iterdir(), key=lambda path: int(path.stem)):
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found.update({(kept["kind"], name): value for name, value in kept["values"].items()})
    return found


def difference(
    kind: str, name: str, planned: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor | None
) -> Difference:
    """A value of the planned step beside the plain one, and float64's if there is one."""
    epsilon = torch.finfo(plain.dtype).eps if plain.is_floating_point() or plain.is_complex() else 0.0
    largest, norm = distance(planned, plain)
    if exact is not None and exact.shape != plain.shape:
        exact = None
    return Difference(
        kind,
        name,
        same_bits(planned, plain),
        largest,
        norm,
        plain.numel(),
        distance(plain, None)[1],
        epsilon,
        None if exact is None else distance(planned, exact)[1],
        None if exact is None else distance(plain, exact)[1],
    )
