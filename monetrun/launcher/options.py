"""monetrun's own options of a launch: how they are declared, and ``LaunchOptions``, which carries their values."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from monetrun import __version__
from monetrun.core.budget import GRAMMAR
from monetrun.core.graph import KINDS
from monetrun.core.options import Options, parse_kinds
from monetrun.solve import ALGORITHMS, descriptions, solver
from monetrun.solve.mip import PACKAGES


def add_launch_options(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Add monetrun's options to ``parser``, and return their names in its namespace."""
    group = parser.add_argument_group("monetrun's options")
    add = group.add_argument
    add(
        "--budget",
        default="auto",
        help=f"{GRAMMAR.replace('%', '%%')}: what a training step may take on a device (default: auto)",
    )
    add(
        "--strict",
        action="store_true",
        help="exit if a model cannot be planned, instead of warning and running it unplanned",
    )
    add("--plan", metavar="FILE", help="run this plan; plan nothing")
    add("--no-probe", action="store_true", help="plan in rank 0 at the first step, without a trial run before")
    add("--solver-seconds", type=_positive_seconds, default=20.0, metavar="N", help="time to plan (default: 20)")
    add("--solver", choices=tuple(PACKAGES), default="scip", help="integer program solver (default: scip)")
    algorithms = descriptions()
    listed = "; ".join(f"{name}: {description}" for name, description in algorithms.items())
    add(
        "--algorithm",
        type=_algorithm,
        choices=tuple(algorithms),
        default="hierarchical",
        help=f"how to plan (default: hierarchical). {listed}",
    )
    add(
        "--implementations",
        type=_kinds,
        default="all",
        metavar="KINDS",
        help=f"operator implementations that the plan may use beside eager's: all | none | {','.join(KINDS)}; "
        "exact, alone or among these, allows only those bitwise identical to eager",
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
    add("--report", default="", metavar="DIR", help="write the report there, as a page for a browser and as JSON")
    add(
        "--tensorboard",
        default="",
        metavar="DIR",
        help="write memory and seconds of training steps there, for TensorBoard (needs tensorboard)",
    )
    add("--quiet", action="store_true", help="print nothing but errors and warnings")
    add("--version", action="version", version=f"monetrun {__version__}", help="print the version")
    return frozenset(action.dest for action in group._group_actions)


def launch_option_names() -> frozenset[str]:
    """The names that ``add_launch_options`` adds to a namespace."""
    return add_launch_options(argparse.ArgumentParser(add_help=False))


def _positive_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _algorithm(text: str) -> str:
    if text not in ALGORITHMS and text in descriptions():
        solver(text)  # a package that cannot be used is reported before the trial run, not after it
    return text


def _kinds(text: str) -> str:
    parse_kinds(text)
    return text


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The options of a launch.

    Attributes:
        budget: in ``--budget``'s grammar, not parsed yet.
        strict: a model that cannot be planned is an error.
        plan_file: the plan to run; empty: make one.
        probe: plan from a trial run; False: rank 0 plans at the first step.
        solver_seconds: time limit for planning.
        mip_solver: ``"scip"`` or ``"highs"``.
        algorithm: one of ``solve.descriptions()``.
        implementations: as ``core.options.parse_kinds`` reads it.
        recompute: False: no operator runs twice.
        cost_model: ``"measured"``, or a name that ``capture.roofline.parse`` knows.
        use_cache: read and write the cache.
        json: print the report as JSON on stdout.
        report_folder: where to write the report; empty: nowhere.
        tensorboard_folder: where to write scalars of training steps; empty: nowhere.
        quiet: print nothing but errors and warnings.
        torchrun: torchrun's own options, script and script arguments, as ``torch.distributed.run`` reads them. torch
            writes into the namespace it runs, so pass it a copy.
        reusable_words: the options as typed, without ``--budget``, ``--json``, where reports go, and a command's own.
    """

    budget: str
    strict: bool
    plan_file: str
    probe: bool
    solver_seconds: float
    mip_solver: str
    algorithm: str
    implementations: str
    recompute: bool
    cost_model: str
    use_cache: bool
    json: bool
    report_folder: str
    tensorboard_folder: str
    quiet: bool
    torchrun: argparse.Namespace
    reusable_words: tuple[str, ...] = ()

    @classmethod
    def from_namespace(cls, args: argparse.Namespace, reusable_words: Sequence[str] = ()) -> LaunchOptions:
        """Take the values from what a ``LaunchParser`` parsed.

        Args:
            args: the namespace; it is not kept.
            reusable_words: see the attribute.
        """
        own = launch_option_names()
        return cls(
            budget=args.budget,
            strict=args.strict,
            plan_file=args.plan or "",
            probe=not args.no_probe,
            solver_seconds=args.solver_seconds,
            mip_solver=args.solver,
            algorithm=args.algorithm,
            implementations=args.implementations,
            recompute=not args.no_recompute,
            cost_model=args.cost_model,
            use_cache=not args.no_cache,
            json=args.json,
            report_folder=args.report,
            tensorboard_folder=args.tensorboard,
            quiet=args.quiet,
            torchrun=argparse.Namespace(**{name: value for name, value in vars(args).items() if name not in own}),
            reusable_words=tuple(reusable_words),
        )

    @property
    def script(self) -> str:
        """The script, module or program to launch."""
        return str(self.torchrun.training_script)

    @property
    def script_args(self) -> tuple[str, ...]:
        """The script's own arguments."""
        return tuple(self.torchrun.training_script_args)

    @property
    def is_module(self) -> bool:
        """Whether ``script`` names a module (``-m``)."""
        return bool(self.torchrun.module)

    @property
    def min_nodes(self) -> int:
        """The number of nodes; the smallest one for an elastic launch (``--nnodes MIN:MAX``)."""
        return int(str(self.torchrun.nnodes).partition(":")[0])

    @property
    def several_nodes(self) -> bool:
        """Whether the launch may have more nodes than one."""
        return int(str(self.torchrun.nnodes).rpartition(":")[2]) > 1

    @property
    def keeps_worker_logs(self) -> bool:
        """Whether torchrun writes the workers' output to files."""
        return bool(self.torchrun.redirects != "0" or self.torchrun.tee != "0")

    @property
    def hides_warnings(self) -> bool:
        """Whether the stderr of local rank 0, which warns for all, goes to a file or nowhere, and not to the screen."""
        args = self.torchrun
        shown = str(args.local_ranks_filter or "0").split(",")
        return "0" not in shown or (_has_stderr_of_0(args.redirects) and not _has_stderr_of_0(args.tee))

    def with_script_args(self, script_args: Sequence[str]) -> LaunchOptions:
        """The same launch with other arguments for the script."""
        torchrun = copy.copy(self.torchrun)
        torchrun.training_script_args = list(script_args)
        return replace(self, torchrun=torchrun)

    def solver_options(self) -> Options:
        """The solver's options."""
        return Options(
            seconds=self.solver_seconds,
            recompute=self.recompute,
            implementations=parse_kinds(self.implementations),
            mip_solver=self.mip_solver,
        )

    def command_line(self, budget: str) -> str:
        """The command that launches this with ``budget``, for the user to type next."""
        return shlex.join(["monetrun", "--budget", budget, *self.reusable_words, self.script, *self.script_args])


def _has_stderr_of_0(streams: str) -> bool:
    """Whether ``--redirects`` or ``--tee`` names local rank 0's stderr: ``3`` for all ranks, or ``0:2,1:3``."""
    of_ranks = dict(part.split(":") for part in streams.split(",")) if ":" in streams else {"0": streams}
    return bool(int(of_ranks.get("0", "0")) & 2)
