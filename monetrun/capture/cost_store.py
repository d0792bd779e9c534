"""Measured costs of operators in the store, where later runs and other ranks find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from monetrun.capture import cost, kernel_settings
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import Meter
from monetrun.machine.store import Store, key

_KIND = "costs"


def load(store: Store | None, device: torch.device) -> dict[str, OperatorCost]:
    """All costs that were measured on such a device, by the operators' signatures."""
    return {} if store is None else store.get_mapping(_KIND, _key(device), OperatorCost)


def measure(
    joints: Sequence[JointGraph],
    known: Mapping[str, OperatorCost],
    meter: Meter,
    device: torch.device,
    store: Store | None,
) -> dict[str, OperatorCost]:
    """Measure the operators of ``joints`` that are not in ``known``, and add them to the store.

    Returns:
        All costs that are known now. Where several ranks measure the same operator, all get the first one's numbers.
    """
    new: dict[str, OperatorCost] = {}
    for joint in joints:
        new.update(cost.measure(joint, {**known, **new}, meter, device))
    if new and device.type == "cuda":
        torch.cuda.empty_cache()  # what the measurement took beyond what training takes
    found = {**known, **new}
    return found if store is None else {**found, **store.update(_KIND, _key(device), new, OperatorCost)}


def device_name(device: torch.device) -> str:
    """``"cpu"``, or the GPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _key(device: torch.device) -> str:
    """Device, torch, and how many threads compute; on CUDA also cuDNN, and the settings that decide kernels."""
    parts: list[Any] = [device_name(device), torch.__version__, torch.get_num_threads()]
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count  # fewer in a part of a GPU
        parts += [torch.backends.cudnn.version(), multiprocessors, kernel_settings.of_cuda()]
    return key(*parts)
