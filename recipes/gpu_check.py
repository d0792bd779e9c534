"""The first day on a GPU: does the budget hold, and what does it cost? One GPU, nine minutes a call, no network.

    python recipes/gpu_check.py --list-wheels                # what to carry to a machine without a network
    python recipes/gpu_check.py --wheels WHEELS              # the first call
    python recipes/gpu_check.py --wheels WHEELS --resume     # goes on where the time was up
    python recipes/gpu_check.py --only conformance           # the tests on the device, in a call of its own
    python recipes/gpu_check.py --small                      # small inputs: do all commands work?

Each section is one command in a process of its own with a time limit; at the end none of its processes is left. They
run in the order of their importance: the product, then each network in eager mode and within half of its plain peak,
then torch.compile, kernels, cuDNN's plans, and other budgets. What each gave is written at once, and an exception is
kept with its traceback. A launch under a budget is checked: measured <= planned <= budget, reserved <= budget, no
allocation is retried. The exit code is 1 where a section failed.

The script itself needs click, rich and psutil. Without the packages for integer programs, plans come from the greedy
search. torch and monetrun are only used in the sections' processes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from lib import wheels
from lib.child import adopt_orphans
from lib.gpu_sections import GROUPS, NETWORKS, RECIPES, ROOT, Found, Settings, sections
from lib.gpu_table import line, table
from lib.sections import FAILED, OK, SKIPPED, TIMEOUT, Document, Ended, Section, json_lines, read_earlier, run_section

DEVICE_SECONDS = 120.0  # for asking which device this is


def environment(work: Path) -> dict[str, str]:
    """The sections' variables: this checkout and the carried packages, and caches that a resumed run finds again."""
    cache = work / "cache"
    return {
        "XDG_CACHE_HOME": str(cache),
        "MONETRUN_CACHE": str(cache / "monetrun"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **os.environ,
        "MONETRUN_TEST_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(work / "site"), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
    }


def device_facts(variables: dict[str, str], work: Path) -> dict[str, Any]:
    """Which GPU this is; asked in a process of its own.

    Raises:
        click.ClickException: torch sees none.
    """
    command = (sys.executable, str(RECIPES / "lib" / "device_facts.py"))
    section = Section("device", "device", command, DEVICE_SECONDS, _read_device)
    entry = run_section(section, variables, DEVICE_SECONDS, work)
    if entry["status"] != OK:
        why = "\n".join(f"{f['what']}\n{f.get('traceback', '')}" for f in entry["failures"])
        raise click.ClickException(f"no device can be checked: {why}")
    return dict(entry["figures"])


def _read_device(ended: Ended) -> Found:
    return Found(next(json_lines(ended.stdout), {}))


def _words(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    """An option that is given several times, or once with commas."""
    return tuple(word for words in value for word in words.split(",") if word)


def _networks(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    names = _words(context, parameter, value)
    for name in names:
        if name not in NETWORKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(NETWORKS)}")
    return names or NETWORKS


def _budgets(context: click.Context, parameter: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    return _words(context, parameter, value) or Settings().shares


_GROUPS = "\n".join(f"  {name:12} {about}" for name, about in GROUPS.items())
_HELP = __doc__.replace("\n\n    python", "\n\n\b\n    python")


@click.command(help=f"{_HELP}\n\n\b\nGroups of sections, in order:\n{_GROUPS}", no_args_is_help=False)
@click.option("--only", multiple=True, callback=_words, metavar="NAMES", help="Sections or groups, as patterns: gpt:*")
@click.option("--networks", multiple=True, callback=_networks, metavar="NAMES", help=f"Of {', '.join(NETWORKS)}.")
@click.option("--shares", multiple=True, callback=_budgets, metavar="BUDGETS", help="Of the group shares.")
@click.option("--small", is_flag=True, help="Small inputs, which any device holds.")
@click.option("--stand-in", is_flag=True, help="The GPU is a stand-in: no NCCL, no Triton, and no figure is a GPU's.")
@click.option("--cudnn/--no-cudnn", default=True, help="Whether convolutions run in cuDNN.")
@click.option("--seconds", type=click.FloatRange(0), default=540.0, show_default=True, help="For everything.")
@click.option("--limits", type=click.FloatRange(0.1), default=1.0, help="Multiply the sections' time limits by this.")
@click.option("--solver-seconds", type=click.FloatRange(0.1), help="For each plan; default: 5, with --small 1.")
@click.option("--resume", is_flag=True, help="Keep the sections that went well in --out, and run the others.")
@click.option("--keep-failed", is_flag=True, help="With --resume: keep those that failed, too.")
@click.option(
    "--wheels",
    "wheel_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Install from this folder, and nowhere else, what is missing.",
)
@click.option("--list-wheels", is_flag=True, help="Show what is needed and how to carry it, and end.")
@click.option("--python-version", help="With --list-wheels: of the other machine, as 3.12; default: this one's.")
@click.option("--list", "list_sections", is_flag=True, help="Show the sections and their commands, and end.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=ROOT / "build" / "gpu_check",
    help="For logs, caches and carried packages; default: build/gpu_check.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Default: recipes/results/gpu_<device>.json.")
@click.pass_context
def main(context: click.Context, **options: Any) -> None:
    """Check and measure, and write what was found."""
    started = time.monotonic()
    work: Path = options["work"].resolve()
    site = work / "site"
    if options["list_wheels"]:
        python, machine = wheels.this_interpreter()
        click.echo(wheels.listing(site, options["python_version"] or python, machine))
        return
    work.mkdir(parents=True, exist_ok=True)
    installed, pip_failed = wheels.install(options["wheel_folder"], site) if options["wheel_folder"] else ([], "")
    not_registered = wheels.register_checkout(ROOT, site)
    missing = wheels.missing(site)
    settings = read_settings(options, missing)
    chosen = [replace(s, limit_seconds=options["limits"] * s.limit_seconds) for s in choose(settings, options["only"])]
    if options["list_sections"]:
        for section in chosen:
            click.echo(f"{section.name:24} {section.limit_seconds:4.0f} s  {shlex.join(section.command)}")
        return
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # run_child ends its command
    variables = environment(work)
    facts = device_facts(variables, work)
    kept = {name: getattr(settings, name) for name in ("small", "stand_in", "cudnn")}
    out: Path = options["out"] or default_path(facts["device"], work, settings)
    header = {
        "command": shlex.join(["python", *sys.argv]),
        **facts,
        **kept,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "algorithm": settings.algorithm,
        "solver_seconds": settings.solver_seconds,
        "wheels": {"installed": installed, "failed": pip_failed, "missing": [need.package for need in missing]},
        "hook": not_registered or "registered",
    }
    same = {"device": facts["device"], "torch": facts["torch"], **kept}
    document = Document(out, header, read_earlier(out, same) if options["resume"] else None)
    document.write()
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print(f"[bold]{facts['device']}[/bold], torch {facts['torch']}, driver {facts['driver']}; {out}")
    for problem in [pip_failed, not_registered, *(f"missing: {n.package} ({n.purpose})" for n in missing)]:
        if problem:
            console.print(f"  [yellow]{escape(problem)}[/yellow]", soft_wrap=True)
    done = {OK, FAILED, TIMEOUT} if options["keep_failed"] else {OK}
    for section in chosen:
        earlier = document.entry(section.name)
        if earlier is not None and earlier["status"] in done:
            continue
        left = options["seconds"] - (time.monotonic() - started)
        entry = run_section(section, variables, left, work)
        if earlier is None or entry["status"] != SKIPPED:  # what failed before is not replaced by what had no time
            document.add(entry)
        console.print(line(entry), soft_wrap=True)
    console.print(table(document.value))
    failed = [s.name for s in chosen if (document.entry(s.name) or {}).get("status") in (FAILED, TIMEOUT)]
    summary = f"{time.monotonic() - started:.0f} s; {len(failed)} of {len(chosen)} sections failed"
    console.print(": ".join([summary, ", ".join(failed)] if failed else [summary]), soft_wrap=True)
    context.exit(1 if failed else 0)


def read_settings(options: dict[str, Any], missing: Sequence[wheels.Need]) -> Settings:
    """The settings that the command's options give on this machine."""
    return Settings(
        networks=options["networks"],
        shares=options["shares"],
        small=options["small"],
        stand_in=options["stand_in"],
        cudnn=options["cudnn"],
        solver_seconds=options["solver_seconds"] or (1.0 if options["small"] else 5.0),
        algorithm="greedy" if any(need.planning for need in missing) else "hierarchical",
        compile_backend="aot_eager_decomp_partition" if options["stand_in"] else "inductor",
    )


def choose(settings: Settings, patterns: Sequence[str]) -> list[Section]:
    """The sections that the patterns name; without any, all but conformance.

    Raises:
        click.UsageError: a pattern names none.
    """
    known = sections(settings)
    for pattern in patterns:
        if not any(s.wanted([pattern]) for s in known):
            raise click.UsageError(f"--only {pattern} is the name of no section and no group; --list shows them")
    return [s for s in known if (s.wanted(patterns) if patterns else s.group != "conformance")]


def default_path(device: str, work: Path, settings: Settings) -> Path:
    """Where results go: beside the committed ones, unless they are no figures of a GPU."""
    if settings.small or settings.stand_in:
        return work / "gpu_check.json"
    return RECIPES / "results" / f"gpu_{re.sub('[^0-9a-z]+', '_', device.lower()).strip('_')}.json"


if __name__ == "__main__":
    main()
