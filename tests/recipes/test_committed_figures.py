"""What is promised of several ranks holds in the figures that are committed."""

import json

from support.paths import ROOT

RESULTS = ROOT / "recipes" / "results"


def figures(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_a_step_on_a_slow_link_takes_no_longer_than_under_torchrun_beyond_what_is_planned():
    rows = figures("overlap")["rows"]
    assert {(r["case"], r["share"], r["link"]) for r in rows} == {
        (case, share, link) for case in ("resnet", "gpt") for share in (1.0, 0.6) for link in (0.5, 1.0, 2.0)
    }
    for row in rows:
        most = 1.03 if row["share"] == 1.0 else 1.05 * (1 + row["planned_overhead"])
        assert row["step_ratio"] <= most, row


def test_sharded_modules_keep_what_makes_the_step_no_slower_than_the_better_of_all_and_none():
    found = figures("kept_parameters")["over_the_better"]
    assert len(found) == 3
    for link, over in found.items():
        assert over["most"] <= 0, link
        assert over["least"] < 0, link
        assert over["below_both"] > 0, link


def test_a_plan_for_a_cluster_takes_less_than_two_minutes():
    (row,) = figures("cluster")["rows"]
    assert (row["nodes"], row["gpus"], row["model"]) == (16, 8, "GPT-2 XL")
    assert row["seconds"] < 120
    assert row["planned_peak_bytes"] <= row["budget_bytes"] < row["plain_peak_bytes"]
