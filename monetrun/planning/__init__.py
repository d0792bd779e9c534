"""From a recorded training step and a budget to a plan, and the searches that plan many times; no torch."""
