"""Runs ``python -m monetrun`` and torchrun in forks of a process that has imported torch, which takes two seconds.

The launcher is the same code in a process of its own; what it starts are new interpreters, as ever.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import psutil

MONETRUN, TORCHRUN = "monetrun", "torch.distributed.run"
LIMIT_SECONDS = 300.0  # for one launch: where ranks wait for each other, torch does for half an hour

# what a rank has printed that was aborted as it ended, seldom, and under torchrun as well; its cause is not known
_ABORTED = "terminate called without an active exception"

# variables that are read when libraries are loaded, before torch is imported
_OF_LIBRARIES = ("LD_", "STANDIN_GPU")
_servers: dict[object, subprocess.Popen[str]] = {}


def run(
    module: str,
    *words: object,
    expect: int | None = 0,
    environment: Mapping[str, str] | None = None,
    number: int = 0,
    again: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m MODULE WORDS`` in the present folder.

    Args:
        module: ``MONETRUN`` or ``TORCHRUN``.
        words: of the command line.
        expect: the exit code; None: any. A launch that ends otherwise since a rank is aborted so is made once more,
            with a warning.
        environment: the present one by default.
        number: what runs at the same time has different ones.
        again: it may be made once more.
    """
    variables = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as outputs:
        paths = [os.path.join(outputs, name) for name in ("stdout", "stderr")]
        request = {
            "module": module,
            "words": [str(word) for word in words],
            "folder": os.getcwd(),
            "environment": variables,
            "outputs": paths,
        }
        server = _started(variables, number)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        ended = select.select([server.stdout], [], [], LIMIT_SECONDS)[0]
        if not ended:
            _end(server)
        answer = server.stdout.readline()
        out, err = (Path(path).read_text() for path in paths)
        assert ended, f"it did not end within {LIMIT_SECONDS} s: {out}\n{err}"
        assert answer, "the process that launches has ended"
    done = subprocess.CompletedProcess([module, *map(str, words)], json.loads(answer), out, err)
    if again and expect not in (None, done.returncode) and _ABORTED in err:
        warnings.warn(f"made once more: {done.args}: {err}", stacklevel=2)
        return run(module, *words, expect=expect, environment=environment, number=number, again=False)
    assert expect is None or done.returncode == expect, done.stderr
    return done


def _end(server: subprocess.Popen[str]) -> None:
    """With all that it started."""
    for process in [*psutil.Process(server.pid).children(recursive=True), server]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _started(variables: Mapping[str, str], number: int) -> subprocess.Popen[str]:
    of_libraries = {name: value for name, value in variables.items() if name.startswith(_OF_LIBRARIES)}
    key = (number, *sorted(of_libraries.items()))
    if key not in _servers or _servers[key].poll() is not None:
        others = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LIBRARIES)}
        _servers[key] = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**others, **of_libraries},
        )
        atexit.register(_servers[key].kill)
    return _servers[key]


# ---- the process that forks


def _serve() -> None:
    sys.path.pop(0)  # the folder of this file
    import torch.distributed.run  # noqa: F401

    import monetrun.commands.main
    import monetrun.commands.run  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    requests, own = sys.stdin, os.open(os.devnull, os.O_RDONLY)
    os.dup2(2, 1)
    for line in requests:
        pid = os.fork()
        if pid == 0:
            os.dup2(own, 0)
            answers.close()
            _launch(**json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        answers.flush()


def _launch(module: str, words: list[str], folder: str, environment: dict[str, str], outputs: list[str]) -> None:
    """In a new process: become the launcher."""
    import runpy
    import threading
    import traceback

    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    sys.path.insert(0, folder)
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    _serve()
