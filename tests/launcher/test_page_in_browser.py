"""The page in headless Chromium: what it shows, its keys, and screenshots that are compared with those kept here.

After the page has been changed, keep new ones, and look at them; from the folder ``tests``::

    PYTHONPATH=. python launcher/test_page_in_browser.py
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from monetrun.core.graph import BACKWARD, FORWARD
from monetrun.core.plan import GraphPlan, Plan, Pool
from monetrun.core.step import replay
from monetrun.launcher.page import page_of
from monetrun.planning import planner
from monetrun.planning.frontier import Frontier, Point
from monetrun.planning.intervals import Interval, MeasuredStep, RankIntervals
from monetrun.planning.ledger import ledger
from monetrun.solve.cut import dropping
from support.step_records import chain_record

KEPT = Path(__file__).with_name("screenshots")
RECORD = chain_record(64)
# name: width, height and whether the user prefers dark
VIEWS = {"light": (1000, 1720, False), "dark": (1000, 1720, True), "narrow": (480, 2000, False)}
CELL = 10  # pixels on a side
UNLIKE, FEW = 16, 0.005  # of 255, and the share of cells that may be so: edges of letters differ among releases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]


def page(pool: Pool | None = None, frontier: Frontier | None = None) -> str:
    """The page of a plan that no search decides: what four operators give is computed again."""
    (graph,) = RECORD.graphs
    base = planner.baseline(RECORD)
    inner = [op.outputs[0] for op in graph.operators[: graph.forward_count] if op.name.startswith(("block0", "block1"))]
    schedule = dropping(graph, base.plain_schedules[0], set(inner))
    timeline = replay(RECORD, [schedule])
    plan = Plan(
        graphs=(GraphPlan.of(graph, schedule),),
        budget_bytes=21500,
        plain_peak_bytes=base.plain.peak_bytes,
        planned_peak_bytes=timeline.peak_bytes,
        overhead=timeline.seconds / base.plain.seconds - 1.0,
        bound=0.05,
        status="feasible",
        solver="hierarchical",
        device="cpu",
        torch_version=RECORD.torch_version,
        ledger=ledger(RECORD, timeline),
        pool=pool,
    )
    ranks = [
        RankIntervals(rank, (Interval(FORWARD, "Net", 10, 2000, 10, 1990), Interval(BACKWARD, "Net", 9, 2100, 9, 2100)))
        for rank in range(2)
    ]
    return page_of(plan, RECORD, MeasuredStep(tuple(ranks)), "train.py --lr 0.1", frontier)


def chromium(folder: Path, text: str, *words: str) -> str:
    """What Chromium prints for a page."""
    file = folder / "page.html"
    file.write_text(text)
    calm = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    command = ["chromium", "--headless", *calm, f"--user-data-dir={folder / 'user'}", *words, f"file://{file}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def screenshot(folder: Path, view: str) -> Image.Image:
    """The page as a view shows it."""
    width, height, dark = VIEWS[view]
    shown = [f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={int(not dark)}"]
    chromium(folder, page(), "--force-device-scale-factor=1", *shown, f"--screenshot={folder / 'shot.png'}")
    return Image.open(folder / "shot.png").convert("RGB")


def unlike(one: Image.Image, other: Image.Image) -> float:
    """The share of cells whose colours differ on average."""
    assert one.size == other.size
    cells = [image.resize((image.width // CELL, image.height // CELL), Image.Resampling.BOX) for image in (one, other)]
    worst = ImageChops.difference(*cells).split()
    shades = ImageChops.lighter(ImageChops.lighter(worst[0], worst[1]), worst[2])
    histogram = shades.histogram()
    return sum(histogram[UNLIKE:]) / sum(histogram)


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_looks_as_it_was_last_seen(tmp_path, view):
    found = screenshot(tmp_path, view)
    kept = Image.open(KEPT / f"{view}.png").convert("RGB")
    assert unlike(found, kept) <= FEW
    without = found.copy()  # a chart less would be seen
    without.paste(found.getpixel((2, 2)), (0, 300, found.width, 500))
    assert unlike(without, kept) > FEW


def test_a_browser_shows_the_chart_and_the_tables(tmp_path):
    shown = chromium(tmp_path, page(), "--dump-dom")
    for text in (
        "planned peak",
        "Memory over the step",
        "runs again",
        "block0",
        "Planned and measured, rank 0",
        "again)",
    ):
        assert text in shown
    assert shown.count("<path") == 3  # two profiles, of which one is filled


def test_a_browser_shows_what_other_budgets_cost_where_that_is_known(tmp_path):
    points = (
        Point(64000, 63000, 0.0, -0.01, 0.01, "feasible"),
        Point(40000, 39000, 0.031, 0.02, 0.011, "feasible"),
        Point(20000, None, None, 0.2, None, "unknown"),
        Point(18000, 17500, 0.327, 0.2, 0.127, "feasible"),
    )
    known = Frontier(64000, 18000, "hierarchical", "cpu", points, "exact")
    shown = chromium(tmp_path, page(frontier=known), "--dump-dom")
    for text in ("What other budgets cost", "implementations: exact", "smallest feasible 17.6 KiB", "+32.7%", "0.28x"):
        assert text in shown
    assert shown.count("<circle") == 4  # three plans, and the ring
    assert shown.count("<path") == 5
    assert "What other budgets cost" not in re.sub(
        "<script.*?</script>", "", chromium(tmp_path, page(), "--dump-dom"), flags=re.S
    )


def test_on_a_device_the_peaks_are_reserved_as_the_budget_is_and_say_what_is_allocated_of_it(tmp_path):
    def tiles(pool: Pool | None) -> str:
        dom = chromium(tmp_path, page(pool), "--dump-dom")
        return " ".join(re.sub("<[^>]*>", " ", dom[dom.index('class="tiles"') : dom.index("<h2>")]).split())

    told = tiles(Pool(64 << 10, 16 << 10, 32 << 10))
    assert "plain peak, reserved 64.0 KiB without monetrun; " in told
    assert "budget, reserved 21.0 KiB 0.33x planned peak, reserved 48.0 KiB 0.75x; " in told
    assert told.count(" allocated") == 3
    assert "measured peak, allocated 2.1 KiB 0." in told
    assert not re.search("reserved|allocated", tiles(None))


def test_the_arrow_keys_go_through_the_step(tmp_path):
    press = "document.querySelector('svg').dispatchEvent(new KeyboardEvent('keydown', {key: 'KEY', bubbles: true}))"

    def shown(*keys: str) -> int:
        script = ";".join(press.replace("KEY", key) for key in keys)
        dom = chromium(tmp_path, page().replace("</body>", f"<script>{script}</script></body>"), "--dump-dom")
        at = dom.index(" of 3", dom.index("</svg>"))
        return int(dom[dom.rindex(">", 0, at) + 1 : at])

    first = shown()
    assert shown("ArrowRight") == first + 1
    assert shown("ArrowRight", "ArrowLeft", "ArrowLeft") == first - 1


@pytest.mark.nightly
def test_a_step_of_very_many_moments_is_shown(tmp_path):
    found = page()
    begin = found.index(">", found.index('id="data"')) + 1
    end = found.index("</script>", begin)
    data, times = json.loads(found[begin:end]), 8000
    for side in (data["plain"], data["planned"]):
        side["spans"] = [[times * a, times * b] for a, b in side["spans"]]
        for values in (v for name, v in side.items() if name != "spans"):
            values *= times
    assert len(data["planned"]["nbytes"]) > 1 << 17
    shown = chromium(tmp_path, found[:begin] + json.dumps(data) + found[end:], "--dump-dom")
    assert re.search(rf"\d of {len(data['planned']['nbytes'])}: ", shown)
    assert "Planned and measured, rank 0" in shown


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    for name in VIEWS:
        with tempfile.TemporaryDirectory() as folder:
            colours = screenshot(Path(folder), name).quantize(64, dither=Image.Dither.NONE)
            colours.save(KEPT / f"{name}.png", optimize=True)
    sys.stdout.write(f"{KEPT}\n")
