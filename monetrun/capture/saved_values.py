"""What a call's forward leaves its backward, where autograd keeps one tensor of the two."""

from __future__ import annotations

from typing import Any

import torch


class SavedValues:
    """The values, and the versions that they have now.

    Args:
        fixed: what the backward needs besides.
        values: tensors and numbers.
    """

    def __init__(self, fixed: Any, values: list[Any]) -> None:
        self.fixed = fixed
        self.values = values
        self._versions = [_version(value) for value in values]

    def check(self) -> None:
        """Check that no value has changed.

        Raises:
            RuntimeError: one has, in place; torch's own error.
        """
        for value, version in zip(self.values, self._versions, strict=True):
            if (now := _version(value)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" [{value.type()} {list(value.shape)}] is at version {now}; expected version {version} instead."
                )

    def drop(self) -> None:
        """No other backward follows."""
        self.values, self._versions = [], []


def _version(value: Any) -> int:
    """How often a tensor was changed in place; 0 for numbers, and for tensors that do not count it."""
    return 0 if not isinstance(value, torch.Tensor) or value.is_inference() else value._version
