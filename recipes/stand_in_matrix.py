"""Launch many kinds of training under many budgets on a GPU, and check what each one is promised; as a table and JSON.

    STANDIN_GPU_GIB=16,16 python tests/support/standin_gpu python recipes/stand_in_matrix.py --out matrix.json

Each training of ``matrix_training.py`` runs under torchrun, then under monetrun with each budget. What must hold:

\b
- It is refused (exit code 80), or trains to its end.
- The plain peaks that are printed are torchrun's, within 0.5%.
- Planned and measured allocated peaks agree within 0.5%, reserved ones within 2% or 32 MiB.
- What the script itself sees reserved is within the budget; settled steps retry no allocation.

A budget is as for ``--budget``; ``=0.7x`` is that share of the plain run in bytes, ``0.8x-no-probe`` has no trial run.
Rows of other trainings and budgets that the file has already stay in it.
"""  # noqa: D301 - click reads the backspace

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("matrix_training.py")
MIB = 1 << 20
NO_PLAN = 80
EXACT, RESERVED, RESERVED_BYTES = 0.005, 0.02, 32 * MIB
TRAININGS = (
    "cnn",
    "accumulation",
    "batch_change",
    "cnn_fp16",
    "cnn_fp16_skips",
    "cnn_bf16",
    "unet",
    "dense",
    "vit",
    "vit_bf16",
    "gpt",
    "gpt_fp16",
    "gpt_bf16",
    "gan",
    "cnn*2",
    "gpt_bf16*2",
    "accumulation*2",
    "trainer_bert",
    "trainer_gpt2",
    "lightning",
)
BUDGETS = ("1.0x", "0.8x", "0.6x", "0.5x", "=0.7x", "0.8x-no-probe")
NEEDS = {"trainer": "transformers", "lightning": "lightning"}


def run(ranks: int, words: Sequence[str]) -> tuple[int, list[dict[str, Any]], str, float]:
    """The exit code of ``python -m WORDS``, the JSON lines that it prints, its stderr and its seconds of CPU."""
    began = os.times()
    options = ["--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, "-W", "ignore", "-m", words[0], *options, *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    ended = os.times()
    seconds = ended.children_user + ended.children_system - began.children_user - began.children_system
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    return done.returncode, found, done.stderr, seconds


def trained(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the script's ranks printed."""
    return [row["training"] for row in found if "training" in row]


def highest(rows: Sequence[dict[str, Any]], name: str) -> int:
    """The largest value of all ranks."""
    return max(int(row[name]) for row in rows)


def launch(training: str, ranks: int, budget: str, plain: dict[str, int], seconds: float) -> dict[str, Any]:
    """The figures of one launch."""
    text, _, how = budget.partition("-")
    if text.startswith("="):
        text = f"{int(float(text[1:-1]) * plain['reserved_bytes'])}B"
    options = ["--json", f"--solver-seconds={seconds:g}", "--budget", text, *([f"--{how}"] if how else [])]
    code, found, stderr, cpu = run(ranks, ["monetrun", *options, str(SCRIPT), training])
    report = next((row for row in found if "planned_reserved_bytes" in row), {})
    rows = trained(found)
    # the report's own "ranks" are each rank's figures
    row = {**report, "training": training, "ranks": ranks, "budget": budget, "exit_code": code}
    row |= {"torchrun_allocated_bytes": plain["allocated_bytes"], "torchrun_reserved_bytes": plain["reserved_bytes"]}
    if rows:
        row |= {f"script_{name}": highest(rows, name) for name in ("steps", "reserved_bytes", "settled_retries")}
    row["cpu_seconds"] = round(cpu, 1)
    row["wrong"] = list(wrong(row, plain["steps"]))
    if code not in (0, NO_PLAN):
        row["error"] = [line for line in stderr.splitlines() if "rror" in line or "monetrun" in line][-3:]
    return row


def wrong(row: dict[str, Any], steps: int) -> Iterator[str]:
    """What does not hold."""
    if row["exit_code"] == NO_PLAN:
        return
    if row["exit_code"] or row.get("script_steps") != steps:
        yield f"exit code {row['exit_code']}, {row.get('script_steps', 0)} of {steps} steps"
        return
    for kind, name in (("allocated", "plain_peak_bytes"), ("reserved", "plain_reserved_bytes")):
        if off(row[name], row[f"torchrun_{kind}_bytes"]) > EXACT:
            yield f"plain {kind} {off(row[name], row[f'torchrun_{kind}_bytes']):.1%} off"
    if row["script_reserved_bytes"] > row["budget_bytes"]:
        yield f"reserved {row['script_reserved_bytes'] / MIB:.0f} MiB of {row['budget_bytes'] / MIB:.0f} MiB"
    if row["script_settled_retries"]:
        yield f"{row['script_settled_retries']} retries in settled steps"
    if row["planned_peak_bytes"] is None:
        return
    if not row["measured_peak_bytes"]:
        yield "nothing measured"
        return
    if off(row["planned_peak_bytes"], row["measured_peak_bytes"]) > EXACT:
        yield f"planned allocated {row['planned_peak_bytes'] / row['measured_peak_bytes'] - 1:+.2%} off"
    apart = abs(row["planned_reserved_bytes"] - row["measured_reserved_bytes"])
    if apart > max(RESERVED * row["planned_reserved_bytes"], RESERVED_BYTES):
        yield f"reserved {apart / MIB:.0f} MiB from the planned"


def off(number: int | None, truth: int) -> float:
    """The relative error."""
    return 1.0 if number is None else abs(number / truth - 1)


def merged(kept: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows in the matrix's order; of two rows of one launch, the one of ``rows``."""
    return sorted(({place(row): row for row in (*kept, *rows)}).values(), key=place)


def place(row: dict[str, Any]) -> tuple[int, str, int, str]:
    """Where a row of the file stands."""
    training = row["training"] + (f"*{row['ranks']}" if row["ranks"] > 1 else "")
    numbers = [
        names.index(name) if name in names else len(names)
        for name, names in ((training, TRAININGS), (row["budget"], BUDGETS))
    ]
    return numbers[0], training, numbers[1], row["budget"]


def cells(row: dict[str, Any]) -> Iterator[str]:
    """Of the table."""
    yield f"{row['training']}{'*' + str(row['ranks']) if row['ranks'] > 1 else ''}"
    yield row["budget"]
    for kind in ("peak", "reserved"):
        for what in ("planned", "measured"):
            nbytes = row.get(f"{what}_{kind}_bytes")
            yield "" if nbytes is None else f"{nbytes / MIB:.1f}"
    overhead = row.get("planned_overhead")
    yield "" if overhead is None else f"{overhead:+.1%}"
    yield "refused" if row["exit_code"] == NO_PLAN else "; ".join(row["wrong"]) or "holds"


@click.command(help=__doc__)
@click.option("--trainings", default=",".join(TRAININGS), show_default=True, help="NAME or NAME*RANKS, with commas")
@click.option("--budgets", default=",".join(BUDGETS), show_default=True)
@click.option("--solver-seconds", type=float, default=3.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="write the figures there as JSON, after each launch")
def main(trainings: str, budgets: str, solver_seconds: float, out: Path | None) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows: list[dict[str, Any]] = []
    kept = json.loads(out.read_text())["rows"] if out is not None and out.exists() else []
    failed = False
    table = Table("training", "budget", "planned", "allocated", "planned", "reserved", "overhead", "", box=None)
    console = Console()
    for text in trainings.split(","):
        training, _, number = text.partition("*")
        ranks = int(number or 1)
        package = NEEDS.get(training.partition("_")[0], "")
        if package and importlib.util.find_spec(package) is None:
            console.print(f"{training}: {package} is not installed")
            continue
        code, found, stderr, _ = run(ranks, ["torch.distributed.run", str(SCRIPT), training])
        if code:  # once in a while a process on a stand-in aborts at its exit
            code, found, stderr, _ = run(ranks, ["torch.distributed.run", str(SCRIPT), training])
        if code:
            console.print(f"{training} does not train under torchrun:\n{stderr[-3000:]}")
            failed = True
            continue
        plain = {name: highest(trained(found), name) for name in ("allocated_bytes", "reserved_bytes", "steps")}
        for budget in budgets.split(","):
            row = launch(training, ranks, budget, plain, solver_seconds)
            rows.append(row)
            table.add_row(*cells(row))
            console.print(*cells(row), f"{row['cpu_seconds']} s", time.strftime("%H:%M"), sep=" | ")
            if out is not None:
                device = re.sub(r" \d+$", "", torch.cuda.get_device_name(0))
                about = {"device": device, "torch": torch.__version__, "rows": merged(kept, rows)}
                out.write_text(json.dumps(about, indent=1) + "\n")
    console.print(table)
    sys.exit(failed or any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
