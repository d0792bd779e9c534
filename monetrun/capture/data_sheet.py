"""The roofline of the GPU that is present, from what its driver says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from monetrun.capture import roofline
from monetrun.capture.roofline import Device


class Properties(Protocol):
    """What ``torch.cuda.get_device_properties`` gives; clocks in kHz, the bus in bits, 0 or 1 where not known."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int


@dataclass(frozen=True, slots=True)
class _PerCycle:
    """Flops (multiply and add are two) of one multiprocessor in one cycle, dense; 0: at fp32's rate."""

    fp32: int
    fp64: int
    fp16: int
    tf32: int
    bf16: int


# by compute capability: CUDA C++ programming guide, "Arithmetic instructions", and the architectures' white papers
# (tensor cores' rates with float32 accumulation; 7.5, 8.6, 8.9 and 12.0: as the data centre's boards of that chip)
_PER_CYCLE: dict[tuple[int, int], _PerCycle] = {
    (6, 0): _PerCycle(128, 64, 256, 0, 0),
    (6, 1): _PerCycle(256, 8, 0, 0, 0),
    (7, 0): _PerCycle(128, 64, 1024, 0, 0),
    (7, 5): _PerCycle(128, 4, 1024, 0, 0),
    (8, 0): _PerCycle(128, 64, 2048, 1024, 2048),
    (8, 6): _PerCycle(256, 4, 1024, 512, 1024),
    (8, 9): _PerCycle(256, 4, 1024, 512, 1024),
    (9, 0): _PerCycle(256, 128, 4096, 2048, 4096),
    (10, 0): _PerCycle(256, 128, 8192, 4096, 8192),
    (12, 0): _PerCycle(256, 4, 1024, 512, 1024),
}

# the data sheet that stands in for an architecture whose driver gives no clocks, and that board's multiprocessors
_STANDS_IN: Mapping[int, tuple[str, int]] = {6: ("p100", 56), 7: ("v100", 80), 8: ("a100", 108), 9: ("h100", 132)}
_LEAST_CLOCK_KHZ = 100_000  # lower figures are not clocks


def present(device: torch.device) -> Device:
    """The data sheet of a device of this machine: of no particular CPU, or of the GPU."""
    if device.type != "cuda":
        return roofline.DEVICES["cpu"]
    return of_gpu(torch.cuda.get_device_properties(device))


def of_gpu(properties: Properties) -> Device:
    """A GPU's peaks, from its clocks; from the data sheet of its name or its architecture where they are not known.

    A data sheet that stands in is scaled by the number of multiprocessors.
    """
    flops = _flops_per_second(properties)
    # two transfers in a cycle of the memory's clock
    bandwidth = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
    if flops and properties.memory_clock_rate >= _LEAST_CLOCK_KHZ and properties.memory_bus_width:
        return Device(
            properties.name,
            properties.total_memory,
            bandwidth,
            flops,
            frozenset({"tf32", "fp16", "bf16"}) if properties.major >= 7 else frozenset(),
            launch_seconds=5e-6,
            source="clocks and units as the driver gives them",
        )
    return _stand_in(properties)


def _flops_per_second(properties: Properties) -> dict[str, float]:
    """By kind; empty where the clock or the units are not known."""
    units = _PER_CYCLE.get((properties.major, properties.minor))
    if units is None or properties.clock_rate < _LEAST_CLOCK_KHZ:
        return {}
    cycles = 1e3 * properties.clock_rate * properties.multi_processor_count
    rates = {kind: getattr(units, kind) * cycles for kind in ("fp64", "fp32", "tf32", "fp16", "bf16")}
    return {kind: rate for kind, rate in rates.items() if rate}


def _stand_in(properties: Properties) -> Device:
    words = properties.name.lower().replace("-", " ").split()
    for sheet in roofline.DEVICES.values():
        if sheet.name in words:
            return replace(sheet, name=properties.name, memory_bytes=properties.total_memory)
    newest = max(_STANDS_IN)
    name, multiprocessors = _STANDS_IN[min(max(properties.major, min(_STANDS_IN)), newest)]
    sheet, share = roofline.DEVICES[name], properties.multi_processor_count / multiprocessors
    return replace(
        sheet,
        name=properties.name,
        memory_bytes=properties.total_memory,
        bytes_per_second=share * sheet.bytes_per_second,
        flops_per_second={kind: share * rate for kind, rate in sheet.flops_per_second.items()},
        source=f"{share:.2f} of: {sheet.source}",
    )
