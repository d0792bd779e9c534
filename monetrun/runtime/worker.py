"""Inside the user's process: notice the model, compile it to its schedules, keep the budget, and report.

Nothing of the script is changed. ``Optimizer.__init__`` tells which parameters are trained; the modules that own them
get a trigger in the attribute that ``nn.Module.compile`` uses, which is no part of their state: a deep copy or a saved
model comes out plain. The first outermost call of such a module in training decides: it is compiled as it is called.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from monetrun.capture import cpu_allocator, fake_tensors, roofline
from monetrun.core.errors import CaptureFailed, GuardFailed, MonetrunError
from monetrun.runtime.settings import PROBE, RUN, Settings

_log = logging.getLogger("monetrun")

# Each shape that a script feeds is compiled once; torch's default of 8 would leave the ninth to the plain forward.
_RECOMPILE_LIMIT = 1 << 14

_session: Session | None = None


def start(environ: Mapping[str, str]) -> None:
    """Begin watching this process, as the environment says; called at the end of ``import torch``."""
    global _session
    settings = Settings.from_environment(environ)
    if not settings.claim():
        return  # a child of the worker (a DataLoader's, say): none of our business
    from monetrun.runtime.traceback_file import install_excepthook

    install_excepthook()
    _session = Session(settings)
    _session.watch_process()


def apply(model: nn.Module, budget_or_plan: Any, **options: Any) -> nn.Module:
    """Train ``model`` under a budget from its next training forward on, in this process; gives ``model`` back.

    The first step runs on the most frugal schedules and is measured; from the second on the cheapest schedules within
    the budget run. Its ``state_dict``, type, deep copies and pickles are as before.

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
    if reason := unplannable(model):
        raise CaptureFailed(f"{type(model).__name__} cannot be planned: {reason}")
    if _session is None:
        _session = Session(Settings(mode=RUN, budget=text or str(plan.budget_bytes if plan else ""), **options), plan)
        _session.watch_process()
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer):
            _session.optimizer_made(thing)
    _session.put_triggers([model])
    return model


class Session:
    """All that monetrun knows in this process."""

    def __init__(self, settings: Settings, plan: Any = None) -> None:
        self.settings = settings
        self.plan = plan
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.planned: list[Planned] = []
        self.inside = threading.local()
        self.warned: set[str] = set()
        self.engine: Any = None  # monetrun.runtime.engine.Engine, from the first training forward on
        self._undo = contextlib.ExitStack()

    # ---- watching

    def watch_process(self) -> None:
        """Notice optimizers, their steps, and what wraps models."""
        session = self
        init, add_group = Optimizer.__init__, Optimizer.add_param_group
        zero_optimizer, zero_module = Optimizer.zero_grad, nn.Module.zero_grad

        def watched_init(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            session.optimizer_made(self)

        def watched_group(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            add_group(self, *args, **kwargs)
            if self in session.optimizers:
                session.optimizer_made(self)

        def zeroed_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
            session.gradients_dropped((p for g in self.param_groups for p in g["params"]), set_to_none)
            zero_optimizer(self, set_to_none)

        def zeroed_module(self: nn.Module, set_to_none: bool = True) -> None:
            session.gradients_dropped(self.parameters(), set_to_none)
            zero_module(self, set_to_none)

        for owner, name, function, original in (
            (Optimizer, "__init__", watched_init, init),
            (Optimizer, "add_param_group", watched_group, add_group),
            (Optimizer, "zero_grad", zeroed_optimizer, zero_optimizer),
            (nn.Module, "zero_grad", zeroed_module, zero_module),
        ):
            functools.update_wrapper(function, original)
            setattr(owner, name, function)
            self._undo.callback(setattr, owner, name, original)
        for register, action in (
            (register_optimizer_step_pre_hook, lambda optimizer, args, kwargs: self.step_begins(optimizer)),
            (register_optimizer_step_post_hook, lambda optimizer, args, kwargs: self.step_ended(optimizer)),
        ):
            self._undo.callback(register(action).remove)
        cpu_allocator.install()  # counting begins before the script allocates anything
        if self.settings.mode == PROBE:
            from monetrun.runtime import probe

            probe.stand_in_for_the_other_ranks(self.settings.world_size)
            if self.settings.cost_model != roofline.MEASURED:
                fake_tensors.start(self._undo)
        atexit.register(self.report)

    def close(self) -> None:
        """Watch no more: what was patched is as before, models run plainly, and allocations are not limited."""
        global _session
        self._undo.close()
        atexit.unregister(self.report)
        for module in [p.module() for p in self.planned]:
            if module is not None:
                module._compiled_call_impl = None
        if cpu_allocator.install():
            cpu_allocator.set_limit(None)
        if self.engine is not None:
            self.engine.recorder = None  # torch keeps what it compiled last, and by it the engine; not the parameters
        if _session is self:
            _session = None

    def optimizer_made(self, optimizer: Optimizer) -> None:
        """An optimizer has parameters: put triggers on the modules that own them."""
        self.optimizers.add(optimizer)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.put_triggers(_owners(trained))

    def put_triggers(self, modules: Iterable[nn.Module]) -> None:
        """Let each of ``modules`` ask us when it is called; what cannot be planned is warned of, and left alone."""
        for module in modules:
            if isinstance(module._compiled_call_impl, Trigger):
                continue
            if any(module is p.module() for p in self.planned):
                continue
            reason = unplannable(module)
            if reason is None and not isinstance(module, nn.parallel.DistributedDataParallel):
                module._compiled_call_impl = Trigger(self, module)  # type: ignore[assignment]
            elif reason:
                self.give_up(f"{type(module).__name__} runs without a plan: {reason}")

    def gradients_dropped(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        """The script called ``zero_grad``."""
        if self.engine is not None:
            self.engine.gradients_dropped(parameters, set_to_none)

    def step_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins."""
        if self.engine is not None:
            self.engine.optimizer_begins(again=optimizer in self.stepped)
        elif self.settings.mode == PROBE and optimizer in self.stepped:
            self._leave_unplanned()

    def step_ended(self, optimizer: Optimizer) -> None:
        """It has ended: the end of a training step, or of a part of it."""
        self.stepped.add(optimizer)
        everyone = all(o in self.stepped for o in self.optimizers)
        if self.engine is not None:
            self.engine.optimizer_ended(type(optimizer).__name__, everyone)
        elif self.settings.mode == PROBE and everyone:
            self._leave_unplanned()

    def _leave_unplanned(self) -> None:
        """A probe's end where no model could be planned: the run itself will say why."""
        from monetrun.core.step import StepRecord
        from monetrun.runtime import probe

        probe.leave(StepRecord((), (), (), 0, {}, "", torch.__version__), self.settings.record_file)

    # ---- deciding

    def wants(self, module: nn.Module) -> bool:
        """Whether this call of ``module`` is an outermost training forward."""
        return (
            torch.is_grad_enabled()
            and module.training
            and not getattr(self.inside, "depth", 0)
            and not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def begin(self, module: nn.Module) -> Planned:
        """``module`` is the model, or one of several: from now on its training forwards are planned."""
        for child in module.modules():
            if isinstance(child._compiled_call_impl, Trigger):
                child._compiled_call_impl = None
        if self.engine is None:
            from monetrun.runtime.engine import Engine

            _prepare_dynamo()
            self.engine = Engine(self, _device_of(module))
        planned = Planned(self, module)
        self.planned.append(planned)
        module._compiled_call_impl = planned  # type: ignore[assignment]
        return planned

    @contextlib.contextmanager
    def outermost(self) -> Iterator[None]:
        """While a planned model runs, calls within it are not decided about."""
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            yield
        finally:
            self.inside.depth -= 1

    # ---- telling

    def warn(self, message: str) -> None:
        """One line on stderr, once, from rank 0 (and nothing from a probe, whose run will say it again)."""
        if message in self.warned:
            return
        self.warned.add(message)
        if self.settings.rank == 0 and self.settings.mode != PROBE and not self.settings.quiet:
            print(f"monetrun: warning: {message}", file=sys.stderr, flush=True)

    def give_up(self, message: str) -> None:
        """Something runs unmodified: one warning; with ``strict`` an error instead.

        Raises:
            CaptureFailed: with ``strict``.
        """
        if self.settings.strict:
            raise CaptureFailed(message, "without --strict it runs as it is, outside the plan")
        self.warn(message)

    def report(self) -> None:
        """Leave for the launcher what this rank measured."""
        if not self.settings.report_folder:
            return
        found: dict[str, Any] = {"rank": self.settings.rank, "warnings": sorted(self.warned)}
        if self.engine is not None:
            found.update(self.engine.findings())
        path = Path(self.settings.report_folder) / f"rank{self.settings.rank}.json"
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(path)


class Trigger:
    """Stands where ``nn.Module.compile`` puts a compiled call, until the module's first training forward."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session = session
        self.module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; its first outermost training forward makes it a planned one."""
        module = self.module()
        assert module is not None
        if not self.session.wants(module):
            return module._call_impl(*args, **kwargs)
        return self.session.begin(module)(*args, **kwargs)


class Planned:
    """The compiled call of a model."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.session = session
        self.module = weakref.ref(module)
        self.name = type(module).__name__
        self.generation = -1
        self.run: Any = None
        self.backend: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module: as it is in evaluation, on its schedules in training."""
        module, session = self.module(), self.session
        assert module is not None
        if not session.wants(module):
            return module._call_impl(*args, **kwargs)
        engine = session.engine
        engine.forward_begins(self.name)
        while True:
            if self.generation == engine.generation and (failed := self.backend.failed()):
                engine.plan_without(failed)
            first = self.generation != engine.generation
            if first:
                self.generation = engine.generation
                self.backend = engine.backend(self.name)
                self.run = torch.compile(_entry(), backend=self.backend, dynamic=False)
            try:
                with session.outermost():
                    result = _unwrapped(self.run, module, args, kwargs)
            except GuardFailed as failure:  # each time there is one implementation less that can
                engine.plan_without(failure.failed)
                continue
            if first and not self.backend.captured:
                session.give_up(f"{self.name} runs without a plan: nothing of its forward was captured")
            return result


def _unwrapped(run: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call, and let our own errors out of the one that Dynamo wraps them in."""
    try:
        return run(module, args, kwargs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, MonetrunError):
            raise error.inner_exception from None
        raise


def _call(module: nn.Module, args: Any, kwargs: Any) -> Any:
    # a frame of ours is the root: torch 2.11 captures nothing of a root whose class lives in torch (nn.Sequential)
    return module._call_impl(*args, **kwargs)


_entries = 0


def _entry() -> types.FunctionType:
    """A copy of ``_call`` with a code object of its own, since Dynamo keeps what it compiled per code object."""
    global _entries
    _entries += 1
    code = _call.__code__.replace(co_name=f"monetrun_model_{_entries}")
    return types.FunctionType(code, _call.__globals__, code.co_name)


def _prepare_dynamo() -> None:
    import torch._dynamo

    config = torch._dynamo.config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        setattr(config, name, max(_RECOMPILE_LIMIT, getattr(config, name)))


def _owners(trained: set[int]) -> list[nn.Module]:
    """All modules in the process that own, directly or through a child, one of the parameters."""
    owns: dict[int, bool] = {}

    def check(module: nn.Module) -> bool:
        known = owns.get(id(module))
        if known is None:
            owns[id(module)] = False  # a cycle ends here
            direct = any(id(p) in trained for p in module._parameters.values())
            within = [check(child) for child in module._modules.values() if child is not None]
            known = owns[id(module)] = direct or any(within)
        return known

    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    return [m for m in modules if "_parameters" in m.__dict__ and "_modules" in m.__dict__ and check(m)]


def unplannable(module: nn.Module) -> str | None:
    """Why a module cannot be planned, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a scripted module, whose operators are hidden from capture"
    if isinstance(module, nn.DataParallel):
        return "DataParallel replicates it in one process; use DistributedDataParallel"
    kind = type(module).__name__
    if kind in ("FullyShardedDataParallel", "FSDPModule") or kind.startswith("FSDP"):
        return "FSDP shards its parameters, which a plan of the whole model does not see"
    if kind == "OptimizedModule" or (
        module._compiled_call_impl is not None and not isinstance(module._compiled_call_impl, (Trigger, Planned))
    ):
        return "it is compiled already (torch.compile); without that monetrun can plan it"
    return None


def _device_of(module: nn.Module) -> torch.device:
    for parameter in module.parameters():
        if parameter.device.type != "cpu":
            return parameter.device
    return torch.device("cpu")
