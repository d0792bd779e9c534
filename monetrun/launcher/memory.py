"""What ``--budget`` comes to in bytes, on this machine's devices or on the one that a cost model describes."""

from __future__ import annotations

from monetrun.core.budget import AUTO, BYTES, SHARE_OF_FREE, Budget, resolve
from monetrun.launcher.ranks import Ranks
from monetrun.machine.device import query, smallest

# A budget that depends on the free memory is rounded down to a multiple of this, so that the next launch finds the
# same plan in the cache.
_GRAIN_BYTES = 32 << 20


def modelled_bytes(cost_model: str) -> int:
    """Memory of the device that a cost model describes; 0 for ``"measured"``.

    Raises:
        UsageError: there is no such cost model.
    """
    if cost_model == "measured":
        return 0
    from monetrun.capture import roofline  # here, since it imports torch

    model = roofline.parse(cost_model)
    return 0 if model is None else model.memory_bytes


def budget_bytes(budget: Budget, ranks: Ranks, modelled_bytes: int) -> int | None:
    """A budget in bytes per device, before the step is known; None if it is a share of the plain peak.

    Args:
        budget: parsed.
        ranks: whose devices' free memory counts.
        modelled_bytes: free memory of a modelled device, which replaces that of ``ranks``; 0 for none.

    Raises:
        DeviceQueryFailed: the free memory could not be read.
    """
    if budget.kind == BYTES:
        return int(budget.value)
    if budget.kind not in (AUTO, SHARE_OF_FREE):
        return None
    free = modelled_bytes or smallest(query(ranks.kind, ranks.local)).free_bytes
    nbytes = resolve(budget, free, None, **({"reserve_bytes": 0} if ranks.kind == "cpu" else {}))
    return max(1, nbytes // _GRAIN_BYTES * _GRAIN_BYTES)


def given_bytes(budget: Budget) -> int:
    """The budget if it was given in bytes, else 0."""
    return int(budget.value) if budget.kind == BYTES else 0
