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
os.makedirs("data/images", exist_ok=True)
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
    for ending in (".files", ".began"):
        (tmp_path / f"elsewhere{ending}").unlink()
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [
        *("data/images/1", "data/whole", "history"),
        *("logs/by_the_script", "logs/of_another_run", "script.py", "tensorboardX.py", "there"),
    ]
    assert [(tmp_path / name).exists() for name in ("results", "out", "plain")] == [True, False, False]
    assert [path.name for path in (tmp_path / "logs").iterdir() if path.is_dir()] == []
    trial_files.remove(str(record))  # nothing listed: nothing to do


NEW_FOLDERS = """
import os, pathlib, shutil, subprocess, sys, tempfile
from monetrun.runtime.trial_files import TrialFiles
TrialFiles(sys.argv[1]).watch()
def fill(name, folders="", nbytes=2, how=os.makedirs):
    how(name)
    os.makedirs(f"{name}/{folders}", exist_ok=True)
    pathlib.Path(name, folders, "args.json").write_text("x" * nbytes)
fill("little")
fill("deep/in/it", "logs/more", how=lambda name: pathlib.Path(name).mkdir(parents=True) or os.makedirs(f"{name}/new"))
fill("saved")
with tempfile.NamedTemporaryFile(dir="saved", delete=False) as part:
    part.write(b"1")
os.replace(part.name, "saved/whole")
fill("much", nbytes=(1 << 20) + 1)
fill("much/new")  # a script that finds "much" does not make what is missing in it
fill("summed", nbytes=1 << 19)
fill("summed/a", nbytes=1 << 19)
fill("summed/b", nbytes=1 << 19)
fill("cache_of_a_library")
fill("with_anothers")
subprocess.run(["touch", "with_anothers/file"])
fill("with_moved")
os.rename("of_the_user", "with_moved/of_the_user")
fill("with_link")
os.symlink(os.path.abspath("data"), "with_link/data")
fill("replaced")
shutil.rmtree("replaced")
os.symlink("empty", "replaced")
open("replaced/args.json", "w").close()
fill("may_be_there", how=lambda name: os.makedirs(name, exist_ok=True))
fill("data/new")
fill("data/kept", how=lambda name: None)
"""


def test_a_folder_that_had_to_be_new_is_removed_with_the_little_that_the_trial_alone_has_written_into_it(tmp_path):
    (tmp_path / "script.py").write_text(NEW_FOLDERS)
    (tmp_path / "of_the_user").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "data" / "kept").mkdir(parents=True)
    (tmp_path / "data" / "kept" / "before").write_text("kept")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "script.py", "list"], cwd=tmp_path, env=environment, check=True)
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    trial_files.remove(str(tmp_path / "list"))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert written - left == {
        *("little", "little/args.json", "saved", "saved/args.json", "saved/whole", "data/new", "data/new/args.json"),
        *("deep/in/it", "deep/in/it/new", "deep/in/it/logs", "deep/in/it/logs/more", "deep/in/it/logs/more/args.json"),
        *("with_link", "with_link/args.json", "with_link/data", "replaced"),
    }
    assert (tmp_path / "empty" / "args.json").exists()
    assert (tmp_path / "with_moved" / "of_the_user").read_text() == "kept"


NEW_NAMES = """
import os, socket, sqlite3, sys
from monetrun.runtime.trial_files import TrialFiles
TrialFiles("list").watch()
os.symlink("there", "latest")
os.link("there", "linked")
here, nowhere = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
here.bind("control.sock")
nowhere.bind("\\0abstract")
socket.socket().bind(("127.0.0.1", 0))
open("train.pid", "w").close()
new, old, passing = sqlite3.connect("new.db"), sqlite3.connect("old.db"), sqlite3.connect(":memory:")
new.execute("create table steps (i int)")
new.execute("pragma journal_mode=wal")
new.execute("insert into steps values (1)")
new.commit()
os._exit(0)
"""


def test_links_sockets_databases_and_what_tells_that_something_runs_are_removed(tmp_path):
    (tmp_path / "script.py").write_text(NEW_NAMES)
    (tmp_path / "there").write_text("kept")
    (tmp_path / "old.db").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, check=True)
    made = {"latest", "linked", "control.sock", "train.pid", "new.db", "new.db-wal", "new.db-shm"}
    assert made <= {path.name for path in tmp_path.iterdir()}
    trial_files.remove(str(tmp_path / "list"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"script.py", "there", "old.db", "list.files", "list.began"}


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
