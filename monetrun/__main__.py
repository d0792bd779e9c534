"""``python -m monetrun``: the same as the ``monetrun`` command."""

from monetrun.commands.main import console

if __name__ == "__main__":  # torchrun's --run-path workers import this module again
    console()
