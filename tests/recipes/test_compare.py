"""recipes/compare.py: one tiny network by several methods, and what is said of the results."""

import json
import math
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import compare as recipe
import compare_network
import least_peaks
from lib import comparison, comparison_figure
from lib.compared_networks import NETWORKS, checkpoint_blocks, checkpoint_segments
from lib.other_methods import BLOCKS, EAGER, INDUCTOR_BUDGET, PARTITIONER
from monetrun.core.budget import format_bytes
from monetrun.core.errors import InfeasibleBudget, NoPlanInTime
from monetrun.core.options import Options
from support.paths import DOCS, ROOT

MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"


def row(method, setting, nbytes, ratio, **more):
    found = {"method": method, "setting": setting, "allocated_bytes": nbytes, "reserved_bytes": None, "ratio": ratio}
    return {**found, "ratio_quartiles": [ratio, ratio], **more}


ROWS = [
    row(EAGER, "", 100, 1.0),
    row(BLOCKS, "", 50, 1.5, bitwise={"loss": True, "gradients": True, "buffers": False}),
    row(PARTITIONER, "dp 0.5", 80, 1.2),
    row(PARTITIONER, "ilp 0.5", 90, 1.3),  # slower at a higher peak
    {"method": PARTITIONER, "setting": "greedy 0.5", "same_as": "dp 0.5"},
    row(comparison.FULL, "as dp", 80, 1.23),
    row(comparison.FULL, "smallest", 40, 1.6, bitwise={"loss": True, "gradients": True, "buffers": True}),
    {"method": comparison.EXACT, "setting": "smallest", "same_as": comparison.FULL},
    {"method": comparison.RECOMPUTATION, "setting": "smallest", "reason": "no plan"},
]


def document(rows):
    section = {"name": "gpt", "group": "kernels", "status": "ok", "figures": {"rows": rows}}
    other = {"name": "gpt:inductor", "group": "inductor", "status": "skipped", "reason": "there is no C++ compiler"}
    about = {"device": "A processor", "device_type": "cpu", "threads": 2, "torch": "2.14", "size": "small", "rounds": 7}
    about |= {"commands": ["python recipes/compare.py"], "started": "2026-01-01T00:00:00+00:00"}
    return {**about, "sections": [section, other]}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(recipe, "adopt_orphans", lambda: None)
    monkeypatch.setattr(recipe.signal, "signal", lambda *handler: None)
    return lambda *words: CliRunner().invoke(recipe.main, words)


@pytest.mark.nightly
def test_a_tiny_network_is_trained_by_each_method_within_the_peaks_of_the_others(tmp_path, run):
    out = tmp_path / "compare.json"
    words = ["--networks", "tiny", "--rounds", "1", "--solver-seconds", "0.5", "--threads", "1", "--no-inductor"]
    words += ["--only", "checkpoint, each*", "--only", "monetrun, exact", "--out", str(out), "--page", str(tmp_path)]
    done = run(*words)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [s["status"] for s in found["sections"]] == ["ok", "skipped"]
    rows = comparison.networks(found)["tiny"]
    eager, blocks, *planned = rows
    assert (eager["method"], blocks["method"]) == (EAGER, BLOCKS)
    assert blocks["bitwise"] == {"loss": True, "gradients": True, "buffers": False}  # running means are updated twice
    assert blocks["allocated_bytes"] < eager["allocated_bytes"]
    assert {r["setting"] for r in planned} >= {EAGER, f"as {BLOCKS}", "smallest"}
    for plan in planned:
        assert plan["allocated_bytes"] <= plan["target_bytes"]
        assert plan["allocated_bytes"] == pytest.approx(plan["planned_peak_bytes"], rel=0.02)
        assert plan["bitwise"] == {"loss": True, "gradients": True, "buffers": True}
    assert comparison.further_below(rows) > 0
    assert recipe.page(found, recipe.FIGURE, recipe.bounds(found)) == (tmp_path / recipe.PAGE).read_text()
    assert run(*words, "--resume").exit_code == 0
    assert json.loads(out.read_text())["sections"][0] == found["sections"][0]
    assert "this run of '0.1'" in run(*words, "--resume", "--budgets", "0.1").output


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (
            lambda budget: InfeasibleBudget("below", smallest_bytes=budget + 50 * MIB),
            "budget 200.0 MiB < smallest feasible 250.0 MiB (262144000 bytes)",
        ),
        (
            lambda budget: NoPlanInTime(f"no plan within {budget}"),
            "no plan within 200.0 MiB was found in the solver's time",
        ),
    ],
)
def test_why_there_is_no_plan_is_said_in_bytes_of_one_model(refused, reason):
    def plan(budget, algorithm, options):
        assert budget == 500 * MIB
        raise refused(budget)

    beside = {"compared": None, "plans": {}, "algorithm": "greedy", "options": lambda method: Options()}
    planned = SimpleNamespace(**beside, recorded=SimpleNamespace(plan=plan), others_bytes=lambda: 300 * MIB)
    row = compare_network.Planned.row(planned, comparison.FULL, compare_network.Target(EAGER, 200 * MIB))
    assert (row["target_bytes"], row["reason"]) == (200 * MIB, reason)


def test_only_points_that_one_would_use_are_compared_and_two_percent_are_noise():
    rows = comparison.networks(document(ROWS))["gpt"]
    assert [(v["setting"], v["ratio"], v["ours"], v["holds"]) for v in comparison.verdicts(rows)] == [
        ("", 1.5, 1.6, False),
        ("dp 0.5", 1.2, 1.23, False),
    ]
    faster = [dict(r, ratio=1.22) if r["setting"] == "as dp" else r for r in ROWS]
    told = comparison.verdicts(comparison.networks(document(faster))["gpt"])
    assert [v["holds"] for v in told] == [False, True]
    assert comparison.further_below(rows) == pytest.approx(0.2)
    assert "no slower at 0 of 2 peaks of the others; monetrun goes 20% below" in comparison.summary("gpt", rows)


def test_inductors_peaks_are_counted_apart():
    rows = [*ROWS, row(INDUCTOR_BUDGET, "dp 0.5", 80, 0.7)]
    assert comparison.held_at(rows, comparison.EAGERS_KERNELS) == "0 of 2 peaks"
    assert comparison.held_at(rows, (INDUCTOR_BUDGET,)) == "0 of 1 peaks"
    assert comparison.held_at(ROWS, (INDUCTOR_BUDGET,)) == comparison.held_in_its_format(rows) == ""
    rows.append(row(comparison.CHANNELS_LAST, "as dp", 80, 0.71))
    assert comparison.held_at(rows, (INDUCTOR_BUDGET,)) == "0 of 1 peaks"
    assert comparison.held_in_its_format(rows) == "1 of 1 peaks"


def test_reserved_bytes_count_where_there_are_any():
    assert comparison.bytes_of(row(EAGER, "", 100, 1.0)) == 100
    assert comparison.bytes_of({"allocated_bytes": 100, "reserved_bytes": 120}) == 120


def test_without_times_the_page_has_memory_alone():
    untimed = [{k: v for k, v in r.items() if not k.startswith("ratio")} for r in ROWS]
    rows = comparison.networks(document(untimed))["gpt"]
    assert [v["holds"] for v in comparison.verdicts(rows)] == [None, None]
    text = comparison.page(document(untimed), "comparison.svg")
    assert "no times were taken" in text
    assert "| GPT | 0.0 MiB | - | - | - | 50% | checkpoint, each block | 40% | 20% | - | - |" in text
    eager_bytes, ours_bytes = (comparison.bytes_of(r) for r in (rows[0], comparison.lowest(rows, *comparison.OURS)))
    bounded = comparison.page(document(untimed), "comparison.svg", {"gpt": ours_bytes * 4 // 5})
    assert f"| 40% | 20% | {ours_bytes * 4 // 5 / eager_bytes:.0%} | 25.0% |" in bounded
    assert "least_peaks.py" in bounded
    assert "least_peaks.py" not in text


def test_the_page_says_what_differs_and_what_was_not_measured():
    text = comparison.page(document(ROWS), "comparison.svg")
    assert "| checkpoint, each block | - | 0.0 MiB | 50% | x1.50 (1.50 to 1.50) | not buffers |" in text
    assert "| monetrun, recomputation only | smallest | no plan |" in text
    assert "- gpt:inductor: there is no C++ compiler" in text


def test_the_figure_has_a_mark_for_each_point_that_one_would_use():
    drawn = comparison_figure.drawn(document(ROWS))
    assert drawn["gpt"]["monetrun"] == [[0.4, 0.6], [0.8, 0.23]]
    tree = ElementTree.fromstring(comparison_figure.figure(document(ROWS)))
    assert json.loads(tree.find(f"{SVG}desc").text) == drawn
    (panel,) = tree.findall(f"{SVG}g")
    assert sorted(m.get("class") for m in panel.iter() if m.get("class")) == ["circle", "circle", "square", "triangle"]


@pytest.mark.parametrize("change", [checkpoint_blocks, checkpoint_segments])
def test_checkpointed_networks_compute_what_the_plain_ones_do(change):
    def loss_and_gradients(change):
        torch.manual_seed(0)
        model, loss = NETWORKS["tiny"].build("small", torch.device("cpu"))
        count = change(model, NETWORKS["tiny"]) if change else 0
        value = loss()
        value.backward()
        return count, [value, *(p.grad for p in model.parameters())]

    _, expected = loss_and_gradients(None)
    count, found = loss_and_gradients(change)
    assert count == {checkpoint_blocks: 4, checkpoint_segments: 2}[change]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_committed_page_and_figure_are_those_of_the_results():
    found = json.loads(recipe.RESULT.read_text(encoding="utf-8"))
    command = "python recipes/compare.py --only-page"
    text = recipe.page(found, recipe.FIGURE, recipe.bounds(found))
    assert text == (DOCS / recipe.PAGE).read_text(encoding="utf-8"), command
    assert comparison_figure.figure(found) == (DOCS / recipe.FIGURE).read_text(encoding="utf-8"), command


def test_budgets_that_were_refused_are_the_targets_and_below_the_smallest_that_was_planned():
    refused = []
    for rows in comparison.networks(json.loads(recipe.RESULT.read_text(encoding="utf-8"))).values():
        for one in (r for r in rows if r.get("reason", "").startswith("budget ")):
            (smallest,) = (r for r in rows if (r["method"], r["setting"]) == (one["method"], "smallest"))
            told = f"{format_bytes(one['target_bytes'])} < smallest feasible"
            refused.append(one["reason"])
            assert one["reason"] == f"budget {told} {format_bytes(smallest['planned_peak_bytes'], exact=True)}"
    assert len(refused) == 2


def test_the_readme_has_the_verdict_of_the_results():
    networks = comparison.networks(json.loads(recipe.RESULT.read_text(encoding="utf-8")))
    held, peaks = zip(
        *(comparison.held_at(rows, comparison.EAGERS_KERNELS).split()[::2] for rows in networks.values()), strict=True
    )
    below = [comparison.further_below(rows) for rows in networks.values()]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert len(networks) == 12
    assert held == peaks
    assert f"twelve networks: at each of the {sum(map(int, peaks))} true peaks" in text
    assert f"{min(below):.0%} to {max(below):.0%} below".replace("%", "", 1) in text


def test_the_questions_have_the_verdict_on_inductor():
    networks = comparison.networks(json.loads(recipe.RESULT.read_text(encoding="utf-8")))
    ours = (*comparison.OURS, comparison.CHANNELS_LAST)
    told = [v for rows in networks.values() for v in comparison.verdicts(rows, (INDUCTOR_BUDGET,), ours)]
    slower = max(v["ours"] / v["ratio"] - 1 for v in told)
    text = " ".join((DOCS / "faq.md").read_text(encoding="utf-8").split())
    as_it_is = [v for rows in networks.values() for v in comparison.verdicts(rows, (INDUCTOR_BUDGET,))]
    assert f"no slower for {sum(v['holds'] for v in as_it_is)} of {len(told)} networks" in text
    assert f"for {sum(v['holds'] for v in told)} where the script uses the memory format" in text
    assert f"at most {math.ceil(100 * slower)}% slower" in text
    assert all(v["bound"] > v["ratio"] * (1 + comparison.NOISE) for v in as_it_is if not v["holds"])


@pytest.mark.nightly
def test_the_smallest_feasible_peak_lies_between_its_bound_and_the_plain_peak():
    found = least_peaks.least_peak("tiny", "small", 1.0)
    assert 0 < found["bound_bytes"] <= found["smallest_bytes"] < found["plain_bytes"]
