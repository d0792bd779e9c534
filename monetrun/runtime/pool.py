"""Has CUDA's caching allocator hold the memory of a planned step before that begins."""

from __future__ import annotations

import torch

from monetrun.capture import device_peaks
from monetrun.capture.allocator_history import present_settings, stream_of_graphs, warm_up_libraries
from monetrun.core.allocator_settings import ROUND_LARGE, UNLIMITED
from monetrun.core.plan import Pool

_MIB = 1 << 20


def hold(device: torch.device, pool: Pool, libraries: bool, budget_bytes: int) -> None:
    """Reserve what ``pool`` says for the graphs' stream, so that a settled step needs nothing more from the driver.

    Where what is there already lies so that more than the budget would be reserved, less is: it is still reserved when
    it is needed, after others have given memory back.

    Args:
        device: a CUDA device.
        pool: of the plan.
        libraries: cuBLAS keeps workspaces; they are taken first, so that they lie beside the weights.
        budget_bytes: the most that is reserved together, unless more is in use.
    """
    if libraries:
        warm_up_libraries(device)
    torch.cuda.empty_cache()
    # a script that logs the most allocated does not see this
    with torch.cuda.stream(stream_of_graphs(device)), device_peaks.uncounted(device_peaks.index_of(device)):
        _reserve(device, pool, budget_bytes)


def _reserve(device: torch.device, pool: Pool, budget_bytes: int) -> None:
    settings = present_settings()
    page = settings.large_segment_bytes if settings.expandable else ROUND_LARGE
    held = []
    try:
        # with a limit on what is split, a large block would serve no smaller request
        splits = settings.expandable or settings.max_split_bytes == UNLIMITED
        large_bytes = pool.large_bytes - pool.other_streams_bytes if splits else 0
        while (missing := large_bytes - _reserved(device, "large_pool")) > 0:
            free = budget_bytes - _reserved(device, "all")
            missing = min(missing, free // page * page)
            if missing <= 0 or (not settings.expandable and settings.segment_bytes(missing) > free):
                break
            held.append(torch.empty(max(missing, 2 * _MIB), dtype=torch.uint8, device=device))
        while pool.small_bytes > _reserved(device, "small_pool") and budget_bytes > _reserved(device, "all"):
            held.append(torch.empty(_MIB, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError:
        pass  # what is missing may still be reserved when it is needed, after others have given memory back


def _reserved(device: torch.device, name: str) -> int:
    return int(torch.cuda.memory_stats(device)[f"reserved_bytes.{name}.current"])
