"""Run by every interpreter that tests start: garbage is not collected until torch is imported, and not in torch.

Its import makes a million objects, and all stay. Looking through them again and again takes a fifth of the import's
time, and more at the interpreter's end.
"""

import gc
import importlib.abc
import sys

LAST = "monetrun.runtime.autoload"  # torch loads its extensions when all else is there


class UntilTorchIsThere(importlib.abc.MetaPathFinder):
    """Ends the wait; finds nothing."""

    def find_spec(self, fullname, path, target=None):
        """Of the importing machinery."""
        if fullname == LAST:
            sys.meta_path.remove(self)
            gc.enable()
            gc.freeze()


gc.disable()
sys.meta_path.insert(0, UntilTorchIsThere())
