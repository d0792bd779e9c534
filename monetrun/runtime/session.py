"""One process's training under monetrun: notices the models, plans them as they are first called, and reports.

The script itself is unchanged. Optimizers name the parameters that are trained; each module that owns some of them gets
a trigger, and the first outermost training forward of such a module makes it a planned one.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from monetrun.capture import cpu_allocator, fake_tensors, roofline
from monetrun.core.errors import CaptureFailed
from monetrun.runtime import candidates, hooks, planned_calls
from monetrun.runtime.planned_calls import Nesting, PlannedCall, Trigger
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.settings import MEASURE, PLAIN, PROBE, RUN, Settings
from monetrun.solve import timing

if TYPE_CHECKING:  # the engine imports the planner, too slow for ``import torch``
    from monetrun.core.plan import Plan
    from monetrun.runtime.engine import Engine

_session: Session | None = None


def start(environ: Mapping[str, str]) -> None:
    """Begin the session that the environment describes; called at the end of ``import torch``."""
    global _session
    settings = Settings.from_environment(environ)
    if not settings.claim():
        return  # a child of the worker, such as a DataLoader's process
    from monetrun.runtime.traceback_file import install_excepthook

    install_excepthook()
    if settings.mode in (MEASURE, PLAIN):
        from monetrun.runtime.plain_run import PlainRun

        PlainRun(settings).watch_process()
        return
    _session = Session(settings)
    _session.watch_process()


def apply(model: nn.Module, budget_or_plan: Any, **options: Any) -> nn.Module:
    """Train ``model`` under a budget from its next training forward on, in this process; gives ``model`` back.

    The first step runs on the schedules with the least peak, and is measured; from the second on the cheapest
    schedules within the budget run. Its ``state_dict``, type, deep copies and pickles are as before.

    Args:
        model: already on its device. What wraps it (DistributedDataParallel) may be put around it before or after.
        budget_or_plan: ``"12GiB"``, ``"0.6x"``, ... (``--budget``'s grammar), bytes as an int, or a ``Plan``.
        options: fields of ``Settings`` (``algorithm``, ``solver_seconds``, ``strict``, ...).

    Raises:
        BudgetSyntaxError: the budget is malformed.
        CaptureFailed: ``model`` is of a kind that cannot be planned.
    """
    from monetrun.core import budget
    from monetrun.core.plan import Plan

    global _session
    plan = budget_or_plan if isinstance(budget_or_plan, Plan) else None
    text = "" if plan is not None else str(budget_or_plan)
    if text:
        budget.parse(text)
    if reason := candidates.unplannable(model):
        raise CaptureFailed(f"{type(model).__name__} cannot be planned: {reason}")
    if _session is None:
        _session = Session(Settings(mode=RUN, budget=text or str(plan.budget_bytes if plan else ""), **options), plan)
        _session.watch_process()
    for optimizer in candidates.optimizers():
        _session.optimizer_made(optimizer)
    _session.put_triggers([model])
    return model


class Session:
    """The training of one process: its optimizers, its planned models, and the engine behind them.

    Args:
        settings: from the launcher, or from ``apply``.
        plan: to run; None: the engine loads the one that ``settings`` names, or plans after the first step.

    Attributes:
        planned: the planned call of each model, in the order of their first calls.
        engine: from the first training forward on.
        reporter: of this rank.
    """

    def __init__(self, settings: Settings, plan: Plan | None = None) -> None:
        self.settings = settings
        self.plan = plan
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.planned: list[PlannedCall] = []
        self.engine: Engine | None = None
        self.reporter = Reporter(settings)
        self._nesting = Nesting()
        self._undo = contextlib.ExitStack()

    def watch_process(self) -> None:
        """Patch torch to notice optimizers and their steps, and count allocations from now on."""
        hooks.install(self, self._undo)
        self._undo.enter_context(timing.within(self.settings.solver_seconds))
        cpu_allocator.install()  # counting begins before the script allocates anything
        if self.settings.mode == PROBE:
            from monetrun.runtime import probe

            probe.stand_in_for_the_other_ranks(self.settings.world_size)
            if self.settings.cost_model != roofline.MEASURED:
                fake_tensors.start(self._undo)
        atexit.register(self.report)

    def close(self) -> None:
        """Restore what was patched, let models run plainly, and lift the allocation limit."""
        global _session
        self._undo.close()
        atexit.unregister(self.report)
        for module in [p.module() for p in self.planned]:
            if module is not None:
                module._compiled_call_impl = None
        if self.engine is not None:
            self.engine.close()
        if _session is self:
            _session = None

    def report(self) -> None:
        """Leave what this rank measured for the launcher."""
        self.reporter.write({} if self.engine is None else self.engine.findings())

    def trained_parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, each once."""
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        return list({id(p): p for group in groups for p in group["params"]}.values())

    # ---- what the script's optimizers do (``hooks.TrainingObserver``)

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Put triggers on the modules that own the optimizer's parameters."""
        self.optimizers.add(optimizer)
        self.put_triggers(candidates.owners({id(p) for group in optimizer.param_groups for p in group["params"]}))

    def parameters_added(self, optimizer: Optimizer) -> None:
        """As ``optimizer_made``, once the optimizer is constructed."""
        if optimizer in self.optimizers:
            self.optimizer_made(optimizer)

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``."""
        if self.engine is not None:
            self.engine.zeroing_gradients(parameters, set_to_none)

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        if self.engine is not None:
            self.engine.optimizer_begins(again=optimizer in self.stepped)
        elif self.settings.mode == PROBE and optimizer in self.stepped:
            self._end_unplanned_trial()

    def step_ended(self, optimizer: Optimizer) -> None:
        """It has ended, and with it a training step or a part of one."""
        self.stepped.add(optimizer)
        all_stepped = all(o in self.stepped for o in self.optimizers)
        if self.engine is not None:
            self.engine.optimizer_ended(type(optimizer).__name__, all_stepped)
        elif self.settings.mode == PROBE and all_stepped:
            self._end_unplanned_trial()

    def _end_unplanned_trial(self) -> None:
        """End a trial run in which no model could be planned; the run itself warns why."""
        from monetrun.core.step import StepRecord
        from monetrun.runtime import probe

        probe.leave(StepRecord((), (), (), 0, {}, "", torch.__version__), self.settings.record_file)

    # ---- models

    def put_triggers(self, modules: Iterable[nn.Module]) -> None:
        """Wait for the first training forward of each of ``modules``; warn of those that cannot be planned."""
        for module in modules:
            if isinstance(module._compiled_call_impl, Trigger):
                continue
            if any(module is p.module() for p in self.planned):
                continue
            reason = candidates.unplannable(module)
            if reason is None and not isinstance(module, nn.parallel.DistributedDataParallel):
                module._compiled_call_impl = Trigger(module, self._nesting, self._plan_module)  # type: ignore[assignment]
            elif reason:
                self.reporter.give_up(f"{type(module).__name__} runs without a plan: {reason}")

    def _plan_module(self, module: nn.Module) -> PlannedCall:
        """``module`` is the model, or one of several: from now on its training forwards are planned."""
        for child in module.modules():
            if isinstance(child._compiled_call_impl, Trigger):
                child._compiled_call_impl = None
        if self.engine is None:
            from monetrun.runtime.engine import Engine

            planned_calls.prepare_dynamo()
            device = candidates.device_of(module)
            self.engine = Engine(self.settings, device, self.trained_parameters, self.reporter.warn, self.plan)
        planned = PlannedCall(module, self._nesting, self.engine, self.reporter.give_up)
        self.planned.append(planned)
        module._compiled_call_impl = planned  # type: ignore[assignment]
        return planned
