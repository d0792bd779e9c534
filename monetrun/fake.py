"""Tensors without memory: a mode in which whatever is made has a shape, a dtype and strides, and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode


class FakeTensors(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode; see ``fake_tensors``."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeTensors:
        return self  # a tensor's copy is a tensor of the same mode


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensors]:
    """A context in which every tensor that is made is fake; real ones that operators are given are taken as such."""
    original = nn.init._no_grad_trunc_normal_

    def shaped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor  # from torch 2.15 on it looks at the values that it draws

    nn.init._no_grad_trunc_normal_ = shaped
    try:
        with FakeTensors() as mode:
            yield mode
    finally:
        nn.init._no_grad_trunc_normal_ = original
