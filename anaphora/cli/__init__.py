"""The command line: `anaphora generate | chat | demo | models`, one file a command.

Knows every other plane; nobody imports it. Nothing here imports torch before a command needs it, so that `--help`
answers at once.
"""
