"""torchrun's parser with monetrun's options added: for a launch, and for commands that take a launch's options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from monetrun.core.errors import UsageError
from monetrun.launcher.options import LaunchOptions, add_launch_options, launch_option_names

_USAGE = "monetrun [options] [torchrun's options] script.py [the script's arguments]"


class LaunchParser(argparse.ArgumentParser):
    """torchrun's parser with monetrun's options; it raises ``UsageError`` and abbreviates as torchrun does.

    Attributes:
        own: names of the options that are not torchrun's.
        not_reusable: names of options that are left out of ``LaunchOptions.reusable_words``.
        help_text: what ``--help`` prints.
        usage_text: the usage line, for errors.
        command: what is run, for errors.
    """

    own: frozenset[str] = frozenset()
    not_reusable: frozenset[str] = frozenset({"budget", "json", "report", "tensorboard"})
    help_text: str = ""
    usage_text: str = _USAGE
    command: str = "monetrun"
    _words: Sequence[str] = ()

    def parse_launch(self, words: Sequence[str]) -> tuple[LaunchOptions, argparse.Namespace]:
        """Parse a command line.

        Returns:
            The launch's options, and the whole namespace, for the options that a command added.

        Raises:
            UsageError: the words do not follow the grammar.
        """
        self._words = words
        args = self.parse_args(list(words))
        return LaunchOptions.from_namespace(args, self._reusable_words(words, args)), args

    def _reusable_words(self, words: Sequence[str], args: argparse.Namespace) -> list[str]:
        options = words[: len(words) - len(args.training_script_args) - 1]
        left_out = (self.own - launch_option_names()) | self.not_reusable
        kept: list[str] = []
        keep = True
        for word in options:
            action = self._option_string_actions.get(word.partition("=")[0])
            if action is not None:
                keep = action.dest not in left_out
            elif word.startswith("-") and word != "-":
                keep = True
            if keep:
                kept.append(word)
        return kept

    @property
    def prog(self) -> str:
        """The command that torchrun's ``--print-completion`` is for, which sets ``torchrun`` here."""
        return "monetrun"

    @prog.setter
    def prog(self, _: str) -> None:
        pass

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse calls this to expand abbreviations. Ours are never abbreviated: --no or --st would change meaning.
        return [match for match in super()._get_option_tuples(option_string) if match[0].dest not in self.own]

    def _last_taken(self) -> str:
        """Where the last word, which is to be the script, was taken for an option's value: by which one."""
        option, value = self._words[-2:] if len(self._words) > 1 else ("", "")
        action = self._option_string_actions.get(option)
        return f": {value} is the {action.metavar or 'value'} of {option}" if action and action.nargs != 0 else ""

    def format_help(self) -> str:
        """Show monetrun's help, without torchrun's fifty options."""
        return self.help_text

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError`` with argparse's message, and suggest the nearest option."""
        hint = "monetrun --help lists monetrun's options, torchrun --help all others"
        if "training_script" in message:
            message = f"no script was given{self._last_taken()}"
            hint = f"usage: {self.usage_text}; {self.command} --help says more"
        if "expected one argument" in message:
            hint = "its value is missing, or begins with - like an option (--option=VALUE is read as a value)"
        if message.startswith("ambiguous option"):
            raise UsageError(message, f"write it in full; one of the script's own: {self.command} ... -- SCRIPT ...")
        for word in message.split():
            name = word.rstrip(":,").partition("=")[0]
            if name.startswith("--") and name not in self._option_string_actions:
                if name == "--dry-run":  # as other commands name it
                    hint = "monetrun plan SCRIPT plans and trains nothing"
                elif near := difflib.get_close_matches(name, self._option_string_actions, 1):
                    hint = f"did you mean {near[0]}?"
                break
        raise UsageError(message, hint)


def help_text(commands: Mapping[str, str] | None = None) -> str:
    """What ``monetrun --help`` prints. It does not list torchrun's options: importing torch for that takes seconds.

    Args:
        commands: the summary of each command, by name.
    """
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
    add_launch_options(parser)
    return parser.format_help()


def launch_parser(commands: Mapping[str, str] | None = None) -> LaunchParser:
    """Build torchrun's parser with monetrun's options; the ``PET_*`` variables set its defaults when this is called.

    monetrun's options are recognized by their full names only, so that every abbreviation of a torchrun option works.

    Args:
        commands: the summary of each command by name, for ``--help``.
    """
    from torch.distributed import run

    # If a later torchrun has an option with the name of one of ours, ours wins and the others still work.
    result = LaunchParser(
        parents=[run.get_args_parser()],
        add_help=False,
        conflict_handler="resolve",
    )
    result.own = add_launch_options(result)
    result.help_text = help_text(commands)
    return result


def command_parser(
    name: str,
    description: str,
    add_options: Callable[[argparse._ActionsContainer], None],
    not_reusable: Sequence[str] = (),
) -> LaunchParser:
    """Build the parser of ``monetrun NAME``, which takes a launch's options and its own.

    Args:
        name: the command.
        description: what it does, for ``--help``.
        add_options: adds the command's own options; one with the name of a launch's option replaces that.
        not_reusable: further names to leave out of ``LaunchOptions.reusable_words``.
    """
    result = launch_parser()
    before = set(result._actions)
    add_options(result)
    result.own |= {action.dest for action in result._actions if action not in before}
    result.not_reusable |= set(not_reusable)
    result.command = f"monetrun {name}"
    result.usage_text = f"monetrun {name} {_USAGE.removeprefix('monetrun ')}"
    helper = argparse.ArgumentParser(
        prog=f"monetrun {name}",
        usage=result.usage_text,
        description=description,
        epilog="monetrun --help lists the options of a launch, which work here too; torchrun --help all others.",
    )
    add_options(helper)
    result.help_text = helper.format_help()
    return result
