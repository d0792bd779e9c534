"""Data and the judge: graphs, costs, schedules, plans, and ``simulate``, which computes their peaks; no torch."""
