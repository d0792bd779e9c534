"""The ``monetrun`` command: one file a command.

Every command's module has ``run(words) -> int``: it parses what follows the command's name, does the command's work and
returns the exit code. How words are parsed depends on whether a launch's options are among them:

    prepare_parser() -> LaunchParser     torchrun's grammar: batch, check, frontier, plan, run
    command: click.Command               a click command: cache, doctor, explain

``run.py`` is the command without a name, ``monetrun train.py``: the launch. To add a command, add its module and a line
to ``SUMMARIES``.
"""

SUMMARIES = {
    "batch": "Find the largest batch that trains within a budget.",
    "cache": "List, check or move what is kept between runs: plans, trial runs, measurements.",
    "check": "Compare the planned step with the plain one: values, bytes, and seconds by operator.",
    "doctor": "Check which parts of this machine monetrun can use, and what is missing.",
    "explain": "Explain a plan: what is recomputed, what that saves, what the peak holds.",
    "frontier": "Show what each budget costs, from the plain peak to the smallest feasible.",
    "plan": "Plan a launch without training, and write the plan.",
}
"""The summary of each command, by the name of its module."""
