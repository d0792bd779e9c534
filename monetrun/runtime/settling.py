"""Which modules never settle: each call of theirs has shapes that were not seen before.

Shapes within a model that is not captured whole may follow from the data, a new one in each step, and each takes as
long as many steps. New shapes of the model's own inputs are another matter (lengths of sentences, sizes of pictures):
there are so many, and each comes again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

# After so many calls that captured something, a module runs in Python.
UNSETTLED_CALLS = 16
# After so many shapes of inputs further ones are taken for ones that come again: they do not, in a script without end.
_MOST_SHAPES = 4096


class Settling:
    """Counts, of a model and the modules in it, calls with new shapes that do not come with the model's inputs."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # hashes of the inputs' shapes
        self._as_before = True
        self._calls: Counter[str] = Counter()
        self._generation = 0

    def begins(self, inputs: list[Any], generation: int) -> None:
        """A call begins that is not within another one's.

        Args:
            inputs: its arguments, out of whatever holds them.
            generation: goes up where models are compiled anew: known shapes are captured once more.
        """
        if generation != self._generation:
            self._generation = generation
            self._seen.clear()
        shapes = tuple(tuple(value.shape) for value in inputs if isinstance(value, torch.Tensor))
        self._as_before = hash(shapes) in self._seen or len(self._seen) == _MOST_SHAPES
        if not self._as_before:
            self._seen.add(hash(shapes))

    def captured(self, path: str) -> bool:
        """A call of the module at ``path`` has captured something; whether it will not settle."""
        self._calls[path] += self._as_before
        return self._calls[path] > UNSETTLED_CALLS
