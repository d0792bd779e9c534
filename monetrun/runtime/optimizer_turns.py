"""Tells where a training step of several optimizers ends, also where the script leaves one of their steps out."""

from __future__ import annotations


class OptimizerTurns:
    """The optimizers' steps of one process, in the order of the first training step.

    A script may leave one out, or make one more: a discriminator that trains in every other step, a regularization in
    every sixteenth.
    """

    def __init__(self) -> None:
        self._count = 1
        self._order: list[int] = []  # of the optimizers, by their ids
        self._place = 0  # in it, of the next one

    def are(self, count: int) -> None:
        """A training step has ``count`` optimizer steps from now on."""
        if max(1, count) != self._count:
            self._count, self._order, self._place = max(1, count), [], 0

    @property
    def within(self) -> bool:
        """Whether some of a training step's optimizers have made their step, and others have not."""
        return self._place > 0

    def ended(self, optimizer: int) -> bool:
        """The step of an optimizer (its ``id``) has ended. Gives whether a training step has ended with it."""
        if len(self._order) < self._count:
            self._order.append(optimizer)
            self._place = len(self._order)
        elif self._order[self._place] == optimizer:
            self._place += 1
        elif optimizer in self._order:  # those between were left out
            self._place += 1
            while self._order[self._place % self._count] != optimizer:
                self._place += 1
            self._place += 1
        elif len({*self._order}) < min(2, self._count):  # it was left out of the first step, and ends one
            self._order, self._place = [*self._order[1:], optimizer], self._count
        else:
            self._order, self._place = [optimizer], 1
        whole, self._place = divmod(self._place, self._count)
        return whole > 0
