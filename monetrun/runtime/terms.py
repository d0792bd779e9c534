"""How the backwards of graphs have to give gradients, in terms and by turns: known once the script calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from monetrun.capture import double_backward
from monetrun.capture.gradient_order import brings_other_terms
from monetrun.capture.gradient_terms import nodes_behind, within_backward
from monetrun.runtime.hooks import hooks_of_trained
from monetrun.runtime.unplannable_use import compiled_calls

# Of so many backwards since a graph was captured it is looked up what they go through, which takes the host's time;
# of those after them each time so many have passed.
_LOOKED_AT = 16


class GradientTerms:
    """Whether something else uses a tensor, too, that a graph uses several times (see ``capture.gradient_terms``).

    Attributes:
        needed: the graphs give gradients in terms.
        by_turns: the graphs give each gradient as soon as it is final, also in one process: autograd adds it to another
            one, or a hook takes it, and it is held no longer.
    """

    def __init__(self) -> None:
        self.needed = self.by_turns = False
        self._backwards = 0
        self._looked_at = -1  # hooks of what is trained

    def graph_captured(self) -> None:
        """There is another graph, of which no backward was seen."""
        self._backwards = 0

    def changes(self, roots: Sequence[Any]) -> bool:
        """The script is about to differentiate ``roots`` (tensors). Gives whether models have to be compiled anew."""
        self._backwards += 1
        if self.needed or (self._backwards > _LOOKED_AT and self._backwards % _LOOKED_AT):
            return False
        sums = [edge for call in compiled_calls(roots) for edge in double_backward.sums_of(call)]
        self.needed = bool(sums) and brings_other_terms(roots, sums)
        return self.needed

    def hooks_came(self, trained: Callable[[], Iterable[torch.Tensor]]) -> bool:
        """A forward begins. Gives whether models have to be compiled anew: hooks take gradients of ``trained`` now."""
        if self.by_turns or self._looked_at == hooks_of_trained():
            return False
        self._looked_at = hooks_of_trained()
        self.by_turns = any(map(_is_hooked, trained()))
        return self.by_turns

    def look_at(self, roots: Sequence[Any]) -> None:
        """In a step that is recorded the script is about to differentiate ``roots``."""
        if not self.by_turns and not within_backward():
            leaves = (node.variable for node in nodes_behind(roots) if type(node).__name__ == "AccumulateGrad")
            self.by_turns = any(leaf.grad is not None or _is_hooked(leaf) for leaf in leaves)


def _is_hooked(leaf: torch.Tensor) -> bool:
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
