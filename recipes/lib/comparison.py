"""What recipes/compare.py has found: the points of each method that are worth using, verdicts, and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lib.compared_networks import NETWORKS
from lib.other_methods import (
    AOT,
    BLOCKS,
    EAGER,
    EAGER_CHANNELS_LAST,
    INDUCTOR,
    INDUCTOR_BUDGET,
    PARTITIONER,
    SEGMENTS,
)

RECOMPUTATION, IMPLEMENTATIONS = "monetrun, recomputation only", "monetrun, implementations only"
EXACT, FULL = "monetrun, exact", "monetrun"
CHANNELS_LAST = "monetrun, channels-last"
METHODS = (
    *(EAGER, EAGER_CHANNELS_LAST, BLOCKS, SEGMENTS, AOT, PARTITIONER, INDUCTOR, INDUCTOR_BUDGET),
    *(RECOMPUTATION, IMPLEMENTATIONS, EXACT, FULL, CHANNELS_LAST),
)
FAMILIES = ((BLOCKS, SEGMENTS), (PARTITIONER,))  # whose peaks monetrun plans for
EAGERS_KERNELS = (BLOCKS, SEGMENTS, PARTITIONER)
RIVALS = (*EAGERS_KERNELS, INDUCTOR_BUDGET)
OURS = (EXACT, FULL)
BOUND = """- **No schedule below**: a bound on the peak of every schedule with any of the implementations
  (`recipes/least_peaks.py`). monetrun's is measured, with what the script holds beside.
"""
NOISE = 0.02  # a step that is slower by at most this share counts as no slower
Row = Mapping[str, Any]


def bytes_of(row: Row) -> int:
    """What a step takes of the device: on CUDA what the allocator reserves, else what is allocated."""
    return int(row["allocated_bytes"] if row.get("reserved_bytes") is None else row["reserved_bytes"])


def ratio_of(row: Row) -> float:
    """Its seconds over eager's; 1 where no times were taken."""
    return float(row.get("ratio", 1.0))


def cheapest(rows: Iterable[Row], *methods: str) -> list[Row]:
    """Of the methods' points by rising peak, those that are faster than all before: one would use no other."""
    kept: list[Row] = []
    own = (r for r in rows if r["method"] in methods and "allocated_bytes" in r)
    for row in sorted(own, key=lambda r: (bytes_of(r), ratio_of(r))):
        if not kept or ratio_of(row) < ratio_of(kept[-1]):
            kept.append(row)
    return kept


def networks(document: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The rows of each measured network, eager's first; a plan that serves two of our methods stands for both."""
    found: dict[str, list[Row]] = {}
    for name in NETWORKS:
        rows: list[Row] = []
        for section in document["sections"]:
            if section["name"].partition(":")[0] == name:
                rows += [r for r in section.get("figures", {}).get("rows", ()) if not (rows and r["method"] == EAGER)]
        if rows:
            found[name] = [_resolved(r, rows) for r in rows]
    return found


def _resolved(row: Row, rows: Sequence[Row]) -> Row:
    if row["method"] != EXACT or "same_as" not in row:
        return row
    (same,) = (r for r in rows if (r["method"], r["setting"]) == (row["same_as"], row["setting"]))
    return {**same, "method": EXACT}


def lowest(rows: Iterable[Row], *methods: str) -> Row | None:
    """The point of the methods with the lowest peak."""
    return min((r for r in rows if r["method"] in methods and "allocated_bytes" in r), key=bytes_of, default=None)


def verdicts(rows: Sequence[Row], rivals: Sequence[str] = RIVALS, ours: Sequence[str] = OURS) -> list[dict[str, Any]]:
    """For each point of the rivals that one would use: our fastest step within its peak, and whether it is slower.

    ``ours`` is that step's ratio to eager, None where no plan is within the peak; ``holds`` is None without times.
    ``bound`` is a ratio that no schedule is below, None where none was planned for that very peak.
    """
    found = []
    for method in rivals:
        for row in cheapest(rows, method):
            own = (r for r in rows if r["method"] in ours and "allocated_bytes" in r)
            within = [r for r in own if bytes_of(r) <= bytes_of(row)]
            best = min(within, key=ratio_of, default=None)
            timed = "ratio" in row
            holds = best is not None and ratio_of(best) <= ratio_of(row) * (1 + NOISE)
            found.append(
                {
                    "method": method,
                    "setting": row["setting"],
                    "share": share(row, rows),
                    "ratio": row.get("ratio"),
                    "ours": None if best is None else best.get("ratio"),
                    "our_share": None if best is None else share(best, rows),
                    "holds": holds if timed else None,
                    "bound": _bound_at(row, rows),
                }
            )
    return found


def _bound_at(row: Row, rows: Sequence[Row]) -> float | None:
    """``bound_ratio`` of the plan that was made for the row's peak."""
    place = (FULL, f"as {row['method']} {row['setting']}")
    return next((r.get("bound_ratio") for r in rows if (r["method"], r["setting"]) == place), None)


def share(row: Row, rows: Sequence[Row]) -> float:
    """The row's peak as a share of eager's."""
    return bytes_of(row) / bytes_of(rows[0])


def further_below(rows: Sequence[Row]) -> float | None:
    """By which share our lowest peak is below the lowest of all others."""
    other, ours = lowest(rows, *RIVALS), lowest(rows, *OURS)
    return None if other is None or ours is None else 1 - bytes_of(ours) / bytes_of(other)


def held_at(rows: Sequence[Row], rivals: Sequence[str], ours: Sequence[str] = OURS) -> str:
    """At how many of the rivals' peaks our step is no slower; empty without times."""
    told = [v for v in verdicts(rows, rivals, ours) if v["holds"] is not None]
    return f"{sum(v['holds'] for v in told)} of {len(told)} peaks" if told else ""


def held_in_its_format(rows: Sequence[Row]) -> str:
    """At how many of inductor's peaks our step is no slower in the memory format that inductor chooses."""
    measured = any(r["method"] == CHANNELS_LAST and "allocated_bytes" in r for r in rows)
    return held_at(rows, (INDUCTOR_BUDGET,), (*OURS, CHANNELS_LAST)) if measured else ""


def summary(name: str, rows: Sequence[Row]) -> str:
    """The verdict on one network, as a line."""
    parts = []
    if held := held_at(rows, EAGERS_KERNELS):
        parts.append(f"no slower at {held} of the others")
    if held := held_at(rows, (INDUCTOR_BUDGET,)):
        parts.append(f"at {held} of inductor's")
    if held := held_in_its_format(rows):
        parts.append(f"channels-last at {held} of inductor's")
    other, ours, below = lowest(rows, *RIVALS), lowest(rows, *OURS), further_below(rows)
    if below is not None and other is not None and ours is not None:
        word = "below" if below >= 0 else "above"
        parts.append(
            f"monetrun goes {abs(below):.0%} {word} the lowest of them"
            f" ({share(ours, rows):.0%} of eager's peak; {share(other, rows):.0%} by {other['method']})"
        )
    return f"{NETWORKS[name].title}: {'; '.join(parts)}"


# ---- tables in Markdown


def overview(found: Mapping[str, Sequence[Row]], bounds: Mapping[str, int] = MappingProxyType({})) -> str:
    """A line for each network: the verdict. ``bounds``: bytes below which no schedule's peak is, by network."""
    lines = [
        "| network | eager's peak | no slower at | at inductor's | channels-last | lowest of the others | by"
        " | monetrun's | below by | no schedule below | above that by |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, rows in found.items():
        other, ours, below = lowest(rows, *RIVALS), lowest(rows, *OURS), further_below(rows)
        cells = [NETWORKS[name].title, _mib(bytes_of(rows[0]))]
        held = (held_at(rows, EAGERS_KERNELS), held_at(rows, (INDUCTOR_BUDGET,)), held_in_its_format(rows))
        cells += [h or "-" for h in held]
        cells += [_percent(other, rows), other["method"] if other else "-", _percent(ours, rows)]
        cells.append("-" if below is None else f"{below:.0%}")
        bound = bounds.get(name)
        cells.append("-" if bound is None else f"{bound / bytes_of(rows[0]):.0%}")
        cells.append("-" if bound is None or ours is None else f"{max(0.0, bytes_of(ours) / bound - 1):.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def points(rows: Sequence[Row]) -> str:
    """A line for each point of each method that one would use; what could not be measured, with its reason."""
    lines = ["| method | setting | peak | of eager's | step | bitwise eager's |", "|---|---|---|---|---|---|"]
    for method in METHODS:
        for row in reversed(cheapest(rows, method)):
            cells = [method, row["setting"] or "-", _mib(bytes_of(row)), f"{share(row, rows):.0%}", step_text(row)]
            lines.append(f"| {' | '.join([*cells, bits(row)])} |")
        for row in (r for r in rows if r["method"] == method and "reason" in r):
            lines.append(f"| {method} | {row['setting'] or '-'} | {row['reason']} | | | |")
    return "\n".join(lines)


def step_text(row: Row) -> str:
    """The ratio to eager's step, with the quartiles of the pairs."""
    if "ratio" not in row or row["method"] == EAGER:
        return "-"
    low, high = row["ratio_quartiles"]
    return f"x{row['ratio']:.2f} ({low:.2f} to {high:.2f})"


def bits(row: Row) -> str:
    """What is bitwise eager's."""
    if "bitwise" not in row:
        return "-"
    differing = [name for name, same in row["bitwise"].items() if not same]
    if not differing:
        return "yes"
    return f"not {', '.join(differing)}" + (f" ({row['difference']:.0e})" if "gradients" in differing else "")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _percent(row: Row | None, rows: Sequence[Row]) -> str:
    return "-" if row is None else f"{share(row, rows):.0%}"


def page(document: Mapping[str, Any], figure: str, bounds: Mapping[str, int] = MappingProxyType({})) -> str:
    """docs/comparison.md; ``bounds`` as for ``overview``."""
    found = networks(document)
    timed = any("ratio" in r for rows in found.values() for r in rows)
    held = "what the allocator reserves" if document["device_type"] == "cuda" else "what the CPU's allocator counts"
    runs = len(document["commands"])
    made = f"`{document['commands'][0]}`" + (
        " and runs of single networks (`commands` in the results)" if runs > 1 else ""
    )
    text = f"""# Comparison

Made by {made}, on {document["device"]} ({document["threads"]} threads), torch {document["torch"]},
{document["started"][:10]}, size `{document["size"]}`; all numbers are in `recipes/results/compare.json`.

![Extra time against the true peak, by network]({figure})

- A **peak** is {held} in a step, with weights, gradients and optimizer state (SGD with momentum, float32).
- A **step** is a ratio to eager's, the median over {document["rounds"]} pairs of steps in turns in one process, with
  quartiles.{"" if timed else " The device was a stand-in: no times were taken."}
- Only points are listed that one would use: no other point of the method is faster within the same peak.
- **activation_memory_budget** is torch's partitioner. With `aot_eager` its kernels are eager's; each budget was tried
  with its solvers dp, ilp and greedy.
- monetrun planned for the peaks that the others reach, for a third of eager's activations, and for its smallest.
  **exact** allows implementations bitwise identical to eager's only.
- **Bitwise** are loss, gradients and buffers (running statistics) of a step from the same weights and seed; in brackets
  the 2-norm of the gradients' difference over their own: 1 is as far as gradients of other dropout masks are.
- **No slower**: at the peak of a checkpointed or partitioned step, monetrun's peak is no higher, and its step at most
  {NOISE:.0%} slower. Inductor's peaks are counted apart, since its kernels are others: those
  with a budget; inductor without one is in the tables alone.
- **Channels-last**: on a CPU inductor brings convolutions into this memory format, whatever the script's. A script does
  so itself by `model.to(memory_format=torch.channels_last)`. Of networks where inductor was faster, eager's and
  monetrun's steps were measured with that line, too, beside the eager step without it: the column has at how many of
  inductor's peaks monetrun's is no slower, with the line or without. `-`: not measured.
{BOUND if bounds else ""}
{overview(found, bounds)}
"""
    for name, rows in found.items():
        text += f"\n## {NETWORKS[name].title}\n\n{points(rows)}\n"
    missing = [(s["name"], why) for s in document["sections"] if (why := _unmeasured(s))]
    if missing:
        text += "\n## Not measured\n\n" + "\n".join(f"- {name}: {why}" for name, why in missing) + "\n"
    return text


def _unmeasured(section: Mapping[str, Any]) -> str:
    """Why a section has nothing, or not all; empty if it has."""
    if section["status"] == "skipped":
        return str(section["reason"])
    return "; ".join(": ".join(filter(None, f.values())) for f in section.get("failures", ()))
