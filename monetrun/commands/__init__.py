"""The ``monetrun`` command: one file a command."""
