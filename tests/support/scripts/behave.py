"""End as the arguments say: RANK=HOW, HOW of exit:N, kill:N, raise, refuse, obey (sleep) or stay (whatever comes)."""

import os
import signal
import sys
import time

from monetrun.core.errors import BudgetExceeded
from monetrun.runtime.traceback_file import install_excepthook


def fail_for_a_reason():
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
        fail_for_a_reason()
    if what == "refuse":
        raise BudgetExceeded("wanted 3 GiB", "ask for less")
    if what == "stay":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        time.sleep(0.05)
