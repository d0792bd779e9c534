"""Random numbers in the order in which eager draws them."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_library = torch.library.Library("monet", "FRAGMENT")
_library.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _bernoulli_like(like: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(like).bernoulli_(p)


_library.impl("bernoulli_like", _bernoulli_like, "CompositeExplicitAutograd")
_library.impl("bernoulli_like", lambda like, p: torch.empty_like(like), "Meta")


def _bernoulli(like: torch.Tensor, p: float = 0.5, generator: Any = None) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return torch.ops.monet.bernoulli_like(like, p)  # type: ignore[no-any-return]


# x.bernoulli_(p) is traced as bernoulli.p(x, p), which fills a *contiguous* tensor: for a transposed x (dropout after
# attention) that deals the same random numbers to other elements than eager's call in place.
DECOMPOSITIONS = {aten.bernoulli.p: _bernoulli}
