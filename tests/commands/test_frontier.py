"""`monetrun frontier`: its options, its table, and its files."""

from __future__ import annotations

import argparse
import errno
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from monetrun.commands import frontier
from monetrun.commands.frontier import check_options, draw, parse_budgets, show, write_json
from monetrun.commands.main import main
from monetrun.core import codec
from monetrun.core.errors import BudgetSyntaxError, UsageError
from monetrun.planning.frontier import Frontier, Point

POINTS = (Point(1000, 1000, 0.0, 0.0, 0.0, "optimal"), Point(500, 490, 0.25, 0.2, 0.05, "feasible", 3),
          Point(100, None, None, 0.2, None, "infeasible"))  # fmt: skip
MADE = Frontier(1000, 400, "greedy", "cpu", POINTS)


def options(**given):
    return argparse.Namespace(**{"points": 8, "budget": "auto", "budgets": "", "json_file": "", "plot": "", **given})


def test_budgets_are_read_one_by_one():
    assert [b.text for b in parse_budgets("0.8x,6GiB, 500MB")] == ["0.8x", "6GiB", "500MB"]
    with pytest.raises(BudgetSyntaxError, match=r"'0\.8y'"):
        parse_budgets("0.9x,0.8y")
    with pytest.raises(UsageError, match="'80%' is a share of the free memory"):
        parse_budgets("0.9x,80%")
    with pytest.raises(BudgetSyntaxError, match="''"):
        parse_budgets("0.9x,")


def test_every_point_is_printed_and_written_as_json(tmp_path, capsys):
    out = io.StringIO()
    show(MADE, "train.py", Console(file=out, width=120, highlight=False))
    rows = [line.split() for line in out.getvalue().splitlines()[3:]]
    assert rows[0] == ["1000", "bytes", "1.00x", "1000", "bytes", "+0.0%", "0.0%", "0.0%"]
    assert rows[1] == ["500", "bytes", "0.50x", "490", "bytes", "+25.0%", "20.0%", "5.0%", "3", "round"]
    assert rows[2] == ["100", "bytes", "0.10x", "-", "-", "20.0%", "-", "under", "the", "smallest"]
    assert " ".join(rows[3]).startswith("round: implementations that differ from eager by rounding")
    write_json(MADE, str(tmp_path / "f.json"))
    assert codec.loads(Frontier, (tmp_path / "f.json").read_text()) == MADE
    write_json(MADE, "-")
    assert codec.loads(Frontier, capsys.readouterr().out) == MADE
    assert json.loads(codec.dumps(MADE))["points"][1]["overhead"] == 0.25


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_plot_has_the_format_that_its_suffix_names(tmp_path, suffix, begins):
    pytest.importorskip("matplotlib")
    path = str(tmp_path / f"f{suffix}")
    check_options(options(plot=path))
    draw(MADE, "train.py $x_1$", path)
    assert (tmp_path / f"f{suffix}").read_bytes().startswith(begins)


def test_a_plot_that_is_not_finished_leaves_the_one_before(tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure
    (tmp_path / "f.png").write_bytes(b"before")

    def half(self, stream, **_):
        stream.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", half)
    with pytest.raises(KeyboardInterrupt):
        draw(MADE, "train.py", str(tmp_path / "f.png"))
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("f.png", b"before")]


def test_options_that_would_fail_after_planning_are_refused_before_it(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"f\.gif"):
        check_options(options(plot=str(tmp_path / "f.gif")))
    for option, name in (("plot", "plot"), ("json", "json_file")):
        with pytest.raises(UsageError, match=f"--{option} .*no such folder"):
            check_options(options(**{name: str(tmp_path / "none" / "f.png")}))
        (tmp_path / "f.png").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match=f"--{option} .*it is a folder"):
            check_options(options(**{name: str(tmp_path / "f.png")}))
    (tmp_path / "f.png").rmdir()
    with pytest.raises(UsageError, match="--budget 6GiB: a frontier goes through many budgets") as refused:
        check_options(options(budget="6GiB"))
    assert refused.value.hint.endswith("--budgets 6GiB")
    with pytest.raises(UsageError, match="--budget 80%") as refused:
        check_options(options(budget="80%"))
    parse_budgets(refused.value.hint.rpartition(" ")[2])
    with pytest.raises(UsageError, match="--points 1"):
        check_options(options(points=1))
    with pytest.raises(BudgetSyntaxError, match="'much'"):
        check_options(options(budgets="much"))
    check_options(options(json_file="-", budgets="0.5x"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="needs matplotlib") as refused:
        check_options(options(plot=str(tmp_path / "f.png")))
    assert "pip install" in refused.value.hint


def test_the_table_is_shown_before_files_are_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frontier, "_solved", lambda *_: MADE)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert main(["frontier", "--json", "f.json", "train.py"]) == 2
    said = capsys.readouterr()
    assert "smallest feasible 400 bytes" in said.out
    assert "--json f.json: No space left on device" in said.err
