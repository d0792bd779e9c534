"""What a call's forward leaves its backward, where autograd keeps one tensor of the two."""

from __future__ import annotations

from typing import Any

from monetrun.capture.storages import version_of


class SavedValues:
    """The values, and the versions that they have now.

    Args:
        fixed: what the backward needs besides.
        values: tensors and numbers.
    """

    def __init__(self, fixed: Any, values: list[Any]) -> None:
        self.fixed = fixed
        self.values = values
        self._versions = [version_of(value) for value in values]

    def check(self) -> None:
        """Check that no value has changed.

        Raises:
            RuntimeError: one has, in place; torch's own error.
        """
        for value, version in zip(self.values, self._versions, strict=True):
            if (now := version_of(value)) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" [{value.type()} {list(value.shape)}] is at version {now}; expected version {version} instead."
                )

    def drop(self) -> None:
        """No other backward follows."""
        self.values, self._versions = [], []
