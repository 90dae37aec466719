"""`python -m fedhm` is the command line."""

from fedhm.cli import command

command()
