"""``PoolReplay`` in the native core (``cuda_ops/large_pool.hpp``)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from monetrun.core.allocator_settings import LEAST_BLOCK
from monetrun.core.simulate import core
from monetrun.core.step import DeviceMemory
from monetrun.planning.large_requests import Event, Free, Place, Request, StepBegins
from monetrun.planning.pool_replay import Held, Served, begin

_LARGEST = (1 << 63) - 1
_REQUEST, _RELEASE, _STEP_BEGINS, _STEP_ENDS = range(4)


class NativePoolReplay:
    """As ``PoolReplay``; a context manager, because the native core owns its memory.

    Args:
        memory: of the device.
        traces: the steps' events, then those of variants.
        large_bytes: requests of a step that are at least so large are noted.
    """

    def __init__(self, memory: DeviceMemory, traces: Sequence[Sequence[Event]], large_bytes: int) -> None:
        library, reason = core()
        assert library is not None, reason
        self._library = library
        self._settings = memory.settings
        places = {event.place: None for event in traces[0] if isinstance(event, StepBegins)}
        self._places: list[Place] = list(places)
        pool, addresses = begin(memory)
        numbers: dict[int, int] = {number: i for i, number in enumerate(addresses)}
        flat = [_flat(events, numbers, {place: i for i, place in enumerate(self._places)}) for events in traces]
        at = {address: numbers[number] for number, address in addresses.items()}
        blocks = pool.blocks()
        starts, sizes = (array("q", column) for column in list(zip(*blocks, strict=True))[:2])
        states = array("b", [state for _, _, state in blocks])
        base = array("i", [at.get(start, -1) for start, _, _ in blocks])
        limits = memory.settings.max_split_bytes, memory.settings.max_rounding_bytes
        self._handle: int | None = library.monet_pool_new(
            *(memory.settings.large_segment_bytes, LEAST_BLOCK, *(min(n, _LARGEST) for n in limits)),
            *(len(blocks), *map(_pointer, (starts, sizes, states, base)), len(numbers), large_bytes),
        )
        for kinds, requests, nbytes in flat:
            library.monet_pool_trace(self._handle, len(kinds), *map(_pointer, (kinds, requests, nbytes)))
        self._fitting = array("q", bytes(8 * (len(blocks) + max(map(len, traces)))))  # there are no more blocks

    def __enter__(self) -> NativePoolReplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.monet_pool_free(self._handle)
        self._handle = None

    def replay(self, holds: Held) -> tuple[int, int]:
        """Replay the steps; gives what is reserved in the end, and the most that is allocated."""
        starts, held = self._held(holds)
        allocated = ctypes.c_int64()
        reserved = self._library.monet_pool_replay(
            self._handle, _pointer(starts), _pointer(held), ctypes.byref(allocated)
        )
        return reserved, allocated.value

    def most_of_variants(self, holds: Held, most: int) -> int:
        """The most that a variant reserves; where one reserves more than ``most``, what it does."""
        starts, held = self._held(holds)
        return int(self._library.monet_pool_most_of_variants(self._handle, _pointer(starts), _pointer(held), most))

    def keep(self) -> None:
        """Have ``count`` and ``served`` tell of the latest ``replay``."""
        self._library.monet_pool_keep(self._handle)

    def count(self, *, in_the_way: bool) -> int:
        """How many large requests were served; or, of them, how many were alive when more was reserved last."""
        return int(self._library.monet_pool_count(self._handle, in_the_way))

    def served(self, i: int, *, in_the_way: bool) -> Served:
        """One of these."""
        place, nbytes = ctypes.c_int32(), ctypes.c_int64()
        count = self._library.monet_pool_served(
            *(self._handle, in_the_way, i, ctypes.byref(place), ctypes.byref(nbytes)),
            *(len(self._fitting), _pointer(self._fitting)),
        )
        return Served(self._places[place.value], nbytes.value, self._fitting[:count])

    def _held(self, holds: Held) -> tuple[array[int], array[int]]:
        starts, held = array("i", [0]), array("q")
        for place in self._places:
            held.extend(map(self._settings.rounded, holds.get(place, ())))
            starts.append(len(held))
        return starts, held


def _pointer(values: array[int]) -> int:
    return values.buffer_info()[0]


def _flat(
    events: Sequence[Event], numbers: dict[int, int], places: dict[Place, int]
) -> tuple[array[int], array[int], array[int]]:
    """Kinds, numbers and bytes of the events; new requests are added to ``numbers``."""
    kinds, found, sizes = array("b"), array("i"), array("q")
    for event in events:
        if isinstance(event, Request):
            entry = (_REQUEST, numbers.setdefault(event.number, len(numbers)), event.nbytes)
        elif isinstance(event, Free):
            entry = (_RELEASE, numbers.setdefault(event.request, len(numbers)), 0)
        elif isinstance(event, StepBegins):
            entry = (_STEP_BEGINS, places[event.place], 0)
        else:
            entry = (_STEP_ENDS, -1, 0)
        for column, value in zip((kinds, found, sizes), entry, strict=True):
            column.append(value)
    return kinds, found, sizes
