"""Random requests to torch's CUDA allocator and to its model, which must agree after each of them.

python allocator_traces.py TRACES REQUESTS    # on a GPU, or on a stand-in; prints JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys

import torch

from monetrun.core.allocator_settings import parse_settings
from monetrun.core.caching_allocator import AllocatorOutOfMemory, CachingAllocator

MIB = 1 << 20


def size(chance: random.Random) -> int:
    """A size between a byte and 128 MiB; often one where the allocator's rules change."""
    kind = chance.random()
    if kind < 0.5:
        return int(2 ** chance.uniform(0, 27))
    if kind < 0.7:
        return chance.randrange(1, 3 * MIB)
    return chance.choice([1, 512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB])


def state() -> tuple[int, int, int]:
    """Bytes allocated, bytes reserved, retries."""
    stats = torch.cuda.memory_stats(0)
    return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"], stats["num_alloc_retries"]


def run(seed: int, requests: int) -> tuple[str, int]:
    """One trace; gives what differs (nothing: empty), and the retries."""
    chance = random.Random(seed)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    cap = chance.choice([64, 200, 400, 1000]) * MIB + chance.randrange(MIB) if chance.random() < 0.7 else None
    torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else cap / total)
    retries = state()[2]
    model = CachingAllocator(
        parse_settings(os.environ.get("PYTORCH_ALLOC_CONF", "")),
        total,
        None if cap is None else int(cap / total * total),
    )
    held: list[tuple[torch.Tensor, int]] = []
    leaving, latest_first = chance.choice([0.3, 0.45]), chance.random() < 0.3
    for i in range(requests):
        if held and chance.random() < (0.5 if len(held) > 40 else leaving):
            tensor, address = held.pop(-1 if latest_first else chance.randrange(len(held)))
            del tensor
            model.free(address)
        elif chance.random() < 0.005:
            torch.cuda.empty_cache()
            model.empty_cache()
        else:
            nbytes = size(chance)
            tensor = address = None
            with contextlib.suppress(torch.OutOfMemoryError):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            with contextlib.suppress(AllocatorOutOfMemory):
                address = model.allocate(nbytes)
            if (tensor is None) != (address is None):
                return f"seed {seed}, request {i} of {nbytes} bytes: only one refuses", 0
            if tensor is not None:
                held.append((tensor, address))
            del tensor
        allocated, reserved, tried = state()
        modelled = (model.allocated_bytes, model.reserved_bytes, model.retries)
        if (allocated, reserved, tried - retries) != modelled:
            return f"seed {seed}, request {i}: {(allocated, reserved, tried - retries)}, the model has {modelled}", 0
    return "", model.retries


if __name__ == "__main__":
    traces, requests = map(int, sys.argv[1:3])
    torch.cuda.init()
    found = [run(seed, requests) for seed in range(traces)]
    print(
        json.dumps(
            {
                "torch": torch.__version__,
                "requests": traces * requests,
                "retries": sum(retries for _, retries in found),
                "differences": [text for text, _ in found if text],
            }
        )
    )
