"""Seconds until a launched script runs, and of its first step: torchrun, monetrun (cached plan), torch.compile.

    python recipes/bench_launch.py --runs 5 --out recipes/results/launch.json

The commands run in turn; figures are medians in seconds. `start` is from the command to the script's first line,
`first` its first training step (capture and compilation included), `later` the median of the others.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """
import time
began = time.time()
import json, sys
import torch
import torch.nn.functional as F
import torchvision

torch.manual_seed(0)
model = torchvision.models.resnet18(num_classes=10)
if sys.argv[2] == "compile":
    model.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = torch.randn(32, 3, 64, 64), torch.randint(0, 10, (32,))
seconds = []
for _ in range(4):
    start = time.perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
json.dump({"began": began, "steps": seconds}, open(sys.argv[1], "w"))
"""


def run(command, folder, mode):
    out = folder / "out.json"
    start = time.time()
    subprocess.run([*command, str(folder / "script.py"), str(out), mode], check=True, capture_output=True)
    found = json.loads(out.read_text())
    return {
        "start": found["began"] - start,
        "first": found["steps"][0],
        "later": statistics.median(found["steps"][1:]),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        os.environ["MONETRUN_CACHE"] = str(folder / "cache")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        planned = [sys.executable, "-m", "monetrun", "--budget", "0.95x", "--solver-seconds", "2"]
        commands = {
            "torchrun": (torchrun, "plain"),
            "monetrun, cached plan": (planned, "plain"),
            "torchrun, torch.compile": (torchrun, "compile"),
        }
        for command, mode in commands.values():  # fill the caches
            run(command, folder, mode)
        rows = {label: [] for label in commands}
        for _ in range(args.runs):
            for label, (command, mode) in commands.items():
                rows[label].append(run(command, folder, mode))
    medians = {
        label: {key: statistics.median(row[key] for row in found) for key in found[0]} for label, found in rows.items()
    }
    for label, row in medians.items():
        print(f"{label:25} start {row['start']:5.2f}  first step {row['first']:6.2f}  later {row['later']:6.3f}")
    extra = medians["monetrun, cached plan"]["start"] - medians["torchrun"]["start"]
    print(f"monetrun starts {extra:+.2f} s after torchrun")
    if args.out:
        import torch

        found = {"torch": torch.__version__, "runs": args.runs, "medians": medians, "extra_start_seconds": extra}
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
