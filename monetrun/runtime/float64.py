"""Runs a model in float64 on the values of its own precision: as exact as a step can be had."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def convert(module: nn.Module) -> None:
    """Have ``module`` and all that is made from now on be float64. Optimizers keep their parameters."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    module.double()
    if (default := torch.get_default_dtype()) != torch.float64:
        SameRandomNumbers(dtypes.pop() if len(dtypes) == 1 else default, default).__enter__()
        torch.set_default_dtype(torch.float64)


def converted(values: Any) -> Any:
    """``values`` with their floating-point tensors in float64."""
    return tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, values)


class SameRandomNumbers(TorchDispatchMode):
    """Random operators run in the model's own precision: in float64 they would draw other numbers.

    Args:
        dtype: of the model's parameters.
        default: torch's default dtype before it became float64.
    """

    def __init__(self, dtype: torch.dtype, default: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.default = default

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)

        def narrow(value: torch.Tensor) -> torch.Tensor:
            return value.to(self.dtype) if value.dtype == torch.float64 else value

        narrowed = tree_map_only(torch.Tensor, narrow, (args, kwargs))
        if narrowed[1].get("dtype") == torch.float64:
            narrowed[1]["dtype"] = self.default
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.default)
        try:
            drawn = func(*narrowed[0], **narrowed[1])
        finally:
            torch.set_default_dtype(before)
        if func._schema.is_mutable:
            written = args[0] if args else kwargs["out"]
            return written.copy_(drawn)
        return converted(drawn)
