"""The command line: one file per command, `group` finds them, `common` is what they share."""

# This file holds no code: the command files `list` and `compile` become attributes here and would hide the built-ins.
from kvdsl.cli.group import commands, main

__all__ = ["commands", "main"]
