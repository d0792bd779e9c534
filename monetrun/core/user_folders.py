"""Where a user's files are kept, after the XDG Base Directory Specification."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

# What flock says on some network file systems.
NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def user_cache(environ: Mapping[str, str]) -> Path:
    """``$XDG_CACHE_HOME/monetrun``, else ``~/.cache/monetrun``; always absolute.

    A relative ``XDG_CACHE_HOME`` is ignored, as the specification asks: what it names depends on where one stands.

    Raises:
        RuntimeError: it is not set, and there is no home folder.
    """
    xdg = environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "monetrun"
