"""What a trial run must not leave, and trackers that stay silent in it."""

from __future__ import annotations

import os
import subprocess
import sys

from monetrun.runtime import trial_files

# stands for any tracker: its module's name decides
TRACKER = """
import os
def log(folder):
    os.makedirs(os.path.join(folder, "version_0"))
    open(os.path.join(folder, "version_0", "events"), "w").close()
"""
SCRIPT = """
import os, pathlib, sys, tempfile
from monetrun.runtime.trial_files import TrialFiles
TrialFiles(sys.argv[1]).watch()
from tensorboardX import log
log("logs")
open("logs/version_0/parameters", "w").close()  # by the script, in the tracker's folder
open("logs/by_the_script", "w").close()
os.makedirs("data/images")
open("data/images/1", "w").close()
os.makedirs("out/run")
pathlib.Path("out/run/weights").mkdir()
pathlib.Path("results").mkdir(exist_ok=True)
os.mkdir("plain")
open("history", "a").close()
open("there", "a").close()
open("lock", "x").close()
os.close(os.open("lock2", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
folder = tempfile.mkdtemp(dir=".")
with open(os.path.join(folder, "part"), "w") as file:
    file.write("1")
os.rename(os.path.join(folder, "part"), "data/whole")
with open(os.path.join(folder, "part"), "w") as file:
    file.write("1")
os.rename(os.path.join(folder, "part"), ".lr_find_1.ckpt")  # as Lightning's tuner does
try:
    open("no such folder/x", "x")
except FileNotFoundError:
    os._exit(96)
"""


def test_trackers_files_locks_and_temporary_files_are_removed_and_all_else_stays(tmp_path):
    (tmp_path / "tensorboardX.py").write_text(TRACKER)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "there").write_text("kept")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "of_another_run").write_text("kept")
    record = tmp_path / "elsewhere"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([sys.executable, "script.py", str(record)], cwd=tmp_path, env=environment)
    assert done.returncode == 96
    assert (tmp_path / "lock").exists()
    trial_files.remove(str(record))
    (tmp_path / "elsewhere.files").unlink()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [
        *("data/images/1", "data/whole", "history"),
        *("logs/by_the_script", "logs/of_another_run", "script.py", "tensorboardX.py", "there"),
    ]
    assert [(tmp_path / name).exists() for name in ("results", "out", "plain")] == [True, False, False]
    assert [path.name for path in (tmp_path / "logs").iterdir() if path.is_dir()] == []
    trial_files.remove(str(record))  # nothing listed: nothing to do


def test_wandb_and_mlflow_are_silent_whatever_the_script_says(tmp_path):
    (tmp_path / "wandb.py").write_text("def init(project=None, mode='online'): return project, mode\n")
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text(
        "told = []\nset_tracking_uri = told.append\nclass MlflowClient:\n"
        "    def __init__(self, tracking_uri=None, registry_uri=None): told.extend([tracking_uri, registry_uri])\n"
    )
    code = (
        "import wandb; from monetrun.runtime import silent_trackers; silent_trackers.silence();"
        "import importlib.util; assert importlib.util.find_spec('mlflow');"  # as accelerate looks what is installed
        "import mlflow, mlflow;"
        "assert wandb.init('p', mode='online') == ('p', 'disabled'), wandb.init('p');"
        "mlflow.set_tracking_uri('http://there'); mlflow.MlflowClient(tracking_uri='http://there');"
        "assert mlflow.told == [None, None]; assert mlflow.__spec__.name == 'mlflow'"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
