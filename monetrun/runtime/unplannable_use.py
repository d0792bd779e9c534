"""Uses of a model that cannot be planned.

Gradients of gradients, hooks that take what autograd saves, and calls within what the script compiles itself.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import Optimizer

from monetrun.capture.gradient_terms import nodes_behind
from monetrun.core.errors import CaptureFailed
from monetrun.runtime import probe
from monetrun.runtime.settings import AS_IS_MARK, PROBE, Settings

_COMPILED_CALLS_LACK_IT = ", which torch's compiled models do not have"
OF_GRADIENTS = f"takes gradients of gradients (create_graph=True){_COMPILED_CALLS_LACK_IT}"
OF_OUTPUTS = (
    "watches the gradient of an output on which another output depends (register_hook, retain_grad)"
    f"{_COMPILED_CALLS_LACK_IT}"
)
IN_CUDA_GRAPHS = "captures CUDA graphs, which have memory of their own"
# How torch names the backward of what AOTAutograd has compiled in an autograd graph.
_COMPILED = "CompiledFunctionBackward"


def found_before(settings: Settings) -> str:
    """Why the models of this launch run as they are: found by the trial run, or by a worker that ended for it."""
    if settings.as_is or not settings.report_folder:
        return settings.as_is
    try:
        return (Path(settings.report_folder) / AS_IS_MARK).read_text()
    except OSError:
        return ""


def compiled_calls(roots: Iterable[Any]) -> list[Any]:
    """The autograd nodes of compiled calls that the backward of ``roots`` (tensors) runs."""
    return [node for node in nodes_behind(roots) if node.name() == _COMPILED]


def models_run_as_they_are(names: Sequence[str], use: str, settings: Settings, has_stepped: bool) -> str:
    """The script makes a ``use`` of planned models for which there is no plan.

    A trial run ends with the reason. A worker ends too, if nothing has been trained yet: the launch starts anew, and
    runs the models as they are. Later, and without a launcher, they run as they are from then on.

    Args:
        names: of the models.
        use: what the script does.
        settings: of the process.
        has_stepped: an optimizer has made a step.

    Returns:
        Why the models run as they are from now on.

    Raises:
        CaptureFailed: with ``strict``.
    """
    models = ", ".join(dict.fromkeys(names))
    reason = f"{models} runs without a plan: the script {use}"
    _end_trial_or_strict_run(reason, settings)
    if has_stepped or not settings.report_folder:
        differs = "" if use == IN_CUDA_GRAPHS else " (this step's gradients may differ by rounding)"
        return f"{models} runs without a plan from now on: the script {use}{differs}"
    part = Path(settings.report_folder) / f"{AS_IS_MARK}.{os.getpid()}"
    part.write_text(reason)
    part.replace(part.with_name(AS_IS_MARK))
    for child in multiprocessing.active_children():
        child.terminate()
    probe.leave(None, "")


def unseen(name: str, optimizer: Optimizer) -> str:
    """Why models of this name are not planned: an optimizer has stepped, and none was called as planned ones are."""
    return (
        f"nothing is planned: {name} has made no training forward before {type(optimizer).__name__}'s step"
        " (planned are calls in training mode with gradients enabled, outside torch.func's transforms and of what the"
        " script compiles or traces)"
    )


def no_step(optimizers: bool, stepped: bool) -> str:
    """Why nothing was planned, and no warning has said it: whether there are optimizers, and any has stepped."""
    if stepped:
        return "the optimizers train no parameters of a module, but other tensors, such as a picture"
    return f"no optimizer of torch.optim {'has made a step' if optimizers else 'was made'}"


def no_step_comes(settings: Settings) -> str:
    """Why models run as they are from now on, of which a step is recorded that does not end.

    Raises:
        CaptureFailed: with ``strict``.
    """
    reason = f"models run without a plan, their budget is not enforced: {probe.NO_STEP}"
    _end_trial_or_strict_run(reason, settings)
    return reason


def end_trial(settings: Settings) -> None:
    """End a trial run in which no model could be planned; the run itself warns why."""
    from monetrun.core.step import StepRecord  # not needed where models are planned

    probe.leave(StepRecord((), (), (), 0, {}, "", torch.__version__), settings.record_file)


def _end_trial_or_strict_run(reason: str, settings: Settings) -> None:
    """A trial run ends with the reason why models run as they are; with ``strict`` a run ends, too.

    Raises:
        CaptureFailed: with ``strict``.
    """
    if settings.mode == PROBE:
        probe.leave_unseen(reason, settings.record_file, as_is=True)
    if settings.strict:
        raise CaptureFailed(reason, "without --strict it runs as it is, outside the plan")


def hooks_take_saved_tensors() -> bool:
    """Whether the script's own hooks (``torch.autograd.graph.saved_tensors_hooks``) take what a forward saves now.

    What lies where, then, only they know. Those of a checkpointed region are torch's.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint"


def of_call(name: str, given: Iterable[Any], settings: Settings) -> str:
    """Why the model ``name`` cannot be planned where it is called with ``given``. A trial ends with the reason.

    The script's hooks take what it saves (see ``hooks_take_saved_tensors``), or it is given tensors of a class of the
    script's own, which torch cannot capture.

    Returns:
        Why the models run as they are from now on; empty: they need not.

    Raises:
        CaptureFailed: with ``strict``.
    """
    if hooks_take_saved_tensors():
        why = "the script's hooks take what autograd saves"
        why += " (torch.autograd.graph.saved_tensors_hooks, as save_on_cpu does)"
    elif kinds := [type(value).__name__ for value in given if isinstance(value, torch.Tensor) and _is_special(value)]:
        why = f"it is given a {kinds[0]}, a subclass of torch.Tensor that torch does not capture"
    else:
        return ""
    reason = f"{name} runs without a plan, its budget is not enforced: {why}"
    _end_trial_or_strict_run(reason, settings)
    return reason


def _is_special(tensor: torch.Tensor) -> bool:
    if type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer):
        return False
    return not isinstance(tensor, FakeTensor) and not hasattr(tensor, "__tensor_flatten__")  # of wrappers (DTensor)


class Compilations:
    """What the script has compiled itself (``torch.compile``): a model that it calls there is not seen here."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def add(self, compiled: Any) -> None:
        """The script compiles a function or a module."""
        of = compiled if isinstance(compiled, nn.Module) else getattr(compiled, "__self__", None)
        name = type(of).__name__ if isinstance(of, nn.Module) else getattr(compiled, "__qualname__", repr(compiled))
        self._names.append(name)

    def reason(self, trained: Iterable[torch.Tensor], planned: Iterable[nn.Module]) -> str:
        """Why none of the parameters that have gradients is a planned model's; empty if one is, or has no reason.

        Args:
            trained: an optimizer's parameters.
            planned: the planned models.
        """
        if not self._names:
            return ""
        own = {id(p) for module in planned for p in module.parameters()}
        with_gradients = [p for p in trained if p.grad is not None]
        if not with_gradients or any(id(p) in own for p in with_gradients):
            return ""
        return f"called within what the script compiles itself (torch.compile of {', '.join(self._names)})"
