"""The command line: torchrun's options and ours, the check of the script, messages and exit codes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from monetrun import commands
from monetrun.commands import SUMMARIES
from monetrun.commands import main as cli
from monetrun.core.errors import MonetrunError, NeverTrained, ScriptNotFound, UsageError
from monetrun.launcher.options import LaunchOptions
from monetrun.launcher.parser import LaunchParser, help_text, launch_parser
from monetrun.launcher.ranks import local_world_size
from monetrun.launcher.script import _near_modules, check_script
from support.paths import SCRIPTS

BEHAVE = str(SCRIPTS / "behave.py")

pytestmark = pytest.mark.usefixtures("plain_surroundings")


def parsed(*words: str) -> LaunchOptions:
    return launch_parser().parse_launch(words)[0]


def outcome(parser: argparse.ArgumentParser, words: list[str]) -> object:
    """The namespace of torchrun's options that parsing gives, or the exit code of its failure."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return {k: v for k, v in vars(parser.parse_args(words)).items() if k not in parser_own}
    except UsageError:
        return 2
    except SystemExit as end:
        return end.code


parser_own: frozenset[str] = frozenset()


def test_every_abbreviation_of_every_torchrun_option_means_what_it_means_to_torchrun(monkeypatch):
    from torch.distributed import run

    plain, ours = run.get_args_parser(), launch_parser()
    monkeypatch.setattr(sys.modules[__name__], "parser_own", ours.own)
    values = {"start_method": "fork", "numa_binding": "node", "print_completion": "bash"}
    tried = accepted = 0
    for option, action in plain._option_string_actions.items():
        value = values.get(action.dest, "2")
        for length in range(2, len(option) + 1):
            word = option[:length]
            if word == "--":
                continue
            flag = [word, "train.py", "--budget", "x"]
            for words in (flag, [word, value, *flag[1:]], [f"{word}={value}", *flag[1:]]):
                expected = outcome(plain, words)
                assert outcome(ours, words) == expected, words
                tried += 1
                accepted += isinstance(expected, dict)
    assert tried > 1500
    assert accepted > 500


def test_our_options_cannot_be_abbreviated_and_torchrun_has_none_of_their_names():
    from torch.distributed import run

    ours = launch_parser()
    names = {name for name, action in ours._option_string_actions.items() if action.dest in ours.own}
    assert {"--budget", "--strict", "--no-probe", "--plan", "--json", "--quiet", "--no-cache"} < names
    assert not names & set(run.get_args_parser()._option_string_actions)
    with pytest.raises(UsageError, match="did you mean --budget"):
        parsed("--budge", "1GiB", "train.py")
    with pytest.raises(UsageError, match=r"expected one argument\n.*--option=VALUE"):
        parsed("--budget", "-0.5x", "train.py")


def test_our_options_have_the_stated_defaults_and_values():
    defaults = parsed("train.py")
    assert not launch_parser().own & vars(defaults.torchrun).keys()
    assert defaults == LaunchOptions(
        algorithm="hierarchical",
        budget="auto",
        cost_model="measured",
        json=False,
        report_folder="",
        tensorboard_folder="",
        use_cache=True,
        implementations="all",
        probe=True,
        recompute=True,
        plan_file="",
        quiet=False,
        mip_solver="scip",
        solver_seconds=20.0,
        strict=False,
        torchrun=defaults.torchrun,
    )
    words = ["--budget=80%", "--solver-seconds", "1.5", "--nproc-per-node", "2", "--solver", "highs", "train.py"]
    options = parsed(*words)
    assert (options.budget, options.solver_seconds, options.mip_solver) == ("80%", 1.5, "highs")
    assert (options.torchrun.nproc_per_node, options.reusable_words) == ("2", tuple(words[1:-1]))
    changed = ["--plan=p", "--no-probe", "--no-recompute", "--no-implementations", "--no-cache", "--quiet", "--strict"]
    changed += ["--algorithm=greedy", "--cost-model=roofline:cpu"]
    assert parsed("--json", "--report=r", "--tensorboard", "t", *changed, "train.py") == LaunchOptions(
        algorithm="greedy",
        budget="auto",
        cost_model="roofline:cpu",
        json=True,
        report_folder="r",
        tensorboard_folder="t",
        use_cache=False,
        implementations="none",
        probe=False,
        recompute=False,
        plan_file="p",
        quiet=True,
        mip_solver="scip",
        solver_seconds=20.0,
        strict=True,
        torchrun=defaults.torchrun,
        reusable_words=tuple(changed),
    )
    with pytest.raises(UsageError, match="positive number of seconds, got '-1'"):
        parsed("--solver-seconds", "-1", "train.py")


def test_all_words_after_the_script_are_the_scripts():
    words = ["--budget", "3", "--", "-h", "--nproc-per-node=4", "", "a b", "plan"]
    options = parsed("--budget", "1GiB", "train.py", *words)
    assert (options.budget, options.script, options.torchrun.nproc_per_node) == ("1GiB", "train.py", "1")
    assert options.script_args == tuple(words)
    other = options.with_script_args(["x"])
    assert (other.script_args, other.torchrun.training_script_args) == (("x",), ["x"])
    assert options.script_args == tuple(words)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["train.py", "--budget", "0.6x"], "--budget"),
        (["train.py", "--lr", "1", "--budget=0.6x", "--budget=1"], "--budget=0.6x"),
        (["--budget", "0.6x", "train.py", "--budget", "3"], ""),
        (["train.py", "--budgets=3", "budget", "--lr=--budget"], ""),
    ],
)
def test_a_budget_that_goes_to_the_script_is_told_unless_there_is_one_for_monetrun(
    words, given, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    check_script(parsed(*words))
    told = capsys.readouterr().err
    assert told.startswith(f"monetrun: warning: {given} goes to train.py, and the budget is auto: ") == bool(given)
    assert ("(monetrun --budget 0.6x train.py ...)" in told) == bool(given)


@pytest.mark.skipif(
    "--print-completion" not in launch_parser()._option_string_actions, reason="torch 2.13 and older have none"
)
def test_a_completion_is_for_monetrun_with_its_options(monkeypatch, capsys):
    def complete(parser, shell):
        return f"{parser.prog} {shell} {'--budget' in parser._option_string_actions}"

    monkeypatch.setitem(sys.modules, "shtab", SimpleNamespace(SUPPORTED_SHELLS=["bash"], complete=complete))
    with pytest.raises(SystemExit) as end:
        cli.main(["--print-completion", "bash"])
    assert (end.value.code or 0, capsys.readouterr().out) == (0, "monetrun bash True\n")


def test_pet_variables_set_torchruns_defaults(monkeypatch):
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    monkeypatch.setenv("PET_STANDALONE", "1")
    torchrun = parsed("train.py").torchrun
    assert (torchrun.nproc_per_node, torchrun.standalone) == ("3", True)
    assert parsed("--nproc-per-node", "2", "train.py").torchrun.nproc_per_node == "2"
    assert local_world_size(parsed("train.py")) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc-per-node", "many"], "Unsupported nproc_per_node value: many"),
        (["--nproc-per-node", "0"], "no worker to start"),
        (["--nnodes", "2:1"], "min_nodes must be > 0"),
        (["--nnodes", "1:2:3"], "MIN:MAX"),
        (["--redirects", "7"], "7 does not match"),
        (["--max-restarts", "-1"], "max_restarts must be >= 0"),
    ],
)
def test_a_value_that_torchrun_rejects_gives_one_message_and_exit_code_2(words, message, capsys):
    assert cli.main([*words, BEHAVE]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("monetrun: error: ")
    assert "Traceback" not in printed


@pytest.mark.parametrize("budget", ["12Gbit", "0", "-3GiB", "150%", "x", "12 GiB of it"])
def test_a_malformed_budget_is_quoted_with_the_grammar(budget, capsys):
    assert cli.main([f"--budget={budget}", BEHAVE]) == 2
    printed = capsys.readouterr().err
    assert repr(budget) in printed
    assert "12GiB" in printed
    assert printed.count("monetrun: error") == 1


# ---- the script


def test_a_missing_script_is_named_with_similar_names(capsys, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["trian.py", "--epochs", "3"]) == 2
    assert capsys.readouterr().err == "monetrun: error: there is no script 'trian.py'\n  did you mean train.py?\n"
    assert cli.main(["plam", "train.py"]) == 2
    wanted = "monetrun: error: there is no script or command 'plam'\n  did you mean monetrun plan?\n"
    assert capsys.readouterr().err == wanted
    assert cli.main([]) == 2
    assert "no script was given" in capsys.readouterr().err


def test_a_program_or_a_module_whose_name_is_like_a_commands_runs(tmp_path, monkeypatch):
    (tmp_path / "bench.py").write_text("")
    (tmp_path / "plans.py").write_text("")
    monkeypatch.chdir(tmp_path)
    check_script(parsed("--no-python", "bash", "run.sh"), SUMMARIES)
    check_script(parsed("-m", "bench"), SUMMARIES)
    for words, message in (
        (["--no-python", "basch"], "no program 'basch'"),
        (["-m", "batc"], "no module 'batc'"),
        (["plans"], "there is a module of that name: -m plans"),
    ):
        with pytest.raises(ScriptNotFound, match=message):
            check_script(parsed(*words), SUMMARIES)


def test_the_script_is_checked_as_python_would_look_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("")
    (tmp_path / "app" / "train.py").write_text("raise SystemExit(7)")
    (tmp_path / "bare").mkdir()
    (tmp_path / "binary").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "my-train.py").write_text("")
    (tmp_path / "difflib").mkdir()
    (tmp_path / "difflib" / "train.py").write_text("")  # shadows a module that the launcher has loaded
    (tmp_path / "difflib" / "__init__.py").write_text("")
    for words in (
        ["-m", "my-train"],
        ["-m", "difflib.train"],
        ["app"],
        ["-m", "app"],
        ["-m", "app.train"],
        ["app/train.py"],
        ["-m", "timeit"],
        ["-"],
    ):
        check_script(parsed(*words))
    check_script(parsed("--no-python", "sh"))
    for words, message in (
        (["bare"], "bare is a folder without a __main__.py"),
        (["nowhere/train.py"], "there is no folder 'nowhere' either"),
        (["-m", "app.trian"], "did you mean app.train?"),
        (["-m", "ap"], "did you mean app?"),
        (["-m", "app/train.py"], "leave out -m"),
        (["app.train"], "there is a module of that name: -m app.train"),
        (["-m", "bare"], "no module 'bare'"),
        (["-m", ""], "no module ''"),
        (["-m", "app..train"], "no module 'app..train'"),
        ([""], "there is no script ''"),
        (["--no-python", "no-such-program"], "there is no program 'no-such-program'"),
    ):
        with pytest.raises(ScriptNotFound) as error:
            check_script(parsed(*words))
        assert message in str(error.value), words
    for words, message in ((["--no-python", "./tool"], "not executable"), (["binary"], "a binary file")):
        with pytest.raises(UsageError, match=message):
            check_script(parsed(*words))


@contextlib.contextmanager
def closed_to(folder: Path):
    """As a user who may not enter ``folder``."""
    os.chmod(folder, 0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        os.chmod(folder, 0o700)


@pytest.fixture
def closed():
    """A folder whose parents may be entered by all users."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_script_in_a_folder_that_may_not_be_entered_is_not_found(closed, monkeypatch):
    (closed / "train.py").write_text("")
    script, folder = parsed(str(closed / "train.py")), parsed(str(closed))
    monkeypatch.chdir("/tmp")
    with closed_to(closed):
        with pytest.raises(ScriptNotFound) as refused:
            check_script(script)
        assert refused.value.hint == f"the folder {closed} cannot be read: Permission denied"
        with pytest.raises(UsageError, match="cannot be read"):
            check_script(folder)
        assert _near_modules(f"{closed.name}.train") == "looked in /tmp and on Python's path"


def test_a_cache_that_may_not_be_entered_is_named_and_has_no_entries(closed, monkeypatch):
    from monetrun.commands import cache, doctor_checks
    from monetrun.core.plan import Step
    from monetrun.machine.store import Store

    Store(closed / "kept").put("plan", "abc", Step(3))
    monkeypatch.setenv("MONETRUN_CACHE", str(closed / "kept"))
    for forbidden in (closed, closed / "kept", closed / "kept" / "plan"):
        with closed_to(forbidden):
            assert Store(closed / "kept").entries() == ()
            if forbidden.name == "plan":
                continue
            with pytest.raises(UsageError, match=f"the cache {closed}/kept cannot be read: Permission denied"):
                cache._store()
            check = doctor_checks._cache()
            assert (check.state, "cannot be written" in check.found) == ("warning", True)


def test_checking_a_module_runs_none_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    with pytest.raises(ScriptNotFound):
        check_script(parsed("-m", "script.py"))
    check_script(parsed("-m", "script"))
    assert not (tmp_path / "ran").exists()


def test_a_package_that_changes_its_own_path_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "train.py").write_text("")
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "__init__.py").write_text("__path__.append('elsewhere')")
    check_script(parsed("-m", "spread.train"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import a_module_that_is_missing")
    check_script(parsed("-m", "broken.train"))  # the worker prints the traceback


# ---- errors, and commands


@pytest.mark.parametrize(
    ("error", "code", "printed"),
    [
        (NeverTrained("no step", "train"), 85, "monetrun: error: no step\n  train\n"),
        (MonetrunError("odd"), 70, "monetrun: error: odd\n"),
        (KeyboardInterrupt(), 130, "monetrun: stopped by SIGINT\n"),
        (click.Abort(), 130, "monetrun: stopped by SIGINT\n"),
        (click.ClickException("odd"), 2, "monetrun: error: odd\n"),
    ],
)
def test_main_prints_an_error_once_and_ends_with_its_code(error, code, printed, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr("monetrun.commands.run.check_script", fail)
    assert cli.main(["train.py"]) == code
    assert capsys.readouterr().err == printed


def test_a_fault_of_our_own_shows_its_traceback_and_ends_with_70(monkeypatch, capsys):
    monkeypatch.setattr("monetrun.commands.run.check_script", lambda *_: 1 / 0)
    assert cli.main(["train.py"]) == 70
    printed = capsys.readouterr().err
    assert "ZeroDivisionError" in printed
    assert "please report it" in printed


def test_the_first_word_decides_between_a_command_and_a_script(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "kept"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").write_text("print('a script')")
    scripts = []
    monkeypatch.setattr("monetrun.commands.run.run_launch", lambda options: scripts.append(options.script) or 0)
    assert cli.main(["./cache", "list"]) == 0
    assert cli.main(["--quiet", "cache", "list"]) == 0
    assert scripts == ["./cache", "cache"]
    assert cli.main(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"root": str(tmp_path / "kept"), "entries": []}
    assert cli.main(["cache"]) == 2
    assert cli.main(["cache", "burn"]) == 2
    printed = capsys.readouterr().err
    assert "'burn'" in printed
    assert "monetrun cache --help" in printed


def test_the_cache_is_listed_and_cleared(monkeypatch, capsys, tmp_path):
    from monetrun.core.plan import Step
    from monetrun.machine.store import Store

    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "kept"))
    Store(tmp_path / "kept").put("plan", "abc", Step(3))
    assert cli.main(["cache", "list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["plan", "abc"]
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().err == f"monetrun: removed 1 entries from {tmp_path / 'kept'}\n"
    assert cli.main(["cache", "list"]) == 0
    assert capsys.readouterr().out == ""


def test_the_cache_is_checked_and_moved(monkeypatch, capsys, tmp_path):
    from monetrun.core.plan import Step
    from monetrun.machine.store import Store

    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "cache"))
    store = Store(tmp_path / "cache")
    store.put("plan", "p", Step(3))
    assert cli.main(["cache", "verify"]) == 0
    assert cli.main(["cache", "export", str(tmp_path / "all.tar.gz"), "--kind", "plan"]) == 0
    store.path("plan", "p").write_text("damaged")
    assert cli.main(["cache", "verify"]) == 1
    assert f"{store.path('plan', 'p')}: not a file of monetrun's cache" in capsys.readouterr().out
    assert cli.main(["cache", "import", str(tmp_path / "all.tar.gz")]) == 0
    assert "added 1 entries" in capsys.readouterr().err
    assert cli.main(["cache", "verify"]) == 0
    assert cli.main(["cache", "import", str(tmp_path / "none.tar.gz")]) == 2
    assert "monetrun cache export writes such a file" in capsys.readouterr().err


def test_help_version_and_cache_import_neither_torch_nor_cvxpy():
    code = (
        "import sys; from monetrun.commands.main import main; main(['--help']); main(['--version']); "
        "main(['cache', 'list']); main(['explain', '--help']); main(['doctor', '--help']); "
        "sys.exit(bool({'torch', 'cvxpy'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "--budget" in done.stdout
    assert "torchrun --help" in done.stdout
    assert "doctor" in done.stdout
    assert launch_parser().format_help() == help_text()
    assert launch_parser(SUMMARIES).format_help() == help_text(SUMMARIES) == done.stdout.partition("monetrun 0")[0]


def test_importing_monetrun_imports_none_of_its_packages():
    code = "import monetrun, sys; sys.exit(any(name.startswith('monetrun.') or name == 'rich' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_command_is_a_module_whose_words_torchruns_parser_or_click_parses():
    of_a_launch = {"batch", "check", "frontier", "plan", "run"}
    modules = {path.stem for path in Path(commands.__file__).parent.glob("*.py")}
    for name in (*SUMMARIES, "run"):
        assert name in modules
        module = importlib.import_module(f"monetrun.commands.{name}")
        if name in of_a_launch:
            assert isinstance(module.prepare_parser(), LaunchParser)
        else:
            assert isinstance(module.command, click.Command)
            assert module.command.name == name
        assert list(inspect.signature(module.run).parameters) == ["words"]
    assert list(SUMMARIES) == sorted(SUMMARIES)


@pytest.mark.parametrize(
    ("words", "message", "command"),
    [
        ([], "Missing command", "cache"),
        (["list", "--jsn"], "--jsn", "cache list"),
        (["list", "--j"], "--j", "cache list"),  # options are not abbreviated
        (["list", "all"], "all", "cache list"),
    ],
)
def test_words_that_click_rejects_give_one_message_and_exit_code_2(words, message, command, capsys):
    assert cli.main(["cache", *words]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("monetrun: error: ")
    assert message in printed
    assert printed.endswith(f"\n  monetrun {command} --help\n")
    assert "Traceback" not in printed


def test_help_of_a_click_command_names_its_options_and_ends_with_0(capsys):
    for words in (["cache", "list", "--help"], ["doctor", "-h"], ["explain", "--help"]):
        assert cli.main(words) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"Usage: monetrun {' '.join(words[:-1])} ")
        assert "--json" in printed
    assert "--measured" in printed
    assert SUMMARIES["explain"] in printed


def test_doctor_lists_what_is_there_and_what_is_missing(monkeypatch, capsys, tmp_path):
    (tmp_path / "closed").write_text("")
    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path / "closed" / "kept"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    code = cli.main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["torch"]["state"] == "ok"
    assert checks["compiler"]["state"] == checks["allocator"]["state"] == "warning"
    assert "no-such-compiler" in checks["compiler"]["found"]
    assert checks["cache"]["state"] == "warning"
    assert code == int(any(check["state"] == "missing" for check in checks.values()))


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["verify"], ["clear"]])
def test_a_cache_that_is_a_file_is_refused(words, monkeypatch, capsys, tmp_path):
    file = tmp_path / "kept"
    file.write_text("")
    monkeypatch.setenv("MONETRUN_CACHE", str(file))
    assert cli.main(["cache", *words]) == 2
    said = capsys.readouterr()
    assert said.err == f"monetrun: error: the cache {file} is not a folder\n  set MONETRUN_CACHE to a folder\n"
    assert said.out == ""


def test_lines_about_the_cache_begin_as_all_others(monkeypatch, capsys, tmp_path):
    from monetrun.core.plan import Step
    from monetrun.machine.store import Store

    monkeypatch.setenv("MONETRUN_CACHE", str(tmp_path))
    Store(tmp_path).put("plan", "abc", Step(3))
    (tmp_path / "plan" / "abc.json").write_text("{")
    assert cli.main(["cache", "verify"]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"{tmp_path}/plan/abc.json: ")
    assert said.err.endswith(f"monetrun: 0 of 1 entries are usable in {tmp_path}\n")


def test_a_damaged_entry_is_told_in_a_line_of_monetruns(tmp_path):
    code = (
        "from monetrun.core.log_lines import print_warnings\nfrom monetrun.core.plan import Step\n"
        "from monetrun.machine.store import Store\nimport logging, pathlib, sys\nprint_warnings()\nprint_warnings()\n"
        "if sys.argv[2:]: logging.basicConfig(format='own %(message)s')\n"
        "Store(pathlib.Path(sys.argv[1])).get('plan', 'abc', Step)\n"
    )
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "abc.json").write_text("{")

    def said(*words):
        words = [sys.executable, "-c", code, str(tmp_path), *words]
        return subprocess.run(words, capture_output=True, text=True, check=True).stderr

    assert said().startswith(f"monetrun: warning: {tmp_path}/plan/abc.json is not used: ")
    assert said("configured").startswith(f"own {tmp_path}/plan/abc.json is not used: ")
    assert said().count("is not used") == said("configured").count("is not used") == 1


@pytest.mark.parametrize("words", [["--plan", "nope.json", "train.py"], ["explain", "nope.json"]])
def test_a_plan_that_is_not_there_is_a_wrong_option(words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        "monetrun: error: the plan nope.json: No such file or directory\n  monetrun plan SCRIPT writes one\n"
    )


def test_a_file_that_is_no_plan_is_refused_without_a_path_into_it(monkeypatch, capsys, tmp_path):
    (tmp_path / "bad.json").write_text('{"a": 1}')
    assert cli.main(["explain", str(tmp_path / "bad.json")]) == 83
    said = capsys.readouterr().err
    assert said.startswith(f"monetrun: error: {tmp_path}/bad.json is not a plan that this monetrun reads: Plan has no")


def test_seconds_that_are_no_number_are_refused_by_their_rule(capsys):
    assert cli.main(["--solver-seconds", "abc", BEHAVE]) == 2
    assert "expected a positive number of seconds, got 'abc'" in capsys.readouterr().err


def test_where_no_name_is_near_those_that_are_there_are_listed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in "abcdef":
        (tmp_path / f"{name}{name}.py").write_text("")
    assert cli.main(["training.py"]) == 2
    assert capsys.readouterr().err.endswith("\n  scripts here: aa.py, bb.py, cc.py, dd.py, ee.py, ...\n")
    assert cli.main(["-m", "training"]) == 2
    assert capsys.readouterr().err.endswith("\n  modules here: aa, bb, cc, dd, ee, ...\n")


def test_help_has_the_whole_grammar_of_a_budget(capsys):
    from monetrun.core.budget import GRAMMAR

    assert cli.main(["--help"]) == 0
    assert GRAMMAR in " ".join(capsys.readouterr().out.split())
