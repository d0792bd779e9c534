"""A small real ImageFolder, made from pictures that ship inside Python packages.

It is for machines without ImageNet, and it is not a benchmark. Its classes are tiles: each picture is cut into a grid,
and a class consists of overlapping windows of one tile. A network learns to tell them apart within minutes; every fifth
window is kept for validation, and overlaps with windows that it was trained on.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from PIL import Image

# package -> photographs in its folder; those that its wheel does not contain are left out
SOURCES = {
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
    "skimage": ("data/astronaut.png", "data/chelsea.png", "data/coffee.png", "data/rocket.jpg", "data/retina.jpg"),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}
GRID = (2, 4)  # rows and columns of tiles in a picture
WINDOW = 96
STRIDE = 16


def pictures() -> list[Path]:
    """The photographs that are installed; all are at least four windows wide and two high."""
    found = []
    for package, names in SOURCES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0])
            found += [folder / name for name in names if (folder / name).is_file()]
    return found


def windows(image: Image.Image, row: int, column: int) -> list[Image.Image]:
    """The windows of one tile, from left to right and top to bottom."""
    height, width = image.height // GRID[0], image.width // GRID[1]
    left, top = column * width, row * height
    return [
        image.crop((x, y, x + WINDOW, y + WINDOW))
        for y in range(top, top + height - WINDOW + 1, STRIDE)
        for x in range(left, left + width - WINDOW + 1, STRIDE)
    ]


def make(folder: Path) -> None:
    """Make ``folder``/train and ``folder``/val, unless they are there.

    Raises:
        SystemExit: no package with pictures is installed.
    """
    if (folder / "val").is_dir():
        return
    found = pictures()
    if not found:
        raise SystemExit(f"no pictures in {', '.join(SOURCES)}: pip install scikit-learn")
    being_made = folder.with_name(f"{folder.name}.{os.getpid()}")  # other ranks may make it at the same time
    for path in found:
        with Image.open(path) as opened:
            image = opened.convert("RGB")
        for row in range(GRID[0]):
            for column in range(GRID[1]):
                name = f"{path.stem}_{row}{column}"
                for i, window in enumerate(windows(image, row, column)):
                    to = being_made / ("val" if i % 5 == 2 else "train") / name
                    to.mkdir(parents=True, exist_ok=True)
                    window.save(to / f"{i:03}.png")
    try:
        being_made.rename(folder)
    except OSError:  # another rank was faster
        shutil.rmtree(being_made)
        if not (folder / "val").is_dir():
            raise
