"""Which errors of a compiler backend end the training."""

from __future__ import annotations

from monetrun.core.errors import CaptureFailed, MonetrunError, ScheduleError, is_out_of_memory


def is_refusal(error: Exception) -> bool:
    """Whether an error of the backend must end the training; after others, what it was to compile runs as it is."""
    if isinstance(error, (CaptureFailed, ScheduleError)):
        return False
    return isinstance(error, MonetrunError) or is_out_of_memory(error)
