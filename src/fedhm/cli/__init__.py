"""The command line."""

from fedhm.cli.commands import main

__all__ = ["main"]
