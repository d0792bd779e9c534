"""What a plain run takes of a CUDA device."""

from __future__ import annotations

from dataclasses import dataclass

from monetrun.core.graph import check_bytes

# A plain run that leaves this share of the budget free needs no plan.
_ROOM = 0.05


@dataclass(frozen=True, slots=True)
class PlainPeaks:
    """Measured in a process that runs the script as it is.

    Attributes:
        allocated_bytes: the most in tensors.
        reserved_bytes: the most that the allocator held.
        retries: how often it gave cached memory back to serve a request.
        steps: how many training steps were measured.
        device: CUDA's number of the device.
        outside_bytes: what the process took of the device beside the allocator (its context, libraries); 0: unknown.
        more_than_bytes: a later step has reserved more than that, in a launch without a plan; 0: none is known to.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    steps: int
    device: int = 0
    outside_bytes: int = 0
    more_than_bytes: int = 0

    def check(self) -> None:
        """Check what was read.

        Raises:
            ValueError: a number cannot be right.
        """
        check_bytes(allocated=self.allocated_bytes, reserved=self.reserved_bytes, outside=self.outside_bytes)
        check_bytes(more_than=self.more_than_bytes)
        if min(self.retries, self.steps, self.device) < 0:
            raise ValueError("retries, steps or device are negative")

    def fits(self, budget_bytes: int) -> bool:
        """Whether the plain run stays within a budget, with room for what it does later."""
        return self.reserved_bytes <= (1.0 - _ROOM) * budget_bytes and self.more_than_bytes < budget_bytes
