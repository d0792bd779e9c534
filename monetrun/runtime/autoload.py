"""What torch calls at the end of ``import torch`` wherever monetrun is installed (entry point ``torch.backends``)."""

from __future__ import annotations

import os

MODE = "MONETRUN_MODE"


def autoload() -> None:
    """Do nothing, unless this process was started by monetrun as a worker or as a probe.

    Never raises, since that would break ``import torch``: what goes wrong is logged, and the script runs as it is.
    """
    if MODE not in os.environ:
        return
    import logging

    try:
        from monetrun.runtime import session

        session.start(os.environ)
    except Exception:
        logging.getLogger("monetrun").exception("monetrun could not start in this process; the script runs as it is")
