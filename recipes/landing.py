"""Make the README's figure and table, and the tables of other pages, from the committed results.

    python recipes/landing.py

The figure (``docs/overhead.svg``) has the points that torch's ``activation_memory_budget`` reaches, and the plans found
within the same peaks, both by recomputation and in-place operators alone (``recipes/results/partitioner.json``). The
table has, for each network of MONeT's paper, the least memory in the paper at which there is a plan
(``recipes/results/paper_table.json``); ``docs/algorithms.md`` has all of its rows. Both are planned under
``roofline:p100``; neither was measured on a GPU. Nor was the table of ``docs/commands.md``, the largest batches of a
ResNet-50 (``recipes/results/batch_table.json``). The table of ``docs/recipes.md`` was: it has the launches of
``gpu_check.py`` (``recipes/results/gpu_*.json``), and below it is what failed or was stopped. The table of
``docs/implementations.md`` was measured on a CPU (``recipes/results/third.json``).
The README's badges (``docs/badges.svg``) are what setup.py says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from lib.badges import badges
from lib.gpu_table import bad_ends, eager_of, is_estimate

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "recipes" / "results"
BEGIN, END = "<!-- table: recipes/landing.py -->", "<!-- end of table -->"
SHOWN = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "swin_t": "Swin-T", "bert_24": "BERT, 24 layers"}
PAPER = {  # name and batch size
    "resnet50": ("ResNet-50", 184),
    "googlenet": ("GoogLeNet", 320),
    "mobilenet_v2": ("MobileNetV2", 272),
    "unet": ("U-Net", 11),
    "vgg16": ("VGG-16", 176),
}


def table() -> str:
    """The README's table, a line for each network."""
    found = _paper_rows()
    with_plan = {n: [r for r in rows if r["overhead"] is not None] for n, rows in found.items()}
    return _paper_lines([min(rows, key=lambda r: float(r["paper_gb"])) for rows in with_plan.values()])


def whole_table() -> str:
    """All rows of the paper's table."""
    return _paper_lines([row for rows in _paper_rows().values() for row in rows])


def _paper_rows() -> dict[str, list[dict[str, Any]]]:
    rows = [r for r in json.loads((RESULTS / "paper_table.json").read_text())["rows"] if r["reading"] == "ratio"]
    return {network: [r for r in rows if r["network"] == network] for network in PAPER}


def _paper_lines(rows: Iterable[dict[str, Any]]) -> str:
    lines = ["| network, batch | plain | within | MONeT, published | monetrun, planned | no plan is below |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        name, batch = PAPER[row["network"]]
        share = f"{row['paper_gb'] / row['paper_plain_gb']:.0%}"
        cells = [f"{name}, {batch}", f"{row['paper_plain_gb']:.1f} GB", f"{row['paper_gb']:.1f} GB ({share})"]
        planned = "none found" if row["overhead"] is None else f"{row['overhead']:+.1f}%"
        bound = "" if row["bound"] is None else f"+{max(0.0, row['bound']):.1f}%"
        cells += [f"+{row['paper_overhead']:.1f}%", planned, bound]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def batch_table() -> str:
    """The largest batches of a ResNet-50, a line for each GPU's memory."""
    lines = ["| GPU memory | plain | within +10% | within +20% |", "|---|---|---|---|"]
    for row in json.loads((RESULTS / "batch_table.json").read_text())["rows"]:
        cells = [f"{row['gib']:g} GiB", str(row["plain"])]
        cells += [f"{found['batch']} ({found['ratio']:.1f}x)" for found in row["within"].values()]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def third_table() -> str:
    """Plans within a third of the activation peak, or why there is none, a line for each network of the paper."""
    rows = {r["network"].removeprefix("papers_"): r for r in json.loads((RESULTS / "third.json").read_text())["rows"]}
    lines = ["| network | eager's peak | of it activations | within a third of these: planned | measured |"]
    lines.append("|---|---|---|---|---|")
    for network, (name, _) in PAPER.items():
        row = rows[network]
        cells = [name, _mib(row["eager_peak_bytes"]), _mib(row["activation_bytes"])]
        if row["status"] == "ok":
            low, high = (f"{ratio - 1:+.1%}" for ratio in row["ratio_quartiles"])
            cells += [f"{row['planned_ratio'] - 1:+.1%}", f"{row['ratio'] - 1:+.1%} ({low} to {high})"]
        else:
            cells += [f"none: no schedule is below {row['bound_share']:.0%}", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gpu_table() -> str:
    """A line for each launch that trained on a GPU; below them, what failed or was stopped.

    The eager step is of the same network and batch.
    """
    lines = ["| GPU | training | budget | reserved: plain | planned | measured | retries | step | eager's |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    bad = []
    for path in sorted(RESULTS.glob("gpu_*.json")):
        document = json.loads(path.read_text())
        device = document["device"].removeprefix("NVIDIA ")
        bad += [f"- {device}, {end}" for end in bad_ends(document)]
        for entry in document["sections"]:
            report, training = (entry.get("figures", {}).get(name, {}) for name in ("report", "training"))
            if not training or report.get("planned_reserved_bytes") is None:
                continue
            budget = entry["command"][entry["command"].index("--budget") + 1]
            name = " ".join(str(training[k]) for k in ("network", "batch", "precision"))
            name += " NCCL, one rank" * (entry["name"] == "nccl")
            plain, *others = (report[f"{kind}_reserved_bytes"] for kind in ("plain", "planned", "measured"))
            cells = [device, name, budget, _mib(plain) + ", estimated" * is_estimate(plain), *map(_mib, others)]
            cells += [str(report["allocation_retries"]), f"{training['step_seconds'] * 1e3:.1f} ms"]
            eager = eager_of(document, entry).get("step_seconds")
            lines.append(f"| {' | '.join([*cells, '' if eager is None else f'{eager * 1e3:.1f} ms'])} |")
    return "\n".join([*lines, "", *bad] if bad else lines)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"


def with_table(text: str, made: str) -> str:
    """``text`` with the table that was ``made`` between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def points() -> dict[str, list[dict[str, Any]]]:
    """The compared points of each shown network, by falling peak; both planners had in-place operators."""
    rows = json.loads((RESULTS / "partitioner.json").read_text())["rows"]
    wanted = sorted((r for r in rows if r["kinds"] == "in-place" and r["model"] in SHOWN), key=lambda r: r["model"])
    return {m: sorted(of, key=lambda r: -float(r["share"])) for m, of in groupby(wanted, key=lambda r: r["model"])}


def best_so_far(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of torch's points by rising peak, those with a lower overhead than all before: one would use no other."""
    kept: list[dict[str, Any]] = []
    for row in sorted(found, key=lambda r: (r["share"], r["torch_overhead"])):
        if not kept or row["torch_overhead"] < kept[-1]["torch_overhead"]:
            kept.append(row)
    return kept


def drawn() -> dict[str, list[list[float]]]:
    """Share, torch's overhead and ours in % (-1: none) of each mark; the figure carries them as its description."""
    keys = ("share", "torch_overhead", "overhead")
    return {
        m: [[round(100 * r[k], 2) if r[k] is not None else -1 for k in keys] for r in of] for m, of in points().items()
    }


def draw(path: Path) -> None:
    """Draw overhead against the true peak, a panel for each network."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "monetrun", "font.size": 9})
    figure, panels = pyplot.subplots(1, len(SHOWN), figsize=(11, 2.9), sharey=True, layout="constrained")
    found = points()
    for panel, (model, name) in zip(panels, SHOWN.items(), strict=True):
        ours = [r for r in found[model] if r["overhead"] is not None]
        torchs = best_so_far(r for r in found[model] if r["torch_overhead"] is not None)
        style = {"where": "post", "linewidth": 1.2}
        xs = [100 * r["share"] for r in torchs]
        panel.step(xs, [100 * r["torch_overhead"] for r in torchs], color="#b0592b", alpha=0.5, **style)
        panel.plot(xs, [100 * r["torch_overhead"] for r in torchs], "s", color="#b0592b", markersize=4.5)
        panel.plot([100 * r["share"] for r in ours], [100 * r["overhead"] for r in ours], "o-", color="#1f6f8b")
        panel.set_title(name)
        panel.set_xlabel("true peak, % of the plain step's")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("extra compute, %")
    labels = ["torch activation_memory_budget", "monetrun"]
    marks = [pyplot.Line2D([], [], color=c, marker=m) for c, m in (("#b0592b", "s"), ("#1f6f8b", "o"))]
    panels[-1].legend(marks, labels, fontsize=8)
    figure.savefig(path, metadata={"Date": None, "Description": json.dumps(drawn())})
    pyplot.close(figure)


TABLES = {
    ROOT / "README.md": table,
    ROOT / "docs" / "recipes.md": gpu_table,
    ROOT / "docs" / "algorithms.md": whole_table,
    ROOT / "docs" / "commands.md": batch_table,
    ROOT / "docs" / "implementations.md": third_table,
}
"""By page, what makes its table."""


@click.command(help=__doc__)
def main() -> None:
    for page, make in TABLES.items():
        made = make()
        page.write_text(with_table(page.read_text(encoding="utf-8"), made), encoding="utf-8")
    draw(ROOT / "docs" / "overhead.svg")
    (ROOT / "docs" / "badges.svg").write_text(badges(ROOT), encoding="utf-8")


if __name__ == "__main__":
    main()
