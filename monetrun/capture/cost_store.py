"""Measured costs of operators in the store, where later runs and other ranks find them; and the names of cuDNN's plans.

To find the plans of one convolution worth a choice, dozens are built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from monetrun.capture import cost, kernel_settings
from monetrun.capture.cost import OperatorCost
from monetrun.capture.joint import JointGraph
from monetrun.capture.meter import Meter
from monetrun.machine.busy import OthersWork
from monetrun.machine.store import Store, key
from monetrun.ops import cudnn
from monetrun.ops.cudnn import PlanNames

_KIND, _PLANS = "costs", "cudnn"


def load(store: Store | None, device: torch.device) -> dict[str, OperatorCost]:
    """All costs that were measured on such a device, by the operators' signatures; cuDNN's plans are told."""
    if store is None:
        return {}
    if _has_plans(device):
        cudnn.tell(device, store.get_mapping(_PLANS, _plans_key(device), PlanNames))
    return store.get_mapping(_KIND, _key(device), OperatorCost)


def measure(
    joints: Sequence[JointGraph],
    known: Mapping[str, OperatorCost],
    meter: Meter,
    device: torch.device,
    store: Store | None,
    others: OthersWork | None = None,
) -> dict[str, OperatorCost]:
    """Measure the operators of ``joints`` that are not in ``known``, and add them to the store.

    Args:
        joints: graphs.
        known: costs by the operators' signatures.
        meter: of the device.
        device: where they are measured.
        store: where costs are kept.
        others: what other processes take of the processors meanwhile; None: that slows nothing.

    Returns:
        All costs that are known now. Where several ranks measure the same operator, all get the first one's numbers.
    """
    new: dict[str, OperatorCost] = {}
    for joint in joints:
        new.update(cost.measure(joint, {**known, **new}, meter, device))
    if new and others is not None and (share := others.share()):
        new = {signature: replace(c, others_share=share) for signature, c in new.items()}
    if new and device.type == "cuda":
        torch.cuda.empty_cache()  # what the measurement took beyond what training takes
    if store is not None and _has_plans(device) and (plans := cudnn.named(device)):
        store.update(_PLANS, _plans_key(device), plans, PlanNames)
    found = {**known, **new}
    # what was estimated, for lack of memory perhaps, is tried again in the next launch
    measured = {signature: c for signature, c in new.items() if c.measured}
    return found if store is None else {**found, **store.update(_KIND, _key(device), measured, OperatorCost)}


def _has_plans(device: torch.device) -> bool:
    return device.type == "cuda" and cudnn.unavailable_reason() is None


def _plans_key(device: torch.device) -> str:
    return key(device_name(device), _multiprocessors(device), torch.__version__, cudnn.version())


def _multiprocessors(device: torch.device) -> int:
    """Fewer in a part of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_name(device: torch.device) -> str:
    """``"cpu"``, or the GPU's model."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _key(device: torch.device) -> str:
    """Device, torch, how many threads compute, and the settings that decide kernels; on CUDA also cuDNN."""
    parts: list[Any] = [device_name(device), torch.__version__, torch.get_num_threads()]
    if device.type == "cuda":
        parts += [torch.backends.cudnn.version(), _multiprocessors(device), kernel_settings.of_cuda()]
    else:
        parts.append(kernel_settings.of_cpu())
    return key(*parts)
