"""Records what decides how much CUDA's caching allocator reserves for a step (``DeviceMemory``)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from monetrun.capture import allocator_history
from monetrun.capture.allocator_history import AllocatorHistory
from monetrun.capture.joint import JointGraph
from monetrun.capture.storages import block_bytes
from monetrun.core.allocator_settings import MOST_SMALL, AllocatorSettings
from monetrun.core.graph import Tensor
from monetrun.core.plan import Schedule
from monetrun.core.step import BETWEEN_STEPS, OUTSIDE, DeviceMemory, Event, Segment

# What a script has at once, at most, while it makes the next batch: so many times the inputs.
_MOST_OF_BATCH = 4
# Each process has cuDNN search for algorithms (``cudnn.benchmark``), and may find others than were recorded: pages that
# are reserved for the workspaces of the search, and of what it finds.
_SEARCH_PAGES = 2


class DeviceRecorder:
    """Of one step.

    Args:
        device: a CUDA device.
        plain_settings: of the allocator in the plain run; None: the present ones.
    """

    def __init__(self, device: torch.device, plain_settings: AllocatorSettings | None) -> None:
        self.device = device
        self._plain_settings = plain_settings
        self._history = AllocatorHistory(device)
        self._requests: list[tuple[int, ...]] = []  # of each stretch; empty for calls of graphs
        self._base: tuple[Segment, ...] = ()
        self._places: list[int] = []  # addresses of its blocks
        self._stays: dict[bool, list[int]] = {True: [], False: []}  # by whether it is small
        self._batch: tuple[int, ...] = ()
        self._library_bytes = 0
        self._elsewhere: list[int] = []  # of each stretch
        self._batch_frees: list[list[tuple[int, int]]] = []  # of each stretch
        self._other_frees: list[list[tuple[int, int]]] = []  # of each stretch
        self._other_streams_bytes = 0
        self._between: Event | None = None
        self._begun_under: tuple[Schedule, ...] = ()

    def begin(self, joints: Sequence[JointGraph], joint: JointGraph, arguments: Sequence[Any]) -> None:
        """The step begins with the forward of ``joint``: from now on only the step itself allocates."""
        targets = {op.target for j in joints for op in j.graph.operators}
        self._begin(allocator_history.use_library_workspaces(targets), _transient(joint, arguments))

    def begin_before_graphs(self, arguments: Iterable[Any]) -> None:
        """The step begins with a model's call on ``arguments``; its graphs are not known yet."""
        self._begin(True, (value for value in arguments if isinstance(value, torch.Tensor)))

    def _begin(self, libraries: bool, batch: Iterable[torch.Tensor]) -> None:
        if libraries:
            allocator_history.warm_up_libraries(self.device)
        torch.cuda.empty_cache()
        self._base, there = allocator_history.segments(self.device), allocator_history.blocks(self.device)
        self._places = sorted(there)
        blocks = _blocks_of(batch)
        self._batch = tuple(blocks.values())
        self._history.start(blocks, there)

    def warm_up_again(self) -> None:
        """Another step begins after ``end``: libraries take what they keep before it, as before the recorded one."""
        if self._library_bytes:
            allocator_history.warm_up_libraries(self.device)

    def stretch_ended(self, kind: str) -> None:
        """A stretch of the step has ended."""
        self._requests.append(self._history.piece() if kind == OUTSIDE else self._history.skip())
        self._elsewhere.append(self._history.elsewhere_bytes)
        self._batch_frees.append(self._history.batch_frees if kind == OUTSIDE else [])
        self._other_frees.append(self._history.other_frees if kind == OUTSIDE else [])

    def seen_outside(self, stretch: int, dropped: Iterable[Tensor]) -> dict[str, Any]:
        """What the allocator saw in a stretch outside of graphs, as fields of its event.

        Args:
            stretch: its number.
            dropped: outputs, and inputs of the first call, that the script has dropped in it.
        """
        settings = allocator_history.present_settings()
        requests = self._requests[stretch]
        frees = [(settings.rounded(nbytes), place) for nbytes, place in self._other_frees[stretch]]
        places = []
        batch = [(self._batch[i], place) for i, place in self._batch_frees[stretch]]
        for tensor in dropped:
            among = batch if tensor.external else frees
            found = next((f for f in among if f[0] == settings.rounded(tensor.nbytes)), None)
            if found is not None:
                among.remove(found)
            places.append(len(requests) if found is None else found[1])
        return {
            "requests": requests,
            "elsewhere_bytes": self._elsewhere[stretch],
            "dropped_after": tuple(places),
            "batch_freed": tuple(self._batch_frees[stretch]),
            "freed": tuple(frees),
        }

    def stays(self, nbytes: int) -> None:
        """So much more stays allocated from a call of a graph on, as the state of an optimizer that a hook calls."""
        block_bytes = allocator_history.present_settings().rounded(nbytes)
        self._stays[nbytes <= MOST_SMALL].append(block_bytes)

    def resume(self) -> None:
        """What the script does after the recorded step is seen from now on."""
        self._history.resume()

    def seen_between_steps(self, begun_under: Iterable[Schedule] = ()) -> None:
        """The next step begins: what was seen since the recorded one is what the script does between steps.

        It is not where that is more than the next batch, and what else is replaced such as targets, takes (an
        evaluation, a checkpoint).

        Args:
            begun_under: schedules of the recorded step, where planned steps follow in this process.
        """
        self._begun_under = tuple(begun_under)
        before, requests = self._history.count, self._history.piece()
        settings = allocator_history.present_settings()
        replaced_bytes = sum(self._batch) + sum(nbytes for nbytes, _ in self._history.base_frees)
        if _highest_bytes(requests, before) > max(_MOST_OF_BATCH * replaced_bytes, settings.large_segment_bytes):
            return
        inputs = len(self._batch)
        replaced = [(inputs + k, place) for k, (_, place) in enumerate(self._history.base_frees)]
        self._batch += tuple(nbytes for nbytes, _ in self._history.base_frees)
        self._between = Event(
            OUTSIDE,
            name=BETWEEN_STEPS,
            requests=requests,
            batch_freed=(*self._history.batch_frees, *replaced),
            freed=tuple((settings.rounded(nbytes), place) for nbytes, place in self._history.other_frees),
        )

    def stop(self) -> None:
        """Nothing is recorded from now on."""
        self._history.stop()

    def end(self) -> int:
        """Nothing is recorded from now on; gives the bytes of the workspaces that cuBLAS keeps, and frees them."""
        self.stop()
        self._other_streams_bytes = self._history.other_streams_bytes()
        self._library_bytes = allocator_history.clear_library_workspaces(self.device)
        return self._library_bytes

    def memory(self, gradients: Container[int]) -> DeviceMemory:
        """What was recorded; ``gradients``: addresses of those of an earlier step that the recorded one freed."""
        settings = allocator_history.present_settings()
        return DeviceMemory(
            settings=settings,
            plain_settings=settings if self._plain_settings is None else self._plain_settings,
            device_bytes=torch.cuda.get_device_properties(self.device).total_memory,
            base=(*self._base, *(Segment(small, tuple(sizes)) for small, sizes in self._stays.items() if sizes)),
            library_bytes=self._library_bytes,
            batch=self._batch,
            excess_bytes=_SEARCH_PAGES * settings.large_segment_bytes if torch.backends.cudnn.benchmark else 0,
            other_streams_bytes=self._other_streams_bytes,
            gradients=tuple(i for i, place in enumerate(self._places) if place in gradients),
            between=self._between,
            begun_under=self._begun_under,
        )


def _transient(joint: JointGraph, arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The inputs that are neither parameters nor buffers."""
    for node, value in zip(joint.primals, arguments, strict=True):
        t = joint.storage.get(node) if isinstance(node, fx.Node) else None
        if t in joint.transient and isinstance(value, torch.Tensor):
            yield value


def _highest_bytes(requests: Iterable[int], before: int) -> int:
    """The most that these requests (``Event.requests``) have at once, the first ``before`` of the step left out."""
    held: dict[int, int] = {}
    present = highest = 0
    for n in requests:
        if n < 0:
            present -= held.pop(-n, 0)
        else:
            before += 1
            held[before] = n
            present += n
            highest = max(highest, present)
    return highest


def _blocks_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of those on a CUDA device by their address, each storage once."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            found[tensor.untyped_storage().data_ptr()] = block_bytes(tensor.untyped_storage())
    return found
