"""The batches that a search for the largest one may try: all multiples of a number, or the divisors of another."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sizes:
    """Batch sizes in rising order, numbered from 1.

    Attributes:
        multiple: each is a multiple of this.
        among: there are only these; empty: all multiples.
    """

    multiple: int = 1
    among: tuple[int, ...] = ()

    def __getitem__(self, number: int) -> int:
        return self.among[number - 1] if self.among else number * self.multiple

    def number(self, batch: float) -> int:
        """How many of the sizes are at most ``batch``."""
        return bisect.bisect_right(self.among, batch) if self.among else int(batch // self.multiple)

    def next_after(self, batch: int) -> int:
        """The smallest size above ``batch``; 0 where there is none."""
        number = self.number(batch) + 1
        return 0 if self.among and number > len(self.among) else self[number]


def divisors(total: int, multiple: int = 1) -> Sizes:
    """The divisors of ``total`` that are multiples of ``multiple``, which divides it too."""
    low = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    both = sorted({*low, *(total // n for n in low)})
    return Sizes(multiple, tuple(n for n in both if n % multiple == 0))
