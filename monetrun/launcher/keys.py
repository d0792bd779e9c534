"""Cache keys of a launch: each is a hash of all that determines the cached value."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

from monetrun import __version__
from monetrun.core import native
from monetrun.core.allocator_settings import NO_CACHING, settings_text
from monetrun.core.errors import DeviceQueryFailed
from monetrun.core.options import only_exact, parse_kinds
from monetrun.core.plan import PLAN_SCHEMA, Plan
from monetrun.core.step import RECORD_SCHEMA, StepRecord
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.ranks import Ranks
from monetrun.machine.device import query
from monetrun.machine.store import key

_NAME = re.compile(r"[A-Za-z]\w+")


def record_key(options: LaunchOptions, ranks: Ranks) -> str:
    """Key of the trial run's record: script, its arguments, ranks, devices, and the versions of all that runs it.

    Of the environment it has the variables that the script's source names. What the script imports is judged where the
    record is looked up (``sources``).
    """
    source = _source(options).decode("utf-8", "replace")
    measured_on: list[object] = ["cpu", native.processor(), native.math_variables()] if ranks.kind == "cpu" else []
    if ranks.kind == "cuda" and options.cost_model == "measured":
        try:
            measured_on = [info.uuid or info.device for info in query(ranks.kind, ranks.local)]
        except DeviceQueryFailed:  # only a budget of what is free needs it, and says so
            measured_on = [platform.node()]
    return key(
        "probe",
        RECORD_SCHEMA,
        __version__,
        importlib.metadata.version("torch"),
        sys.version,
        options.script if options.is_module else str(Path(options.script).resolve()),
        os.getcwd(),  # what relative names among the arguments, and modules, are looked for in
        os.environ.get("PYTHONPATH", ""),
        source,
        {name: os.environ[name] for name in sorted(os.environ.keys() & set(_NAME.findall(source)))},
        list(options.script_args),
        options.cost_model,
        only_exact(parse_kinds(options.implementations)),  # decides whether a model may be captured as compiled code
        ranks.local,
        ranks.world_size,
        ranks.kind,
        measured_on,
        os.environ.get("OMP_NUM_THREADS", ""),
        settings_text() if ranks.kind == "cuda" else "",
        os.environ.get(NO_CACHING, "") if ranks.kind == "cuda" else "",
    )


def plain_key(record_key: str) -> str:
    """Key of what the plain run of the recorded script takes."""
    return key("plain", record_key)


def plan_key(options: LaunchOptions, record_key: str, budget_bytes: int | None, record: StepRecord) -> str:
    """Key of the plan: the record, the budget, and the options of the solver.

    Args:
        options: of the launch.
        record_key: from ``record_key``.
        budget_bytes: None if the budget is a share of the plain peak.
        record: what runs of it have shown may change its plan.
    """
    return key(
        "plan",
        PLAN_SCHEMA,
        record_key,
        options.budget if budget_bytes is None else budget_bytes,
        options.algorithm,
        options.mip_solver,
        options.solver_seconds,
        not options.recompute,
        options.implementations,
        *(() if record.memory is None else (record.memory.plain_reserved_bytes, record.memory.excess_bytes)),
        *(() if record.sharding is None else [[m.gather_seconds, m.reduce_seconds] for m in record.sharding.modules]),
    )


def smallest_budget_key(options: LaunchOptions, record_key: str, record: StepRecord) -> str:
    """Key of the schedules that set the smallest feasible budget of a recorded step, with what the options allow."""
    allowed = not options.recompute, options.implementations
    return key("frugal", PLAN_SCHEMA, record_key, *allowed, *(graph.fingerprint for graph in record.graphs))


def frontier_key(record_key: str) -> str:
    """Key of what each budget costs in a recorded step, as ``monetrun frontier`` has found it last."""
    return key("frontier", PLAN_SCHEMA, record_key)


def measured_key(plan: Plan) -> str:
    """Key of what was measured in a training step under a plan, however the plan came to the launch."""
    return key("measured", plan.digest)


def _source(options: LaunchOptions) -> bytes:
    """The script's source; empty if there is no such file. Of a module without its packages being imported."""
    script = Path(options.script)
    paths = _files_of_module(options.script) if options.is_module else [script, script / "__main__.py"]
    return b"".join(path.read_bytes() for path in paths if path.is_file())


def _files_of_module(name: str) -> list[Path]:
    """The files that ``python -m name`` runs, where they are: the packages' ``__init__.py``, and the module."""
    first, *others = name.split(".")
    # as ``python -m`` looks; an editable installation may have a finder of its own
    spec = importlib.machinery.PathFinder.find_spec(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
    if spec is None:
        return []
    if spec.origin is not None:
        folder, found = Path(spec.origin).parent, [Path(spec.origin)]
    else:  # a folder without an __init__.py
        folder, found = Path(next(iter(spec.submodule_search_locations or ()))), []
    for part in others:
        folder /= part
        found += [folder / "__init__.py", folder.with_suffix(".py")]
    return [*found, folder / "__main__.py"] if spec.submodule_search_locations else found
