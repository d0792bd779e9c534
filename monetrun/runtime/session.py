"""One process's training under monetrun: notices the models, plans them as they are first called, and reports.

The script itself is unchanged. Optimizers name the parameters that are trained; each module that owns some of them gets
a trigger, and the first outermost training forward of such a module makes it a planned one.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from monetrun.capture import allocator_history, cpu_allocator, double_backward
from monetrun.core.imports import without_collection
from monetrun.core.log_lines import print_warnings
from monetrun.runtime import (
    candidates,
    evaluation_mode,
    hooks,
    probe,
    trial_checkpoints,
    unplannable_use,
    unplanned,
)
from monetrun.runtime.dynamo_settings import prepare_dynamo
from monetrun.runtime.passing_models import PassingModels
from monetrun.runtime.planned_calls import PlannedCall
from monetrun.runtime.reporter import Reporter
from monetrun.runtime.settings import MEASURE, PLAIN, PROBE, TRIALS, Settings
from monetrun.runtime.trigger import Nesting, Trigger, drop_triggers, is_one_call, left_alone
from monetrun.solve import timing

if TYPE_CHECKING:  # the engine imports the planner, too slow for ``import torch``
    from monetrun.core.plan import Plan
    from monetrun.runtime.engine import Engine

_session: Session | None = None
_launched = False  # by the launcher, whose budget holds in this process


def start(environ: Mapping[str, str], kind: Callable[[Settings], Session] | None = None) -> None:
    """Begin the session that the environment describes; called at the end of ``import torch``.

    Args:
        environ: as ``Settings.from_environment`` reads it.
        kind: makes the session; by default ``Session``.
    """
    global _session, _launched
    settings = Settings.from_environment(environ)
    if not settings.claim():
        from monetrun.runtime import children

        children.watch(settings)  # a child of the worker, such as a DataLoader's process
        return
    _launched = True
    print_warnings()
    from monetrun.runtime.traceback_file import install_excepthook

    install_excepthook(_out_of_memory)
    if settings.mode in TRIALS:
        from monetrun.runtime import silent_trackers, trial_files, trial_pipes, trial_renames, trial_sources

        silent_trackers.silence()
        trial_sources.watch()
        if settings.record_file:
            began_ns = trial_files.TrialFiles(settings.record_file).watch()
            trial_renames.watch(settings, began_ns)
            trial_pipes.watch(settings, began_ns)
    if settings.mode in (MEASURE, PLAIN):
        from monetrun.runtime.plain_run import PlainRun

        PlainRun(settings).watch_process()
        return
    _session = (kind or Session)(settings)
    _session.watch_process()


def _out_of_memory(error: BaseException) -> None:
    """An uncaught error says that memory ran out: tell who holds what, unless it does."""
    engine = None if _session is None else _session.engine
    if _session is None or engine is None or engine.running is None:
        return
    from monetrun.runtime import out_of_memory

    _session.short = out_of_memory.told(error, engine.running, engine.device, _session.reporter.note)


class Session:
    """The training of one process: its optimizers, its planned models, and the engine behind them.

    Args:
        settings: from the launcher, or from ``apply``.
        plan: to run; None: the engine loads the one that ``settings`` names, or plans after the first step.

    Attributes:
        planned: the planned call of each model, in the order of their first calls.
        engine: from the first training forward on.
        ended: plan and findings of an engine that is in use no more.
        reporter: of this rank.
        compilations: what the script has compiled itself.
        short: where memory has run out: how much was needed and held (``out_of_memory.findings``).
    """

    def __init__(self, settings: Settings, plan: Plan | None = None) -> None:
        self.settings, self.plan = settings, plan
        self.optimizers, self.stepped = unplanned.Optimizers(), unplanned.Optimizers()
        self.planned: list[PlannedCall] = []
        self._numbers = itertools.count()  # of models
        self._triggers: weakref.WeakSet[Trigger] = weakref.WeakSet()
        self._owners = candidates.Owners()
        self.engine: Engine | None = None
        self.reporter = Reporter(settings)
        self._as_is = unplannable_use.found_before(settings)
        self.compilations, self._backwards = unplannable_use.Compilations(), 0
        self.short: dict[str, Any] = {}
        self.ended: tuple[Plan | None, dict[str, Any]] = None, {}
        self._idle: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # have made a step before any backward
        self._late: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # make their first step long after others
        self._has_stepped: Callable[[], None] = lambda: None  # from now on a trial ends before a checkpoint
        self._nesting, self._passing = Nesting(), PassingModels()
        self._undo = contextlib.ExitStack()

    def watch_process(self) -> None:
        """Patch torch to notice optimizers and their steps, and count allocations from now on."""
        hooks.install(self, self._undo)
        self._undo.enter_context(timing.within(self.settings.solver_seconds))
        cpu_allocator.install()  # counting begins before the script allocates anything
        if self.settings.mode == PROBE:
            probe.prepare(self.settings, self._undo)
            self._has_stepped = trial_checkpoints.end_before(self._before_a_checkpoint, self._undo, self.settings)
        atexit.register(self.report)

    def close(self) -> None:
        """Restore what was patched, let models run plainly, and lift the allocation limit."""
        global _session
        self._undo.close()
        atexit.unregister(self.report)
        for call in _calls(self):
            call.close()
        if self.engine is not None:
            self.engine.close()
        if _session is self:
            _session = None

    def report(self) -> None:
        """Leave what this rank measured for the launcher."""
        found = self.ended[1] if self.engine is None else self.engine.findings()
        unsaid = unplanned.unsaid(self.engine, bool(self.reporter.warned), self.optimizers, self.stepped)
        self.reporter.write({**found, "short": self.short, "unplanned": unsaid})

    def trained_parameters(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, each once."""
        return list({id(p): p for o in self.optimizers for group in o.param_groups for p in group["params"]}.values())

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """Put triggers on the modules that own the optimizer's parameters, where there are none yet."""
        self.optimizers.add(optimizer)
        self.put_triggers([] if self._as_is else self._owners.trained_by(optimizer))

    def parameters_added(self, optimizer: Optimizer) -> None:
        """As ``optimizer_made``, once the optimizer is constructed."""
        if optimizer in self.optimizers:
            self.optimizer_made(optimizer)

    def zeroing_gradients(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script calls ``zero_grad``."""
        if self.engine is not None:
            self.engine.zeroing_gradients(parameters, set_to_none)

    def evaluates(self, module: nn.Module) -> None:
        """The script calls ``eval`` of a module."""
        if self.engine is not None and not {id(m) for m in module.modules()}.isdisjoint(map(id, self.models())):
            self.engine.evaluates()

    def backward_begins(self, roots: Iterable[Any], create_graph: bool) -> None:
        """The script differentiates ``roots``. A trial run ends with the second time if there is no optimizer."""
        if create_graph and self.planned and (calls := unplannable_use.compiled_calls(roots)):
            self.plan_no_more(calls, unplannable_use.OF_GRADIENTS)
        if self.engine is not None:
            self.engine.backward_begins(roots)
        self._backwards += 1
        if not self.stepped:
            _ends_without_steps(self)

    def backward_failed(self) -> None:
        """That has failed, and the script may go on."""
        if self.engine is not None:
            self.engine.backward_failed()

    def plan_no_more(self, calls: Sequence[Any], use: str) -> None:
        """These compiled calls run again for what the script makes of them; further ones do not."""
        if self.engine is not None:
            names = [planned.name for planned in self.planned]
            self.run_as_it_is(unplannable_use.models_run_as_they_are(names, use, self.settings, bool(self.stepped)))
        double_backward.run_again(calls)

    def run_as_it_is(self, reason: str) -> None:
        """All models run without a plan from now on, after one warning, and nothing is limited."""
        self._as_is = reason
        self.reporter.warn(reason)
        for call in _calls(self):
            call.close(as_planned=True)
        if self.engine is not None:
            self.engine.close()
            self.ended, self.engine = (self.engine.plan, self.engine.findings()), None

    def compiles(self, compiled: Any) -> None:
        """The script compiles a function or a module."""
        self.compilations.add(compiled)

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        if optimizer not in self.stepped and (reason := _called_compiled(self, optimizer)):
            self.reporter.give_up(reason)
        if self.engine is not None:
            self.engine.optimizer_begins(again=optimizer in self.stepped)
        elif self.settings.mode == PROBE and optimizer in self.stepped:
            unplannable_use.end_trial(self.settings)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """The closure of an optimizer's step has run."""
        if self.engine is not None:
            self.engine.optimizer_begins(again=False)

    def step_within_backward(self, optimizer: Optimizer, ended: bool) -> None:
        """See ``hooks.TrainingObserver``."""
        if self.engine is not None:
            self.engine.step_within_backward(type(optimizer).__name__, ended)

    def step_ended(self, optimizer: Optimizer) -> None:
        """It has ended, and with it a training step or a part of one."""
        if not self._backwards and self.engine is None and optimizer not in self._idle:
            self._idle.add(optimizer)  # no training step: loading a checkpoint makes one to allocate the state
            return
        self._has_stepped()
        if evaluation_mode.found(self._nesting, optimizer, self.reporter, self.engine):
            return
        _waits_for_others(self, optimizer)
        self.stepped.add(optimizer)
        if self.engine is None and not self.reporter.warned and (unseen := self.models()):
            self.reporter.give_up(unplannable_use.unseen(candidates.outermost_name(unseen), optimizer))
        all_stepped = (self.engine is None or self.engine.running is None) and _all_stepped(self)
        if self.engine is not None:
            self.engine.optimizer_ended(optimizer, all_stepped)
            self.reporter.write_now_and_then(self.engine.findings, settled=self.engine.meters.steps.settled)
            if all_stepped and self.engine.records_again():
                self.stepped.clear()
        elif self.settings.mode == PROBE and all_stepped:
            unplannable_use.end_trial(self.settings)

    def _before_a_checkpoint(self) -> None:
        from monetrun.runtime import second_step

        second_step.end_before_a_checkpoint(None if self.engine is None else self.engine.recorder, self.settings)

    def models(self) -> list[nn.Module]:
        """The modules that are planned, or wait for their first training forward."""
        return _modules(_calls(self))

    def put_triggers(self, modules: Iterable[nn.Module]) -> None:
        """Wait for the first training forward of each of ``modules``; warn of those that cannot be planned."""
        if self._as_is:
            self.reporter.give_up(self._as_is)
            return
        for module, reason in candidates.judged(modules):
            if isinstance(module._compiled_call_impl, (Trigger, PlannedCall)):
                continue
            if reason is None and not isinstance(module, nn.parallel.DistributedDataParallel):
                self._triggers.add(Trigger(module, self._nesting, self._plan_module))
            elif reason:
                self.reporter.give_up(f"{type(module).__name__} runs without a plan: {reason}")

    def _plan_module(self, module: nn.Module) -> Callable[..., Any]:
        """``module`` is the model, or one of several: from now on its training forwards are planned."""
        drop_triggers(module, only=is_one_call)  # the script may call others that are in it, too
        if (reason := _why_left_alone(self, module)) or self.engine is None:
            self.reporter.give_up(f"{type(module).__name__} runs without a plan: {reason}")
            return left_alone(module)
        if not _launched:  # applied under another budget, and only now known to be trained under this one
            self.optimizers.update(hooks.optimizers_of(module))
        path = f"{next(self._numbers)}:{type(module).__name__}"
        planned = PlannedCall(module, self._nesting, self.engine, self.reporter, path, abandon=self.run_as_it_is)
        self.planned.append(planned)
        module._compiled_call_impl = planned  # type: ignore[assignment]
        return self.engine.comparison.of_first_call(planned) if self.settings.mode == PROBE else planned


def _why_left_alone(session: Session, module: nn.Module) -> str:
    """Why a model that is called in training is not planned; empty: it is, and the session has an engine for it."""
    if reason := candidates.of_another_kind(module):
        return reason
    session.engine = session.engine or _engine(session, module)
    before, session.planned = len(session.planned), [call for call in session.planned if call.module() is not None]
    return session._passing.reason((before - len(session.planned)) * _launched, session.engine.meters.steps.steps)


def _engine(session: Session, module: nn.Module) -> Engine:
    """For the process's first model that is called in training."""
    with without_collection():
        from monetrun.runtime import breaks
        from monetrun.runtime.engine import Engine
    if session.settings.mode == PROBE:
        probe.begin(session.settings.record_file)
    prepare_dynamo([PlannedCall.__call__.__code__, *hooks.codes_that_observe_gradients()], session._undo)
    breaks.quiet_failures(session._undo)
    device = candidates.device_of_parameters(session.trained_parameters() or module.parameters())
    allocator_history.graphs_run_on_the_current_stream(device)
    return Engine(session.settings, device, session.trained_parameters, session.reporter, session.plan)


def _ends_without_steps(session: Session) -> None:
    """A backward begins before the first step: a trial, or what is recorded, ends once no step can be expected."""
    if session.settings.mode == PROBE:
        probe.leave_without_steps(session._backwards, bool(session.optimizers), session.settings.record_file)
    elif session.engine is not None and session.engine.waits_in_vain(session._backwards):
        session.run_as_it_is(unplannable_use.no_step_comes(session.settings))


def _waits_for_others(session: Session, optimizer: Optimizer) -> None:
    """An optimizer's step has ended: where it makes several before others' first one, those are not waited for."""
    engine = session.engine
    if engine is None or engine.recorder is None or optimizer not in session.stepped or _all_stepped(session):
        return
    if engine.waits_for_others():
        session._late.update(one for one in session.optimizers if one not in session.stepped)


def _all_stepped(session: Session) -> bool:
    return hooks.all_trained(session.optimizers - session._late, session.stepped)


def _called_compiled(session: Session, optimizer: Optimizer) -> str:
    return candidates.called_compiled(optimizer, session.compilations, _modules(session.planned))


def _modules(calls: Iterable[PlannedCall | Trigger]) -> list[nn.Module]:
    return [module for call in calls if (module := call.module()) is not None]


def _calls(session: Session) -> list[PlannedCall | Trigger]:  # what stands on modules
    return [*session.planned, *session._triggers]
