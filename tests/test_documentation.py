"""README and docs/: links lead somewhere, options and exit codes are all there, tables are those of the results."""

import argparse
import dataclasses
import html
import importlib.util
import json
import re
import subprocess
import sys

import pytest

import landing
from lib.badges import badges
from monetrun.commands.doctor_checks import Check
from monetrun.core import errors
from monetrun.core.plan import Plan
from monetrun.launcher.options import add_launch_options
from monetrun.launcher.rank_figures import RankFigures
from monetrun.launcher.report import Outcome, outcome_json
from monetrun.machine.store import Entry
from monetrun.planning.batch import Found, Verified
from monetrun.planning.check import CheckReport, Difference, OperatorTime
from monetrun.planning.explain import Explanation, Held, Large, ModuleCost, Used
from monetrun.planning.frontier import Frontier, Point
from monetrun.planning.intervals import Interval
from support.paths import DOCS, ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def anchors(text):
    """Of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_a_heading(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in (link for link in links if "://" not in link):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            assert heading in anchors(target.read_text(encoding="utf-8")), link


def test_the_readme_is_short_and_its_figure_is_made_from_the_results():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    (described,) = re.findall(r"<dc:description>(.*?)</dc:description>", (DOCS / "overhead.svg").read_text(), re.DOTALL)
    assert json.loads(html.unescape(described)) == landing.drawn(), "python recipes/landing.py"


def test_the_badges_are_true():
    assert (DOCS / "badges.svg").read_text(encoding="utf-8") == badges(ROOT), "python recipes/landing.py"


@pytest.mark.parametrize("page", landing.TABLES, ids=lambda page: page.name)
def test_tables_are_made_from_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert landing.with_table(text, landing.TABLES[page]()) == text, "python recipes/landing.py"


def test_all_options_of_a_launch_are_described():
    parser = argparse.ArgumentParser(add_help=False)
    add_launch_options(parser)
    described = (DOCS / "commands.md").read_text()
    options = [option for action in parser._actions for option in action.option_strings]
    assert options
    assert [option for option in options if f"`{option}" not in described] == []


def test_all_names_of_json_are_described():
    described = set(re.findall(r"`(\w+)`", (DOCS / "json.md").read_text()))
    kinds = (
        *(Plan, Interval, RankFigures, Frontier, Point, Found, Verified, CheckReport, Difference, OperatorTime),
        *(Explanation, Held, Large, ModuleCost, Used, Entry, Check),
    )
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    names |= outcome_json(Outcome(None, None, None, None, 0, None, 0, (), None)).keys()
    assert sorted(names - described) == []


def test_all_exit_codes_have_a_section_and_a_line():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if isinstance(getattr(kind, "exit_code", None), int)}
    assert codes >= {2, 70, 80, 85}
    sections = re.findall(r"^## (\d+):", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert sorted(codes) == [int(code) for code in sections]
    rows = re.findall(r"^\| (\d+) \|", (DOCS / "exit-codes.md").read_text(), re.MULTILINE)
    assert codes <= {int(code) for code in rows}


def test_recipes_that_are_named_exist():
    text = (DOCS / "recipes.md").read_text()
    scripts = re.findall(r"`(\w+\.py)`", text)
    assert scripts
    assert [name for name in scripts if not (ROOT / "recipes" / name).exists()] == []
    present = {path.name for path in (ROOT / "recipes").glob("*.py")}
    assert present - set(scripts) <= {
        "capture_instances.py",
        "gpu_training.py",
        "matrix_training.py",
        "step_pairs.py",
    }, "describe it"
    results = re.findall(r"`(\w+\.json)`", text)
    assert [name for name in results if not (ROOT / "recipes" / "results" / name).exists()] == []


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="pip install '.[docs]'")
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "troubleshooting" / "index.html").exists()
