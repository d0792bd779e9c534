"""Text to train on that ships with Python: its language reference, as ``help()`` shows it (about 500 KB)."""

from __future__ import annotations

import importlib.util


def text() -> str:
    """All topics, in the order of their names.

    Raises:
        SystemExit: this Python came without them.
    """
    if importlib.util.find_spec("pydoc_data") is None:
        raise SystemExit("this Python has no pydoc_data: install its documentation, or give --text FILE")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read(path: str) -> str:
    """The text of a file, or Python's where no file is given."""
    if not path:
        return text()
    with open(path, encoding="utf-8") as file:
        return file.read()
