"""Dynamo's traces of frames that it left alone."""

from __future__ import annotations

import gc


class Traces:
    """Dynamo's traces of frames that it left alone: they hold that call's tensors, in cycles."""

    _made = False

    def were_made(self) -> None:
        """A forward is being traced."""
        self._made = True

    def drop(self) -> None:
        """Collect those that were made since the last time."""
        if self._made:
            self._made = False
            gc.collect()
