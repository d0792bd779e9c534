"""Gradients of steps before the recorded one (``monetrun.apply`` after plain steps): which it frees, and when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class GradientsBefore:
    """Looks, after each stretch of the recorded step, which of them are still there.

    Args:
        storages: of all gradients that are there when it begins.

    Attributes:
        freed: address and bytes of those that were freed, by the stretch after which they were.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage] = ()) -> None:
        each = {storage._cdata: storage for storage in storages if storage.nbytes()}
        self._there = [(StorageWeakRef(s), s.data_ptr(), s.nbytes()) for s in each.values()]
        self.freed: dict[int, dict[int, int]] = {}

    def look(self, stretch: int, outside: bool) -> None:
        """A stretch has ended; ``outside`` of calls of graphs, those that it frees are freed as it begins."""
        gone = {place: nbytes for ref, place, nbytes in self._there if ref.expired()}
        if gone:
            self._there = [row for row in self._there if not row[0].expired()]
            self.freed.setdefault(stretch - outside, {}).update(gone)

    @property
    def freed_bytes(self) -> int:
        """Of ``freed``."""
        return sum(nbytes for found in self.freed.values() for nbytes in found.values())

    @property
    def freed_places(self) -> frozenset[int]:
        """Addresses of ``freed``."""
        return frozenset(place for found in self.freed.values() for place in found)

    def kept_bytes(self, gradients: Iterable[Mapping[int, int]]) -> int:
        """Bytes of those that are still there and, by the number of their storage, among ``gradients``."""
        present = {number for storages in gradients for number in storages}
        return sum(nbytes for ref, _, nbytes in self._there if ref.cdata in present and not ref.expired())
