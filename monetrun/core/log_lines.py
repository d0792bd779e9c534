"""How warnings of monetrun's logger look where nobody has configured logging: as all other lines of monetrun."""

from __future__ import annotations

import logging


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints on stderr, in place of ``logging.lastResort``, which prints the bare message."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless the script's own handlers do."""
        if not logging.getLogger().handlers:
            super().emit(record)


def print_warnings() -> None:
    """Print what monetrun's logger has to say; a second call changes nothing."""
    logger = logging.getLogger("monetrun")
    if any(isinstance(handler, _Lines) for handler in logger.handlers):
        return
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)  # a script that asks for all messages of its own has no use for ours
    lines = _Lines()
    lines.setLevel(logging.WARNING)
    lines.setFormatter(logging.Formatter("monetrun: warning: %(message)s"))
    logger.addHandler(lines)
