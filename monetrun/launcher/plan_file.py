"""A plan as a file: ``monetrun plan`` writes it, ``monetrun --plan`` and ``monetrun explain`` read it."""

from __future__ import annotations

import json
from dataclasses import replace

from monetrun.core import codec
from monetrun.core.budget import BYTES, SHARE_OF_FREE, SHARE_OF_PLAIN, Budget, format_bytes, resolve
from monetrun.core.errors import PlanMismatch, UsageError
from monetrun.core.graph import EXACT, Implementation
from monetrun.core.options import parse_kinds
from monetrun.core.plan import Plan, parse_plan
from monetrun.core.step import StepRecord
from monetrun.launcher import report
from monetrun.launcher.options import LaunchOptions
from monetrun.machine.named_file import write_file
from monetrun.planning.summary import plain_bytes

_MOST_BYTES = 256 << 20  # the plan of a network of 1,823 operators has 0.2 MiB


def read_plan(path: str) -> Plan:
    """Read a plan.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanMismatch: it is not a plan that this version reads.
    """
    try:
        with open(path, "rb") as file:  # a FIFO too, as the shell's <(...) gives
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has over {_MOST_BYTES >> 20} MiB")
        return parse_plan(content.decode())
    except OSError as error:
        raise UsageError(f"the plan {path}: {error.strerror}", "monetrun plan SCRIPT writes one") from error
    except ValueError as error:
        why = "it is not JSON" if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)) else error
        if b'"measured_recomputation"' in content:
            why = "it is the report of a launch"
        message = f"{path} is not a plan that this monetrun reads: {why}"
        raise PlanMismatch(message, "monetrun plan SCRIPT writes one") from error


def check_options(plan: Plan, record: StepRecord | None, options: LaunchOptions, budget: Budget) -> Plan:
    """Check that a plan from a file keeps what was given beside ``--plan``; gives it, with a larger budget if one was.

    Args:
        plan: from ``read_plan``.
        record: of its step, where known: it says which implementations are exact.
        options: of the launch.
        budget: of the launch; ``auto``, the default, leaves it to the plan.

    Raises:
        UsageError: the budget is less than the plan's, or the plan does what ``--implementations`` or
            ``--no-recompute`` excludes. Where only the record says whether it does, a warning says so.
    """
    name = f"the plan {options.plan_file}"
    # what is free now says nothing of what was when the plan was made
    given = resolve(budget, None, plain_bytes(plan)) if budget.kind in (BYTES, SHARE_OF_PLAIN) else plan.budget_bytes
    if budget.kind == SHARE_OF_FREE:
        report.warn(f"--budget {budget.text} has no effect: {name} has its own, {format_bytes(given)}")
    if given < plan.budget_bytes:
        made_for = f"{name} was made for {format_bytes(plan.budget_bytes)}"
        raise _not_kept(f"--budget {budget.text}", f"is {format_bytes(given)}, {made_for}", options)
    kinds, given_kinds = parse_kinds(options.implementations), f"--implementations {options.implementations}"
    if excluded := _excluded(plan, record, kinds):
        raise _not_kept(given_kinds, f"excludes what {name} uses: {', '.join(excluded)}", options)
    if record is None and EXACT in (kinds or ()) and any(own.implementations for own in plan.graphs):
        report.warn(f"{given_kinds}: whether {name} keeps it is not known, its trial run is not in the cache")
    if not options.recompute and any(own.schedule.runs_again() for own in plan.graphs):
        raise _not_kept("--no-recompute", f"excludes what {name} does: operators run again", options)
    return replace(plan, budget_bytes=given)


def _not_kept(given: str, what: str, options: LaunchOptions) -> UsageError:
    hint = f"leave it out, or make a plan that keeps it: monetrun plan {given} {options.script} ..."
    return UsageError(f"{given} {what}", hint)


def _excluded(plan: Plan, record: StepRecord | None, kinds: tuple[str, ...] | None) -> list[str]:
    """Names of the implementations that the plan uses and ``kinds`` do not allow; unknown ones are taken for exact."""
    exact = {
        (k, op.id, i.name, i.inputs)
        for k, graph in enumerate(() if record is None else record.graphs)
        for op in graph.operators
        for i in op.implementations
        if i.exact
    }
    used = [
        Implementation(n.name, n.inputs, n.in_place_of, record is None or (k, n.operator, n.name, n.inputs) in exact)
        for k, own in enumerate(plan.graphs)
        for n in own.implementations
    ]
    return list(dict.fromkeys(i.name for i in used if not i.allowed_by(kinds)))


def write_plan(plan: Plan, path: str) -> None:
    """Write a plan to ``path`` in one step: the file is either the new one or as before. ``-`` is stdout.

    Raises:
        UsageError: it cannot be written.
    """
    write_file("--out", path, codec.dumps(plan) + "\n")
