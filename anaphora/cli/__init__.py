"""The command line: one file a command.

Knows every other plane; nobody imports it. Nothing here imports torch before a command needs it, so that `--help`
answers at once.
"""
