"""torchrun's agent, with its own parser, its own defaults, and an honest end.

Nothing here decides how workers are started: ``torch.distributed.run`` does, so that every one of its flags, ``PET_*``
variables and defaults means what it means there. Around it: the exit code is that of the worker that failed first, its
traceback is printed last, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

from monetrun import __version__
from monetrun.core.errors import MonetrunError, UsageError
from monetrun.core.graph import KINDS
from monetrun.core.options import parse_kinds
from monetrun.solve import ALGORITHMS
from monetrun.solve.mip import PACKAGES

# Ctrl-C waits this long for workers that are stuck outside Python; torchrun waits 30 s. --shutdown-timeout sets both.
INTERRUPT_GRACE_SECONDS = 5

# What torch prints beside what the user needs: logger, beginnings of its messages. LOGLEVEL, when set, shows them all.
_SPEW = (
    ("torch.distributed.run", "\n*****"),
    ("torch.distributed.elastic.multiprocessing.api", "failed (exitcode"),
    ("torch.distributed.elastic.multiprocessing.api", "Sending process %s closing signal"),
    ("torch.distributed.elastic.multiprocessing.api", "Closing process %s via signal"),
    ("torch.distributed.elastic.agent.server.api", "Received %s death signal"),
    ("torch.distributed.elastic.multiprocessing.errors.error_handler", "no error file defined for parent"),
)

_USAGE = "monetrun [options] [torchrun's options] script.py [the script's arguments]"


# ---- the parser


class LaunchParser(argparse.ArgumentParser):
    """torchrun's parser with our options, which raises ``UsageError`` and abbreviates as torchrun does."""

    own: frozenset[str] = frozenset()
    help_text: str = ""
    usage_text: str = _USAGE

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse asks here what an inexact option may abbreviate: ours never, or --no and --st would change meaning
        return [match for match in super()._get_option_tuples(option_string) if match[0].dest not in self.own]

    def format_help(self) -> str:
        """Show monetrun's help, without torchrun's fifty options."""
        return self.help_text

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError`` with what argparse found, and the nearest option there is."""
        hint = "monetrun --help lists monetrun's options, torchrun --help all others"
        if "training_script" in message:
            message, hint = "no script was given", f"usage: {self.usage_text}"
        for word in message.split():
            name = word.rstrip(":,").partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                if near := difflib.get_close_matches(name, self._option_string_actions, 1):
                    hint = f"did you mean {near[0]}?"
                break
        raise UsageError(message, hint)


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _kinds(text: str) -> str:
    parse_kinds(text)
    return text


def _add_options(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Add monetrun's options to ``parser``; gives their names in the namespace."""
    group = parser.add_argument_group("monetrun's options")
    add = group.add_argument
    add(
        "--budget",
        default="auto",
        help="auto | 12GiB | 12GB | 80%% | 0.6x: what a training step may allocate on a device",
    )
    add(
        "--strict",
        action="store_true",
        help="exit where a model cannot be planned, rather than warn and run it as it is",
    )
    add("--plan", metavar="FILE", help="run this plan; plan nothing")
    add("--no-probe", action="store_true", help="plan in rank 0 at the first step, without a trial run before")
    add("--solver-seconds", type=_positive_seconds, default=20.0, metavar="N", help="time to plan (default: 20)")
    add("--solver", choices=tuple(PACKAGES), default="scip", help="who solves the integer programs (default: scip)")
    algorithms = "; ".join(f"{a.name}: {a.description}" for a in ALGORITHMS.values())
    add(
        "--algorithm",
        choices=tuple(ALGORITHMS),
        default="hierarchical",
        help=f"how to plan (default: hierarchical). {algorithms}",
    )
    add(
        "--implementations",
        type=_kinds,
        default="all",
        metavar="KINDS",
        help=f"which ways to run operators the plan may use beside eager's: all | none | {','.join(KINDS)}; "
        "with exact, or exact alone, only those that give eager's bits",
    )
    add(
        "--no-implementations",
        dest="implementations",
        action="store_const",
        const="none",
        help="recompute only, the same as --implementations none",
    )
    add("--no-recompute", action="store_true", help="other implementations only: no operator runs twice")
    add(
        "--cost-model",
        default="measured",
        metavar="MODEL",
        help="what operators cost: measured here, or (monetrun plan) roofline:p100 | v100 | a100 | h100 | h200 | cpu",
    )
    add("--no-cache", action="store_true", help="neither read nor write the cache of plans and costs")
    add("--json", action="store_true", help="report as JSON, on stdout")
    add("--quiet", action="store_true", help="print nothing but errors")
    add("--version", action="version", version=f"monetrun {__version__}", help="print the version")
    return frozenset(action.dest for action in group._group_actions)


def help_text(commands: Mapping[str, str] | None = None) -> str:
    """What ``monetrun --help`` prints; importing torch only to list torchrun's options would take seconds."""
    usage = _USAGE
    epilog = "Every option, PET_* variable and default of torchrun works as it does there: torchrun --help lists them."
    if commands:
        usage += "\n       monetrun COMMAND ..."
        width = max(map(len, commands))
        lines = "\n".join(f"  {name:{width}}  {summary}" for name, summary in commands.items())
        epilog = f"commands (a script of such a name is run as ./{next(iter(commands))}):\n{lines}\n\n{epilog}"
    parser = argparse.ArgumentParser(
        prog="monetrun",
        usage=usage,
        description="Train an unmodified PyTorch script under a memory budget, launched as by torchrun.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    return parser.format_help()


def parser(commands: Mapping[str, str] | None = None) -> LaunchParser:
    """Build torchrun's parser with monetrun's options; its defaults come from the ``PET_*`` variables as they are now.

    ``parse_args`` raises ``UsageError``. Our options are taken by their full names only, so that each abbreviation that
    torchrun takes means the same here.
    """
    from torch.distributed import run

    # should a later torchrun have an option named like one of ours, ours wins and the others still work
    result = LaunchParser(
        prog="monetrun",
        parents=[run.get_args_parser()],
        add_help=False,
        conflict_handler="resolve",
    )
    result.own = _add_options(result)
    result.help_text = help_text(commands)
    return result


def command_parser(
    name: str, description: str, add_options: Callable[[argparse._ActionsContainer], None]
) -> LaunchParser:
    """``parser`` for ``monetrun NAME``, which launches nothing but takes a launch's words, and options of its own.

    Args:
        name: of the command.
        description: what it does, for ``--help``.
        add_options: adds the command's own; one that is named as one of the launch's replaces it.
    """
    result = parser()
    before = set(result._actions)
    add_options(result)
    result.own |= {action.dest for action in result._actions if action not in before}
    result.usage_text = f"monetrun {name} {_USAGE.removeprefix('monetrun ')}"
    helper = argparse.ArgumentParser(
        prog=f"monetrun {name}",
        usage=result.usage_text,
        description=description,
        epilog="monetrun --help lists the options of a launch, which are taken too; torchrun --help all others.",
    )
    add_options(helper)
    result.help_text = helper.format_help()
    return result


def launch_words(
    parser: LaunchParser, words: Sequence[str], args: argparse.Namespace, but: Sequence[str] = ()
) -> list[str]:
    """The options among ``words`` that are a launch's own, for the next command to be typed.

    Left out are ``--budget``, ``--json``, and the destinations in ``but``.
    """
    head = words[: len(words) - len(args.training_script_args) - 1]
    shared = set(_add_options(argparse.ArgumentParser(add_help=False)))
    dropped = (parser.own - shared) | {"budget", "json", *but}
    kept: list[str] = []
    keep = True
    for word in head:
        action = parser._option_string_actions.get(word.partition("=")[0])
        if action is not None:
            keep = action.dest not in dropped
        elif word.startswith("-"):
            keep = True
        if keep:
            kept.append(word)
    return kept


def local_world_size(args: argparse.Namespace) -> int:
    """How many workers torchrun will start on this node.

    Raises:
        UsageError: torchrun would refuse these options (``--nproc-per-node``, ``--nnodes``, ``--redirects``, ...).
    """
    from torch.distributed import run

    # this also checks every other option, and writes nothing: no log folder, no environment, no log
    trial = copy.copy(args)
    trial.log_dir = args.log_dir if args.logs_specs else os.devnull
    logger = logging.getLogger(run.__name__)
    with restored_environment():
        logger.disabled = True
        try:
            config, _, _ = run.config_from_args(trial)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(f"torchrun's options: {error}", "torchrun --help lists them") from error
        finally:
            logger.disabled = False
    if config.nproc_per_node < 1:
        raise UsageError(f"--nproc-per-node {args.nproc_per_node}: no worker to start", "give at least 1")
    return int(config.nproc_per_node)


# ---- the launch


def launch(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the workers as torchrun does, with ``environment`` added to theirs, until all have ended.

    Gives 0, or the exit code of the worker that failed first (128 + n for signal n), or 128 + n where signal n
    stopped the launcher. Then the reason is on stderr. This process's environment and signal handlers are as before.

    Raises:
        MonetrunError: the nodes did not find one another.
    """
    from torch.distributed import DistError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    workers = local_world_size(args)
    args = copy.copy(args)  # run() writes into it
    with (
        restored_environment(environment),
        _signal_handlers(),
        _quiet_torch(),
        _prompt_shutdown(args) as stopped_pids,
        _log_folder(args),
    ):
        if workers > 1 and "OMP_NUM_THREADS" not in os.environ and not args.quiet:
            print("monetrun: OMP_NUM_THREADS=1 in each worker, as under torchrun; set it to change it", file=sys.stderr)
        try:
            # record: hands the reason on to a scheduler that has given this process an error file
            record(run.run)(args)
        except ChildFailedError as error:
            return _report(args, error.failures, stopped_pids)
        except SignalException as error:
            print(f"monetrun: stopped by {signal.Signals(error.sigval).name}", file=sys.stderr)
            return 128 + int(error.sigval)
        except (RendezvousError, DistError) as error:
            where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
            raise MonetrunError(
                f"the nodes did not meet at {where}: {str(error) or type(error).__name__}",
                "check --rdzv-endpoint or --master-addr and --master-port; --standalone needs neither",
            ) from error
    return 0


def first_failure(failures: Mapping[int, Any], stopped_pids: Set[int], monitor_seconds: float) -> int:
    """The rank that failed first, of ``{rank: torch's ProcessFailure}``.

    torch compares whole seconds, which is too coarse: a rank that dies takes the others with it within milliseconds.
    Here whoever was stopped after another's failure was not first; a recorded exception counts when it was raised; a
    crash or a kill, which records nothing, was before it was noticed; any other exit may as well have been after.
    """
    crashes = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}

    def moment(rank: int) -> tuple[bool, float, int]:
        failure = failures[rank]
        seconds = float(failure.timestamp) + 1.0
        if isinstance(failure.message, dict):
            extra = failure.message.get("extraInfo", {})
            seconds = int(extra.get("timestamp_ns", failure.timestamp * 10**9)) / 1e9
        elif failure.exitcode in crashes:
            seconds = failure.timestamp - monitor_seconds
        return failure.pid in stopped_pids, seconds, rank

    return min(failures, key=moment)


def _exit_code(failure: Any) -> int:
    """0..255: the worker's own; for an uncaught error of monetrun's, that error's (Python itself exits with 1)."""
    if failure.exitcode < 0:
        return 128 - int(failure.exitcode)
    if isinstance(failure.message, dict) and failure.exitcode == 1:
        return int(failure.message.get("errorCode", 1))
    return int(failure.exitcode)


def _report(args: argparse.Namespace, failures: Mapping[int, Any], stopped_pids: Set[int]) -> int:
    """Say on stderr who failed first and, last, why; gives the exit code."""
    culprit = first_failure(failures, stopped_pids, float(args.monitor_interval))
    failure = failures[culprit]
    trace = ""
    if isinstance(failure.message, dict):
        trace = failure.message.get("extraInfo", {}).get("py_callstack", "").rstrip()
    alone = args.nproc_per_node == "1" and args.nnodes in ("1", "1:1")
    # --run-path keeps a traceback to itself; else Python has printed it to the worker's stderr
    if trace and alone and not (_has_logs(args) or args.local_ranks_filter or args.run_path):
        return _exit_code(failure)
    line = f"monetrun: rank {culprit} failed{'' if alone else ' first'}: {_ending(failure)}"
    for rank, other in sorted(failures.items()):
        if rank != culprit and other.pid not in stopped_pids:
            line += f"; then rank {rank}: {_ending(other)}"
    if failure.exitcode == -signal.SIGKILL:
        line += "\n  SIGKILL is what the kernel sends when memory runs out: see dmesg, or the container's limit"
    print(f"{line}\n{trace}" if trace else line, file=sys.stderr, flush=True)
    return _exit_code(failure)


def _ending(failure: Any) -> str:
    how = f"exit code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"killed by signal {-failure.exitcode}"
        with contextlib.suppress(ValueError):
            how = f"killed by {signal.Signals(-failure.exitcode).name}"
    return f"{how} (pid {failure.pid})"


# ---- what is as before afterwards


@contextlib.contextmanager
def restored_environment(added: Mapping[str, str] | None = None) -> Iterator[None]:
    """Put ``added`` into this process's environment, which workers inherit; at the end it is as it was before."""
    before = dict(os.environ)
    os.environ.update(added or {})
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put back what torch replaces once the workers run."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not any(record.name == name and str(record.msg).startswith(start) for name, start in _SPEW)

    loggers = [] if "LOGLEVEL" in os.environ else [logging.getLogger(name) for name in dict(_SPEW)]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


@contextlib.contextmanager
def _prompt_shutdown(args: argparse.Namespace) -> Iterator[Set[int]]:
    """Make ``--shutdown-timeout`` hold however a run ends, and a second Ctrl-C stop at once.

    torch waits 30 s when a worker has failed, whatever was asked for, and starts waiting anew at each signal. Gives the
    set that the pids of the workers that had to be stopped will be in.
    """
    from torch.distributed.elastic.multiprocessing import PContext, SignalException

    asked = getattr(args, "shutdown_timeout", None)  # torch 2.11 has no such option
    if asked is None and (text := os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")).isdigit():
        asked = int(text)
    close = PContext.close
    stopped_pids: set[int] = set()

    def prompt_close(self: Any, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        if asked is not None:
            timeout = asked
        elif death_sig == signal.SIGINT:
            timeout = INTERRUPT_GRACE_SECONDS
        stopped_pids.update(pid for pid in self.pids().values() if _is_running(pid))
        try:
            close(self, death_sig, 30 if timeout is None else timeout)
        except SignalException:
            close(self, signal.SIGKILL, INTERRUPT_GRACE_SECONDS)
            raise

    setattr(PContext, "close", prompt_close)  # noqa: B010 - mypy minds the assignment
    try:
        yield stopped_pids
    finally:
        setattr(PContext, "close", close)  # noqa: B010


def _is_running(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # ended, and its exit code has been read
        return False


def _has_logs(args: argparse.Namespace) -> bool:
    return bool(args.redirects != "0" or args.tee != "0")


@contextlib.contextmanager
def _log_folder(args: argparse.Namespace) -> Iterator[None]:
    """Where torchrun would make a folder in /tmp and leave it, make it, and leave it only with the logs asked for."""
    if args.log_dir or args.logs_specs:
        yield
        return
    args.log_dir = tempfile.mkdtemp(prefix="torchelastic_")
    if _has_logs(args) and not args.quiet:
        print(f"monetrun: the workers' output goes to {args.log_dir}; --log-dir puts it elsewhere", file=sys.stderr)
    try:
        yield
    finally:
        if not _has_logs(args):
            shutil.rmtree(args.log_dir, ignore_errors=True)
