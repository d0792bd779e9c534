"""The function that torch calls at the end of ``import torch`` where monetrun is installed (``torch.backends``)."""

from __future__ import annotations

import os

MODE = "MONETRUN_MODE"

# Set in workers of --run-path until they run: the rank's variables are not there yet (``run_path``).
NO_RANK_YET = "MONETRUN_NO_RANK_YET"


def autoload() -> None:
    """Start a session if monetrun started this process, as a worker or for a trial run; otherwise do nothing.

    Never raises, since that would break ``import torch``: errors are logged, and the script runs as it is.
    """
    if MODE not in os.environ or NO_RANK_YET in os.environ:
        return
    import logging

    try:
        from monetrun.runtime import session
        from monetrun.runtime.settings import CHECKS

        if os.environ[MODE] in CHECKS:
            from monetrun.runtime.checked_session import CheckedSession

            session.start(os.environ, CheckedSession)
        else:
            session.start(os.environ)
    except Exception:
        logging.getLogger("monetrun").exception("monetrun could not start in this process; the script runs as it is")
