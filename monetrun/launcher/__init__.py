"""From a command line to running workers: options, trial run, planning, torchrun's agent, and what is printed."""
