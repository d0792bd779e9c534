"""The ``monetrun`` command: one file a command.

Every command's module has the same two functions:

    prepare_parser() -> argparse.ArgumentParser     the command's options
    run(words) -> int                               parses what follows the command's name, and returns the exit code

``run.py`` is the command without a name, ``monetrun train.py``: the launch. To add a command, add its module and a line
to ``SUMMARIES``.
"""

SUMMARIES = {
    "batch": "Find the largest batch that trains within a budget.",
    "cache": "What is kept between runs: plans, probes, measured costs.",
    "doctor": "Say what of this machine monetrun can use, and what is missing.",
    "explain": "Say what a plan does: what runs again, what that saves, what the peak holds.",
    "frontier": "Show what each budget costs, from the plain peak to the smallest feasible.",
    "plan": "Plan a launch without training, and write the plan.",
}
"""The summary of each command, by the name of its module."""
