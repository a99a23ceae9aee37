"""Runs commands in the process of a test."""

from inspect import signature

from click.testing import CliRunner

# click before 8.2 mixes stderr into stdout unless told not to.
RUNNER = CliRunner(**({"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}))
