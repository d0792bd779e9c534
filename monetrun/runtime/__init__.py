"""Runs in the user's process: the import hook, the planned calls, and the engine behind them."""
