"""Step time against peak for a GPT under FSDP2: all blocks reshard after the forward, none do, or it is chosen.

    python recipes/bench_kept_parameters.py --out recipes/results/kept_parameters.json

Nothing is allocated and nothing runs: ``gpt_fsdp.py`` is tried on tensors without memory, as by ``monetrun plan``.
Seconds are a roofline's for one H100 in a cluster, and those of a ring on a link of the given speed. At each budget,
from the least that is feasible to what the step takes that keeps everything, the schedules are planned in all three
ways. ``reshard_after_forward=True`` and ``False`` get the recomputation that is cheapest in computation; the choice is
``planning.kept_parameters``'s, which begins with their schedules. The figure lies beside the JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from monetrun.commands.dry_run import parse_dry_run
from monetrun.commands.plan import prepare_parser
from monetrun.core import link
from monetrun.core.clocks import StepClocks, step_clocks
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.keeping import as_planned, keeping, over_link
from monetrun.core.options import Options
from monetrun.core.plan import Plan
from monetrun.core.step import StepRecord
from monetrun.launcher.job import open_job
from monetrun.planning import kept_parameters, planner

SCRIPT = Path(__file__).with_name("gpt_fsdp.py")
GIB = 1 << 30
LINKS = ("100Gbps,5us", "200Gbps,5us", "400Gbps,5us")
WAYS = {"reshard": "reshard_after_forward=True", "keep": "reshard_after_forward=False", "chosen": "chosen"}


def recorded(nodes: int, gpus: int, cost_model: str, script_words: Sequence[str]) -> StepRecord:
    """The step of ``gpt_fsdp.py`` on so many ranks."""
    cluster = [f"--nnodes={nodes}", f"--nproc-per-node={gpus}", f"--cost-model={cost_model}", "--budget=1.0x"]
    options, _ = parse_dry_run("plan", prepare_parser(), [*cluster, "--quiet", str(SCRIPT), *script_words])
    with open_job(options) as job:
        return job.trial()


def clocks_of(record: StepRecord, plan: Plan, over: link.Link, ranks: int) -> StepClocks:
    """The planned step's clocks over a link."""
    timed = over_link(as_planned(record, plan.keeps_parameters), over)
    return step_clocks(timed, [g.schedule for g in plan.graphs], over, ranks)


def budgets(record: StepRecord, everything: StepRecord, points: int, options: Options) -> list[int]:
    """From the smallest that is feasible to the peak of the plain step that keeps all parameters."""
    low = planner.baseline(record).frugal.peak_bytes
    try:
        planner.plan_step(record, low // 4, options=options)
    except InfeasibleBudget as refused:
        low = refused.smallest_bytes
    plain = planner.plain_in_place(everything)
    high = planner.replay(everything, plain).peak_bytes
    return [low + (high - low) * i // (points - 1) for i in range(points)]


def fixed(record: StepRecord, budget_bytes: int, options: Options) -> Plan | None:
    """The plan with the record's own choice; None where nothing fits."""
    try:
        return planner.plan_step(record, budget_bytes, options=options)
    except (InfeasibleBudget, NoPlanInTime):
        return None


def rows(record: StepRecord, links: Sequence[str], points: int, options: Options, ranks: int) -> list[dict[str, Any]]:
    """A row for each link and budget."""
    assert record.sharding is not None
    resharded, everything = keeping(record, ()), keeping(record, record.sharding.choices)
    found = []
    for budget_bytes in budgets(resharded, everything, points, options):
        ends = {
            "reshard": fixed(resharded, budget_bytes, options),
            "keep": fixed(everything, budget_bytes, options),
        }
        for text in links:
            over = link.parse(text)
            begun = time.monotonic()
            starts = [[g.schedule for g in plan.graphs] for plan in ends.values() if plan is not None]
            chosen = kept_parameters.plan_step(over_link(record, over), budget_bytes, options=options, starts=starts)
            plans = {**ends, "chosen": chosen}
            row: dict[str, Any] = {"link": text, "budget_gib": round(budget_bytes / GIB, 3)}
            for way, plan in plans.items():
                clocks = None if plan is None else clocks_of(record, plan, over, ranks)
                row[way] = (
                    plan
                    and clocks
                    and {
                        "peak_gib": round(plan.planned_peak_bytes / GIB, 3),
                        "seconds": clocks.step_seconds,
                        "compute_seconds": clocks.compute_seconds,
                        "communication_seconds": clocks.communication_seconds,
                        "kept": sum(plan.keeps_parameters.values()),
                    }
                )
            row["planning_seconds"] = round(time.monotonic() - begun, 1)
            found.append(row)
            times = "  ".join(f"{way} {row[way]['seconds']:.4f} s" if row[way] else f"{way} -" for way in WAYS)
            click.echo(f"{text}  {row['budget_gib']:.1f} GiB  {times}  kept {row['chosen']['kept']}", err=True)
    return found


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each link: the choice's seconds over the better of the two others', largest and smallest."""
    of: dict[str, list[float]] = {}
    for row in found:
        better = min(row[way]["seconds"] for way in ("reshard", "keep") if row[way])
        of.setdefault(row["link"], []).append(row["chosen"]["seconds"] / better - 1)
    return {
        text: {"most": round(max(v), 5), "least": round(min(v), 5), "below_both": sum(x < -1e-4 for x in v)}
        for text, v in of.items()
    }


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw seconds against budget, a panel for each link."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "monetrun", "font.size": 9})
    links = list(dict.fromkeys(row["link"] for row in result["rows"]))
    figure, panels = pyplot.subplots(1, len(links), figsize=(11, 3.2), layout="constrained", squeeze=False)
    styles = {"reshard": ("s--", "#b0592b"), "keep": ("^--", "#6b8f3a"), "chosen": ("o-", "#1f6f8b")}
    for panel, text in zip(panels[0], links, strict=True):
        for way, label in WAYS.items():
            points = [
                (r["budget_gib"], 1000 * r[way]["seconds"]) for r in result["rows"] if r["link"] == text and r[way]
            ]
            style, color = styles[way]
            panel.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=4, linewidth=1.2)
        panel.set_title(text.partition(",")[0])
        panel.set_xlabel("budget, GiB")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("planned step, ms")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


@click.command(help=__doc__)
@click.option("--out", default="", type=click.Path(dir_okay=False), help="a JSON file; the figure lies beside it")
@click.option("--links", multiple=True, default=LINKS, show_default=True)
@click.option("--points", default=12, show_default=True, help="budgets")
@click.option("--nodes", default=8, show_default=True)
@click.option("--gpus", default=8, show_default=True)
@click.option("--cost-model", default="roofline:h100", show_default=True)
@click.option("--solver-seconds", default=3.0, show_default=True, help="for each plan")
@click.option("--layers", default=24, show_default=True)
@click.option("--width", default=4096, show_default=True)
@click.option("--heads", default=32, show_default=True)
@click.option("--length", default=2048, show_default=True)
@click.option("--batch-size", default=4, show_default=True)
def main(out: str, links: Sequence[str], points: int, nodes: int, gpus: int, cost_model: str, **sizes: Any) -> None:
    options = Options(seconds=sizes.pop("solver_seconds"), implementations=("exact",))
    words = [w for name, n in sizes.items() for w in (f"--{name.replace('_', '-')}", str(n))]
    record = recorded(nodes, gpus, cost_model, [*words, "--vocabulary", "32000", "--bf16"])
    found = rows(record, links, points, options, nodes * gpus)
    cluster = {"ranks": nodes * gpus, "cost_model": cost_model}
    result = {"model": sizes, **cluster, "over_the_better": summary(found), "rows": found}
    click.echo(json.dumps(result["over_the_better"], indent=1))
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
        draw(Path(out).with_suffix(".svg"), result)


if __name__ == "__main__":
    main()
