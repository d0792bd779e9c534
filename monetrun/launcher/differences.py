"""Compares tensors that two runs of a script have kept, a part at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from monetrun.planning.check import Difference

_CHUNK = 1 << 22  # elements that are compared at once

Values = Mapping[tuple[str, str], torch.Tensor]  # by kind and name


def read_values(folder: Path) -> Values:
    """What a run has kept of its first step, by kind and name; the tensors are mapped, not read."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    for path in sorted(folder.iterdir(), key=lambda path: int(path.stem)):
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found.update({(kept["kind"], name): value for name, value in kept["values"].items()})
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether dtype, shape and all bits are the same."""
    if other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(_chunks(one), _chunks(other), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def difference(
    kind: str, name: str, planned: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor | None
) -> Difference:
    """A value of the planned step beside the plain one, and float64's if there is one."""
    epsilon = torch.finfo(plain.dtype).eps if plain.is_floating_point() or plain.is_complex() else 0.0
    largest, distance = _distance(planned, plain)
    if exact is not None and exact.shape != plain.shape:
        exact = None
    return Difference(
        kind,
        name,
        same_bits(planned, plain),
        largest,
        distance,
        plain.numel(),
        _distance(plain, None)[1],
        epsilon,
        None if exact is None else _distance(planned, exact)[1],
        None if exact is None else _distance(plain, exact)[1],
    )


def _distance(one: torch.Tensor, other: torch.Tensor | None) -> tuple[float, float]:
    """The largest difference of two elements, and the norm of the difference; ``other`` None: of nothing but zeros.

    Infinite where shapes differ, or where one is a number and the other is none. The same infinities, and two that are
    no numbers, do not differ.
    """
    if other is not None and one.shape != other.shape:
        return math.inf, math.inf
    largest, square = 0.0, 0.0
    others = iter(()) if other is None else iter(_chunks(other))
    for chunk in _chunks(one):
        a = _wide(chunk)
        b = torch.zeros_like(a) if other is None else _wide(next(others))
        apart = (a - b).abs()
        apart[(a == b) | (a.isnan() & b.isnan())] = 0
        apart = apart.nan_to_num(nan=math.inf, posinf=math.inf)
        if apart.numel():
            largest, square = max(largest, float(apart.max())), square + float(apart.square().sum())
    return largest, math.sqrt(square)


def _wide(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.to(torch.complex128 if chunk.is_complex() else torch.float64)


def _chunks(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The elements in order, some millions at a time."""
    dense = value if value.layout == torch.strided else value.to_dense()
    return dense.contiguous().reshape(-1).split(_CHUNK)
