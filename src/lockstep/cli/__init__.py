"""The command line: `main` dispatches; a command that belongs to a package is its `command.py`."""
