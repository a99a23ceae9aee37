"""The command line: arguments, environment, rendering and exit codes."""

from shardwise.cli.main import main

__all__ = ["main"]
