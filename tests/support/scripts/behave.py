"""End as the arguments RANK=HOW say: HOW is exit:N, kill:N, raise[:SECONDS], refuse, obey or stay.

refuse raises BudgetExceeded; obey sleeps, and ends at a signal; stay sleeps, and ignores signals.
"""

import os
import signal
import sys
import time

from monetrun.core.errors import BudgetExceeded
from monetrun.runtime.traceback_file import install_excepthook


def fail_with_a_message():
    raise ValueError("a bad batch")


install_excepthook()
print("ready", flush=True)
for how in sys.argv[1:]:
    rank, _, what = how.partition("=")
    if rank != os.environ["RANK"]:
        continue
    what, _, number = what.partition(":")
    if what == "exit":
        sys.exit(int(number))
    if what == "kill":
        os.kill(os.getpid(), int(number))
    if what == "raise":
        time.sleep(float(number or 0))
        fail_with_a_message()
    if what == "refuse":
        raise BudgetExceeded("wanted 3 GiB", "ask for less")
    if what == "stay":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)
