"""Has cuDNN search for a graph's kernels before its first planned step, where the script sets ``cudnn.benchmark``.

The search for each convolution takes as large a workspace as it gets; within a step that is little, so that it may find
slower kernels than those that were measured. After it torch gives all that it has cached back to the device, the pool
too. Each thread has its own findings: those of a backward are autograd's.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch

from monetrun.capture import operands
from monetrun.capture.joint import JointGraph
from monetrun.core.plan import Schedule, Step
from monetrun.ops import device_errors
from monetrun.ops.registry import Call

_log = logging.getLogger("monetrun")


def is_needed(device: torch.device) -> bool:
    """Whether cuDNN searches at the first call of each convolution."""
    return device.type == "cuda" and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def search(joint: JointGraph, schedule: Schedule, device: torch.device) -> None:
    """Call each convolution of the schedule once, on made-up operands, in the thread in which it will run.

    Calls that fail, such as for lack of memory now, are left to the step.

    Raises:
        RuntimeError: the device itself failed (see ``device_errors``): torch's own error.
    """
    forward, backward = (_convolutions(joint, steps) for steps in (schedule.forward, schedule.backward))
    _call_each(forward, device)
    if backward:
        _in_autograds_thread(device, lambda: _call_each(backward, device))


def _convolutions(joint: JointGraph, steps: Iterable[Step]) -> list[Call]:
    """Distinct calls, in their order."""
    signatures = dict.fromkeys(joint.signatures[step.operator][step.implementation] for step in steps)
    calls = (joint.timed[signature][0] for signature in signatures)
    return [call for call in calls if "conv" in str(call.target)]


def _call_each(calls: Iterable[Call], device: torch.device) -> None:
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        for call in calls:
            try:
                arguments, keywords = operands.make(call)
                call.target(*arguments, **keywords)
            except RuntimeError as error:
                if device_errors.is_sticky(error, partial(torch.cuda.synchronize, device)):
                    raise
                _log.debug("no search for the kernels of %s: %s", call.target, error)


def _in_autograds_thread(device: torch.device, work: Callable[[], None]) -> None:
    grad = inspect.unwrap(torch.autograd.grad)  # the script's calls of it are counted
    # AOTAutograd, which is tracing, has backward passes run in the present thread
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        leaf = torch.zeros(1, device=device, requires_grad=True)
        result = leaf * 1
        result.register_hook(lambda gradient: work())
        grad(result, leaf)
