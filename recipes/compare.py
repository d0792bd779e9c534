"""Compare eager, checkpoints by hand, torch.compile, torch's memory budget and monetrun: true peaks, seconds, bits.

    python recipes/compare.py                                # all networks, on two quiet cores or more
    python recipes/compare.py --networks gpt,unet --rounds 15 --no-inductor
    python recipes/compare.py --size paper                   # on a GPU
    STANDIN_GPU_GIB=64 python tests/support/standin_gpu python recipes/compare.py --size paper   # memory alone
    python recipes/compare.py --only-page                    # docs/comparison.md from the results

\b
Each network trains in a process of its own by each method, beside an eager copy in turns:
- eager; torch.utils.checkpoint around each block, and around sqrt(n) segments of consecutive blocks
- torch.compile with eager's kernels (aot_eager), and its activation_memory_budget with the solvers dp, ilp and greedy
- in another process inductor, by itself and with that budget; monetrun at its peaks; networks of convolutions also
  in the memory format that inductor chooses for them, channels-last
- monetrun: recomputation only, implementations only, exact implementations, all

monetrun plans for the true peaks that the others reach, for a third of eager's activations, and for the smallest peak.
A peak is counted by the allocator, weights and optimizer state included; a time is the median of the ratios to eager's
step; loss, gradients and buffers of a step are compared bitwise with eager's.
"""  # noqa: D301 - click reads the backspace

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from lib.child import adopt_orphans
from lib.compared_networks import DEFAULT, NETWORKS, SIZES
from lib.comparison import networks, page, summary
from lib.comparison_figure import figure
from lib.gpu_sections import RECIPES, ROOT
from lib.gpu_table import cause_in, line
from lib.sections import (
    FAILED,
    OK,
    TIMEOUT,
    Document,
    Ended,
    Found,
    Section,
    json_lines,
    read_earlier,
    run_section,
)

RESULT = RECIPES / "results" / "compare.json"
LEAST = RECIPES / "results" / "least_peaks.json"
DOCS = ROOT / "docs"
PAGE, FIGURE = "comparison.md", "comparison.svg"
TIMES = (  # left out where they mean nothing
    "seconds",
    "eager_seconds",
    "ratio",
    "ratio_quartiles",
    "pairs",
    "planned_seconds",
    "planned_ratio",
    "bound_ratio",
)
SETTINGS = ("size", "budgets", "rounds", "solver_seconds", "algorithm", "threads")


def sections(options: dict[str, Any], wanted: Sequence[str]) -> list[Section]:
    """Two for each network: inductor has its own, later, since its compilation may take longer than all else."""
    found = []
    for name in wanted:
        words = [sys.executable, "-W", "ignore", str(RECIPES / "compare_network.py"), name]
        for option in SETTINGS:
            words += [f"--{option.replace('_', '-')}", str(options[option])]
        for pattern in options["only"]:
            words += ["--only", pattern]
        needs = NETWORKS[name].missing
        limit = options["limit_seconds"]
        found.append(Section(name, "kernels", tuple(words), limit, read, needs))
        limit = options["inductor_seconds"]
        needs = needs or ("" if options["inductor"] else "--no-inductor")
        found.append(Section(f"{name}:inductor", "inductor", (*words, "--inductor"), limit, read, needs))
    return sorted(found, key=lambda section: section.group == "inductor")


def read(ended: Ended) -> Found:
    """The rows that a network's process has printed until it ended, or was ended."""
    lines = list(json_lines(ended.stdout))
    rows = [found["row"] for found in lines if "row" in found]
    skipped = next((found["skipped"] for found in lines if "skipped" in found), "")
    return Found({"rows": rows} if rows else {}, skipped=skipped)


def kept(entry: dict[str, Any], stand_in: bool) -> dict[str, Any]:
    """A section's entry as it is written: without this machine's paths, and on a stand-in without times."""
    failures = [{"what": f["what"], "cause": cause_in(f.get("traceback", ""))} for f in entry.get("failures", ())]
    entry = {k: v for k, v in entry.items() if k not in ("command", "failures", "checks", "left_over")}
    if failures:
        entry["failures"] = failures
    if stand_in and "figures" in entry:
        rows = [{k: v for k, v in row.items() if k not in TIMES} for row in entry["figures"].get("rows", ())]
        entry["figures"] = {"rows": rows}
    return entry


def device() -> dict[str, Any]:
    """What trains here."""
    if torch.cuda.is_available():
        command = [sys.executable, str(RECIPES / "lib" / "device_facts.py")]  # asking makes a context
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"device": next(json_lines(done.stdout))["device"], "device_type": "cuda"}
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {"device": names[0] if names else platform.machine(), "device_type": "cpu"}


def bounds(document: dict[str, Any]) -> dict[str, int]:
    """Bytes below which no schedule's peak is, by network, as ``least_peaks.py`` has them for such a document."""
    least = json.loads(LEAST.read_text(encoding="utf-8")) if LEAST.exists() else {"rows": []}
    same = least.get("size") == document["size"] and document["device_type"] == "cpu"
    return {row["network"]: row["bound_bytes"] for row in least["rows"]} if same else {}


def write_page(document: dict[str, Any], folder: Path) -> None:
    """docs/comparison.md and its figure."""
    (folder / PAGE).write_text(page(document, FIGURE, bounds(document)), encoding="utf-8")
    (folder / FIGURE).write_text(figure(document), encoding="utf-8")


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(word for word in value.split(",") if word)
    for name in names:
        if name not in NETWORKS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(NETWORKS)}")
    return names


@click.command(help=__doc__.replace("\n\n    python", "\n\n\b\n    python", 1))
@click.option("--networks", "wanted", default=",".join(DEFAULT), callback=_names, help="By comma; all by default.")
@click.option("--size", type=click.Choice(SIZES), default=SIZES[0], show_default=True, help="paper: for a GPU.")
@click.option("--budgets", default="0.5,0.1", show_default=True, help="Of torch's activation_memory_budget.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Pairs of steps for a ratio.")
@click.option("--solver-seconds", type=float, default=2.0, show_default=True, help="For each of monetrun's plans.")
@click.option("--algorithm", default="hierarchical", show_default=True, help="monetrun's.")
@click.option("--only", multiple=True, default=("*",), metavar="METHODS", help="Methods, as patterns: 'checkpoint*'.")
@click.option("--threads", type=int, default=0, help="Of torch on a CPU; 0: its own choice.")
@click.option("--inductor/--no-inductor", default=True, help="Whether torch.compile's default is measured, too.")
@click.option("--inductor-seconds", type=float, default=180.0, show_default=True, help="For a network's, then it ends.")
@click.option("--limit-seconds", type=float, default=3600.0, show_default=True, help="For all else of a network.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=RESULT, help="Default: in results/.")
@click.option("--resume", is_flag=True, help="Keep the networks that --out has, and run the others.")
@click.option("--page", "page_folder", type=click.Path(file_okay=False, path_type=Path), help="Write the page here.")
@click.option("--only-page", is_flag=True, help="Write docs/comparison.md from --out, and end.")
def main(
    wanted: tuple[str, ...], out: Path, resume: bool, page_folder: Path | None, only_page: bool, **options: Any
) -> None:
    """Train each network by each method, and print the verdicts."""
    if only_page:
        write_page(json.loads(out.read_text(encoding="utf-8")), page_folder or DOCS)
        return
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # run_child ends its command
    options["threads"] = options["threads"] or torch.get_num_threads()
    here = device()
    header = {
        "command": shlex.join(["python", "recipes/compare.py", *sys.argv[1:]]),
        **here,
        "torch": torch.__version__,
        "processors": os.cpu_count(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{name: options[name] for name in SETTINGS},
    }
    same = {name: header[name] for name in ("device", "torch", *SETTINGS)}
    document = Document(out, header, read_earlier(out, same) if resume else None)
    places = [str(ROOT), str(RECIPES), os.environ.get("PYTHONPATH", "")]
    variables = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as a launch sets it; it favours every method
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "PYTHONUNBUFFERED": "1",
    }
    work = ROOT / "build" / "compare"
    work.mkdir(parents=True, exist_ok=True)
    for section in sections(options, wanted):
        known = document.entry(section.name)
        if known is not None and known["status"] in (OK, TIMEOUT):
            continue
        entry = run_section(section, variables, section.limit_seconds, work)
        document.add(kept(entry, here["device"] == "Stand-in GPU"))
        Console(highlight=False).print(line(entry), soft_wrap=True)
        name = section.name.partition(":")[0]
        if section.group == "kernels" and name in networks(document.value):
            click.echo(f"  {summary(name, networks(document.value)[name])}")
    if page_folder is not None:
        write_page(document.value, page_folder)
    failed = [e["name"] for e in document.value["sections"] if e["status"] == FAILED]
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
