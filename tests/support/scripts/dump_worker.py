"""Write what this worker was given to $DUMP_FOLDER/<rank>.json."""

import json
import os
import sys

given = {
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "path": sys.path,
    "affinity": sorted(os.sched_getaffinity(0)),
    "name": __name__,
}
with open(os.path.join(os.environ["DUMP_FOLDER"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(given, file)
