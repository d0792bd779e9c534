"""What torch's CUDA caching allocator was asked for between two moments, and what lies in its segments.

Uses the history that ``torch.cuda.memory._record_memory_history`` keeps, without stack traces.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from monetrun.capture import device_peaks
from monetrun.core.allocator_settings import (
    NO_CACHING,
    SMALL_SEGMENT,
    AllocatorSettings,
    parse_settings,
    settings_text,
)
from monetrun.core.patched import patched
from monetrun.core.plain_heap import calls_blas
from monetrun.core.step import Segment

T = TypeVar("T")

_ALLOC, _FREE = "alloc", "free_completed"
# Of segments; those of expandable ones are mapped page by page.
_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
# convolutions call cuBLAS where cuDNN is not used
_CONVOLUTIONS = {"convolution", "conv1d", "conv2d", "conv3d"}


# The stream on which graphs run; None: the default one.
_stream: torch.cuda.Stream | None = None


def graphs_run_on_the_current_stream(device: torch.device) -> None:
    """Graphs run where the script calls its model: from now on what is requested on this stream is theirs."""
    global _stream
    current = torch.cuda.current_stream(device) if device.type == "cuda" and torch.cuda.is_initialized() else None
    _stream = None if current is None or current == torch.cuda.default_stream(device) else current


def stream_of_graphs(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which graphs run on ``device``; None where it has no streams."""
    if device.type != "cuda":
        return None
    return torch.cuda.default_stream(device) if _stream is None else _stream


def _stream_number() -> int:
    return 0 if _stream is None else int(_stream.cuda_stream)


def present_settings() -> AllocatorSettings:
    """The allocator's settings, as torch reads them from the environment; once CUDA is in use, as they are.

    Asked earlier, torch would read them then, and pass over what the script sets before its first CUDA tensor.
    """
    read: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # in torch 2.11 none
    if torch.cuda.is_initialized() and read is not None:
        text = read()
        if "expandable_segments" not in text:  # of settings that are changed this one stays as it was
            return replace(parse_settings(text), expandable=parse_settings(settings_text()).expandable)
        return parse_settings(text)
    return parse_settings(settings_text())


def other_allocator(device: torch.device) -> str:
    """The name of the allocator of ``device``, where it is none of which this module can know anything; else empty."""
    if device.type != "cuda":
        return ""
    if NO_CACHING in os.environ:
        return f"of {NO_CACHING}"
    name = torch.cuda.memory.get_allocator_backend()
    return "" if name == "native" else name


def segments(device: torch.device) -> tuple[Segment, ...]:
    """All blocks on the stream of the graphs, by address."""
    result = []
    ends: dict[bool, int] = {}  # of what lies before, in expandable segments, small or large
    for segment in sorted(_snapshot(device)["segments"], key=lambda s: int(s["address"])):
        if not _is_of_graphs(segment):
            continue
        small, start = segment["segment_type"] == "small", int(segment["address"])
        gap = start - ends.setdefault(small, start) if segment.get("is_expandable") else 0
        sizes = [b["size"] if b["state"] == "active_allocated" else -b["size"] for b in segment["blocks"]]
        if all(n < 0 for n in sizes):
            continue
        ends[small] = start + segment["total_size"]
        result.append(Segment(small, tuple(sizes), gap))
    return tuple(result)


def blocks(device: torch.device) -> dict[int, int]:
    """Bytes of all blocks in use on the stream of the graphs, by address."""
    return {
        block["address"]: block["size"]
        for segment in _snapshot(device)["segments"]
        if _is_of_graphs(segment)
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


def large_blocks(device: torch.device) -> frozenset[tuple[int, int, str]]:
    """Where blocks of more than 1 MiB lie, on all streams: address, bytes and state; none of another allocator."""
    if other_allocator(device):
        return frozenset()
    large = (s for s in _snapshot(device)["segments"] if s["segment_type"] == "large")
    return frozenset((b["address"], b["size"], b["state"]) for s in large for b in s["blocks"])


def _is_of_graphs(segment: Mapping[str, Any]) -> bool:
    """Whether it is of the stream, and of the pool, in which graphs run."""
    return segment["stream"] == _stream_number() and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)


def _snapshot(device: torch.device) -> dict[str, Any]:
    index = device_peaks.index_of(device)
    snapshot = torch.cuda.memory._snapshot(device)
    ours = [s for s in snapshot["segments"] if s["device"] == index]
    return {"segments": ours, "trace": snapshot["device_traces"][index]}


class AllocatorHistory:
    """Cuts the requests on the stream of a device's graphs into pieces, and numbers them.

    Args:
        device: a CUDA device.

    Attributes:
        count: how many requests have a number.
        elsewhere_bytes: allocated on other streams in the latest piece, less what was freed there.
        batch_frees: which blocks of the batch the latest piece freed, and how many of its entries come before.
        other_frees: what it freed of requests in pieces that were left out: bytes, and how many of its entries come
            before.
        base_frees: what it freed of other blocks that were there before: the same.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._numbers: dict[int, int] = {}  # of requests that were not freed yet, by address
        self.count = 0
        self._skipped: set[int] = set()  # addresses of requests that were left out, and not freed yet
        self._batch: dict[int, int] = {}  # which block of the batch lies at an address
        self.elsewhere_bytes = 0
        self.batch_frees: list[tuple[int, int]] = []
        self.other_frees: list[tuple[int, int]] = []
        self.base_frees: list[tuple[int, int]] = []
        self._base: dict[int, int] = {}  # bytes of what was there before, by address, and was not freed yet
        self._reserved: Counter[int] = Counter()  # bytes, by stream
        self._most_reserved: Counter[int] = Counter()

    def start(self, batch: Iterable[int] = (), base: Mapping[int, int] | None = None) -> None:
        """Begin to record; ``batch``: addresses of the inputs that are there before, ``base``: bytes of all blocks."""
        self._batch = {address: i for i, address in enumerate(batch)}
        self._base = {address: n for address, n in (base or {}).items() if address not in self._batch}
        self._most_reserved.clear()
        self._look_at_streams()
        self._clear()

    def resume(self) -> None:
        """Record again; what was requested since ``stop`` and was not freed is not known."""
        self._look_at_streams()
        self._clear()

    def stop(self) -> None:
        """Record no more, for monetrun; a history that the script keeps goes on, without what it had so far."""
        _record(enabled=None)
        for args, kwargs in _scripted:
            _record(*args, **kwargs)

    def skip(self) -> tuple[int, ...]:
        """Leave out what was requested since the last piece ended; gives an empty piece."""
        self.elsewhere_bytes = 0
        for entry in self._entries():
            if entry["action"] == _ALLOC:
                self._skipped.add(entry["addr"])
            elif entry["action"] == _FREE:
                self._numbers.pop(entry["addr"], None)
                self._batch.pop(entry["addr"], None)
                self._base.pop(entry["addr"], None)
                self._skipped.discard(entry["addr"])
        self._clear()
        return ()

    def piece(self) -> tuple[int, ...]:
        """The requests since the last piece ended, as ``Event.requests``."""
        found: list[int] = []
        self.elsewhere_bytes, self.batch_frees, self.other_frees, self.base_frees = 0, [], [], []
        for entry in self._entries(every_stream=True):
            address = entry["addr"]
            if entry["stream"] != _stream_number():
                self.elsewhere_bytes += {_ALLOC: 1, _FREE: -1}.get(entry["action"], 0) * int(entry["size"])
            elif entry["action"] == _ALLOC:
                self.count += 1
                self._numbers[address] = self.count
                found.append(int(entry["size"]))
            elif entry["action"] == _FREE and address in self._numbers:
                found.append(-self._numbers.pop(address))
            elif entry["action"] == _FREE and address in self._batch:
                self.batch_frees.append((self._batch.pop(address), len(found)))
            elif entry["action"] == _FREE and address in self._skipped:
                self._skipped.remove(address)
                self.other_frees.append((int(entry["size"]), len(found)))
            elif entry["action"] == _FREE and address in self._base:
                self.base_frees.append((self._base.pop(address), len(found)))
        self._clear()
        return tuple(found)

    def other_streams_bytes(self) -> int:
        """The most reserved on each other stream than the graphs' since ``start``, and a small segment more on each.

        Collectives' small tensors come and go there outside of the recorded step, and are freed once the stream is
        done. What costs are measured with between two pieces may have what was cached given back: so not what is there
        in the end.
        """
        self._look_at_streams()
        elsewhere = [n for stream, n in self._most_reserved.items() if stream != _stream_number() and n]
        return sum(elsewhere) + SMALL_SEGMENT * len(elsewhere)

    def not_freed(self) -> dict[int, int]:
        """The numbers of requests that were not freed yet, by address."""
        return dict(self._numbers)

    def _entries(self, every_stream: bool = False) -> Iterable[dict[str, Any]]:
        """What was served and freed; other entries (an ``oom``) have no address."""
        trace = _snapshot(self.device)["trace"]
        for entry in trace:
            if sign := _SEGMENTS.get(entry["action"], 0):
                self._reserved[entry["stream"]] += sign * entry["size"]
                self._most_reserved |= self._reserved
        found = (e for e in trace if e["action"] in (_ALLOC, _FREE))
        return [e for e in found if every_stream or e["stream"] == _stream_number()]

    def _look_at_streams(self) -> None:
        self._reserved = Counter()
        for segment in _snapshot(self.device)["segments"]:
            self._reserved[segment["stream"]] += segment["total_size"]
        self._most_reserved |= self._reserved

    def _clear(self) -> None:
        _record(enabled="all", context=None, stacks="python", max_entries=1 << 40, clear_history=True)


def _record(*args: Any, **kwargs: Any) -> None:
    inspect.unwrap(torch.cuda.memory._record_memory_history)(*args, **kwargs)


# The script's own call of ``_record_memory_history``, if its history is on: arguments.
_scripted: list[tuple[tuple[Any, ...], dict[str, Any]]] = []


def keep_the_scripts(undo: contextlib.ExitStack) -> None:
    """Note from now on whether the script keeps the allocator's history, and how."""
    original = torch.cuda.memory._record_memory_history

    @functools.wraps(original)
    def observed(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        off = (args[0] if args else kwargs.get("enabled", "all")) in (None, False)
        _scripted[:] = [] if off else [(args, kwargs)]

    undo.enter_context(patched(torch.cuda.memory, "_record_memory_history", observed))


def requests_of(device: torch.device, call: Callable[[], T]) -> tuple[T, tuple[int, ...], dict[int, int]]:
    """Call, and see what it asks for on the stream of the graphs.

    Returns:
        What it gives; its requests, as ``Requests.sizes``; by address the numbers of those that are not freed. Nothing
        is seen while monetrun itself keeps torch's history of the allocator.
    """
    if not _scripted and torch._C._cuda_isHistoryEnabled():  # type: ignore[attr-defined, unused-ignore]
        return call(), (), {}
    history = AllocatorHistory(device)
    history.start()
    try:
        result = call()
        return result, history.piece(), history.not_freed()
    finally:
        history.stop()


def use_library_workspaces(targets: Iterable[str]) -> bool:
    """Whether operators with these targets multiply matrices in cuBLAS, or may."""
    others = set() if torch.backends.cudnn.enabled else _CONVOLUTIONS
    return any(calls_blas(target, others) for target in targets)


def warm_up_libraries(device: torch.device) -> None:
    """Have cuBLAS take the workspaces that it keeps for the present thread and for autograd's, before anything else.

    It keeps them for each stream: those of the one on which graphs run are taken, also where a model is called on
    another.
    """
    grad = inspect.unwrap(torch.autograd.grad)  # the script's calls of it are counted
    with torch.cuda.stream(stream_of_graphs(device)), torch.enable_grad(), torch.autocast("cuda", enabled=False):
        small = torch.zeros(16, 16, device=device, requires_grad=True)
        grad((small @ small).sum(), small)


def clear_library_workspaces(device: torch.device) -> int:
    """Free the workspaces that cuBLAS keeps for each thread and stream; gives their bytes.

    Not where the script has private pools: CUDA graphs have the workspaces' addresses in them.
    """
    if any(tuple(s.get("segment_pool_id", (0, 0))) != (0, 0) for s in _snapshot(device)["segments"]):
        return 0
    before = torch.cuda.memory_allocated(device)
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated(device)
