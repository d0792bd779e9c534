"""``python -m monetrun``: the same as the ``monetrun`` command."""

import sys

from monetrun.commands.main import main

if __name__ == "__main__":  # torchrun's --run-path workers import this module again
    sys.exit(main())
