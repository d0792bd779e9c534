"""A planned step as a memory snapshot, which torch's own viewer opens (pytorch.org/memory_viz).

The step is replayed through the model of the caching allocator, so that the timeline has each tensor with the operator
that allocates it, before anything has run. The format is that of ``torch.cuda.memory._snapshot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monetrun.core.allocator_settings import AllocatorSettings
from monetrun.core.caching_allocator import CachingAllocator
from monetrun.core.graph import BACKWARD
from monetrun.core.plan import Schedule
from monetrun.core.replayed_blocks import load_base
from monetrun.core.requests import StepReplay
from monetrun.core.reserved import LEAST_STEPS
from monetrun.core.step import LAST_GRADIENTS, LAST_OUTPUTS, OUTSIDE, DeviceMemory, Event, Segment, StepRecord

_HELD = "held between steps"
_ADDRESS_SPACE = 1 << 42


def snapshot(record: StepRecord, schedules: Sequence[Schedule]) -> dict[str, Any]:
    """What torch's viewer shows of a settled step under ``schedules``.

    Args:
        record: of the step; where it is not of a CUDA device, addresses are those that CUDA's allocator would give.
        schedules: of its graphs.

    Raises:
        ScheduleError: a schedule is not valid for its graph.
    """
    names: list[str] = []
    if record.memory is None:
        held = {name: nbytes for name, nbytes in record.ledger.items() if nbytes and name != "gradients"}
        known = sum(held.values()) == record.base_bytes
        names, blocks = (list(held), tuple(held.values())) if known else ([], (record.base_bytes,))
        settings = AllocatorSettings(expandable=True)
        base = (Segment(False, blocks),) if record.base_bytes else ()
        memory = DeviceMemory(settings, settings, _ADDRESS_SPACE, base)
        record = replace(record, memory=memory, events=_with_requests(record))
    assert record.memory is not None
    traced = _Traced(record.memory.settings, record.memory.device_bytes)
    replayed = _Labelled(record, schedules, traced)
    loaded = load_base(record.memory, traced)
    for (address, nbytes), name in zip(loaded.items(), names or [_HELD] * len(loaded), strict=True):
        traced.held[address] = (nbytes, name)
    replayed.batch.find(loaded)
    for number in range(LEAST_STEPS):
        traced.begin()
        replayed.step(first=number == 0)
    return {
        "segments": [],
        "device_traces": [traced.entries],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""},
        "external_annotations": [],
    }


def _with_requests(record: StepRecord) -> tuple[Event, ...]:
    """The events of a step that no allocator recorded, with what the script requests between graphs.

    That is what the next backward releases (tangents), the rest of what it leaves, and what it frees at once.
    """
    events, made = list(record.events), 0
    for i, event in enumerate(events):
        left = event.delta_bytes
        if event.kind != OUTSIDE or left <= 0 or event.name in (LAST_GRADIENTS, LAST_OUTPUTS):
            continue
        requests = []
        for backward in [e for e in events[i:] if e.kind == BACKWARD][:1]:
            for tensor in (record.graphs[backward.graph].tensors[t] for t in backward.released):
                if tensor.external and 0 < tensor.nbytes <= left:
                    requests.append(tensor.nbytes)
                    left -= tensor.nbytes
        requests += [left] if left else []
        temporary = event.peak_bytes - event.delta_bytes
        made += len(requests) + (temporary > 0)
        events[i] = replace(event, requests=(*requests, *((temporary, -made) if temporary > 0 else ())))
    return tuple(events)


class _Traced(CachingAllocator):
    """Keeps what it is asked for.

    Attributes:
        label: who asks.
        held: by address: bytes, and who asked for them.
        entries: of the snapshot's trace, since ``begin``.
    """

    def __init__(self, settings: AllocatorSettings, device_bytes: int) -> None:
        super().__init__(settings, device_bytes)
        self.label = _HELD
        self.held: dict[int, tuple[int, str]] = {}
        self.entries: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Start a new trace with what is held now."""
        self.entries = []
        for address, (nbytes, label) in self.held.items():
            self._note("alloc", address, nbytes, label)

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """See ``CachingAllocator``."""
        address = super().allocate(nbytes, stream)
        if address:
            self.held[address] = (nbytes, self.label)
            self._note("alloc", address, nbytes, self.label)
        return address

    def free(self, address: int) -> None:
        """See ``CachingAllocator``."""
        super().free(address)
        if address in self.held:
            nbytes, label = self.held.pop(address)
            self._note("free_requested", address, nbytes, label)
            self._note("free_completed", address, nbytes, label)

    def _note(self, action: str, address: int, nbytes: int, label: str) -> None:
        frames = [{"filename": "", "line": 0, "name": label}]
        entry = {"action": action, "addr": address, "size": nbytes, "stream": 0, "frames": frames}
        self.entries.append({**entry, "time_us": len(self.entries)})


class _Labelled(StepReplay):
    """Tells the allocator who asks: an operator, or what the script does between graphs."""

    allocator: _Traced

    def _run(self, k: int, call: Any, i: int) -> None:
        graph, schedule = self.record.graphs[k], self.schedules[k]
        cut = len(schedule.forward)
        again = i >= cut and schedule.backward[i - cut].operator < graph.forward_count
        step = schedule.forward[i] if i < cut else schedule.backward[i - cut]
        op = graph.operators[step.operator]
        implementation = op.implementations[step.implementation].name
        by = "" if implementation == "default" else f" by {implementation}"
        self.allocator.label = f"{op.name} ({op.target}{by}{', run again' if again else ''})"
        super()._run(k, call, i)
        self.allocator.label = "the script"

    def _outside(self, event: Event, requests: int, first: bool) -> None:
        self.allocator.label = event.name or "the script"
        super()._outside(event, requests, first)
