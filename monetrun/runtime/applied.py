"""What a script calls itself: ``monetrun.apply`` begins the session of a process, ``monetrun.close`` ends it."""

from __future__ import annotations

from typing import Any

from torch import nn

from monetrun.capture import cpu_allocator
from monetrun.core.errors import CaptureFailed, word_as_arguments
from monetrun.core.log_lines import print_warnings
from monetrun.runtime import agreement, apply_arguments, candidates, hooks, unplanned
from monetrun.runtime import session as process
from monetrun.runtime.reporter import in_short
from monetrun.runtime.session import Session
from monetrun.runtime.settings import RUN, Settings


def apply(model: nn.Module, budget_or_plan: Any = None, *, budget: Any = None, **options: Any) -> nn.Module:
    """Train ``model`` under a budget from its next training forward on, in this process; gives ``model`` back.

    The first step runs on the schedules with the least peak, and is measured (the second too, where the script holds
    outputs of the first); from then on the cheapest schedules within the budget run. Its ``state_dict``, type, deep
    copies and pickles are as before.

    Models applied with the same budget and options share the budget. With others the former planning ends, and all
    that are trained are planned anew. In a process that the launcher started, ``model`` is given back as it is.

    Args:
        model: already on its device. What wraps it (DistributedDataParallel) may be put around it before or after.
        budget_or_plan: ``"12GiB"``, ``"0.6x"``, ... (``--budget``'s grammar), bytes as an int, or a ``Plan``.
        budget: the same, by its name.
        options: ``apply_arguments.OPTIONS`` (``algorithm``, ``solver_seconds``, ``strict``, ...).

    Raises:
        TypeError: an argument is not what belongs there, or there is no such option.
        UsageError: an option's value cannot be used.
        BudgetSyntaxError: the budget is malformed.
        CaptureFailed: ``model`` is of a kind that cannot be planned.
    """
    text, plan = apply_arguments.budget_and_plan(budget_or_plan, budget, model)
    given = apply_arguments.checked_options(options)
    if process._launched:
        return model
    if reason := candidates.unplannable(model):
        raise CaptureFailed(f"{type(model).__name__} cannot be planned: {reason}")
    rank, world_size = agreement.place()
    given |= {"rank": rank, "world_size": world_size, "plan_given": plan is not None}
    settings = Settings(mode=RUN, budget=text, **given)
    again: list[nn.Module] = []
    session = process._session
    if session is not None and (session.settings, session.plan) != (settings, plan):
        again = session.models()
        session.close()
        session = None
    if session is None:
        session = process._session = Session(settings, plan)
        session.watch_process()
        cpu_allocator.count_living()  # what the script has made before counts, too
        word_as_arguments(("budget", *apply_arguments.OPTIONS))
        print_warnings()
    try:
        for optimizer in hooks.optimizers_of(model):
            session.optimizer_made(optimizer)
        session.put_triggers([model, *again])
    except CaptureFailed:
        session.close()
        raise
    return model


def close() -> dict[str, Any]:
    """End what ``apply`` began: models run as they are, and nothing is limited. Does nothing where nothing runs.

    Returns:
        What was planned and measured, by names of ``--json``: ``budget_bytes``, ``plain_peak_bytes``,
        ``planned_peak_bytes``, ``planned_overhead``, ``measured_peak_bytes`` and ``steps``. Empty: there was no plan;
        a warning says why.
    """
    word_as_arguments(())
    session = current()
    if session is None:
        return {}
    found = figures(session)
    if not found:
        seen = session.models(), session.optimizers, session.stepped
        why = unplanned.why(session.engine, bool(session.reporter.warned), *seen)
        session.reporter.warn(f"nothing was planned: {why}")
    session.close()
    return found


def current() -> Session | None:
    """The session that ``apply`` has begun, and nobody has ended."""
    return None if process._launched else process._session


def figures(session: Session) -> dict[str, Any]:
    """What ``close`` gives, of a session that may go on."""
    engine = session.engine
    plan, findings = session.ended if engine is None else (engine.plan, engine.findings())
    return {} if plan is None else in_short(plan, findings)
