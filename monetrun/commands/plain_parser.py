"""The parser of commands that take no launch: ``cache``, ``doctor``, ``explain``."""

from __future__ import annotations

import argparse
from typing import NoReturn

from monetrun.commands import SUMMARIES
from monetrun.core.errors import UsageError


class PlainParser(argparse.ArgumentParser):
    """A parser that raises ``UsageError``, for the command ``monetrun NAME``."""

    def error(self, message: str) -> NoReturn:
        """Raise ``UsageError`` with argparse's message."""
        raise UsageError(message, f"{self.prog} --help")


def plain_parser(name: str) -> PlainParser:
    """The parser of ``monetrun NAME``, without options."""
    return PlainParser(prog=f"monetrun {name}", description=SUMMARIES[name], allow_abbrev=False)
