"""``shardwise train --keys``: every key of a configuration."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from shardwise.cli.launch import fail
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.tenants.sections import ConfigKey

_LEAST_OF_A_TABLE = 80
"""Columns. In fewer, three beside each other would be cut into syllables."""


def print_keys(context: click.Context, _parameter: click.Parameter, value: bool) -> None:  # noqa: FBT001 - click's
    """The callback of ``--keys``: a table on a terminal; elsewhere a line for each key, with tabs."""
    if not value or context.resilient_parsing:
        return
    try:
        from shardwise.tenants.sections import config_keys
    except ModuleNotFoundError as error:
        fail(
            ConfigError(
                f"configurations are read by {error.name}, which is not installed; pip install 'shardwise[train]'"
            )
        )
    keys = config_keys()
    if sys.stdout.isatty():
        _show(keys)
    else:
        for key in keys:
            click.echo(f"{key.path}\t{key.type}\t{key.default}")
    context.exit()


_NULL = "null: not given; `shardwise docs train` says what is done then"


def _show(keys: tuple[ConfigKey, ...]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if console.width < _LEAST_OF_A_TABLE:
        for key in keys:
            console.print(Text(key.path, style="bold", overflow="fold"))
            console.print(Padding(Text(f"{key.type}\ndefault: {key.default}", overflow="fold"), (0, 0, 0, 2)))
        console.print(_NULL, style="dim")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("key", style="bold", no_wrap=True)
    table.add_column("type", overflow="fold")
    table.add_column("default", overflow="fold")
    before = ""
    for key in keys:
        section = key.path.partition(".")[0]
        if before and section != before:
            table.add_row()
        before = section
        table.add_row(Text(key.path), Text(key.type), Text(key.default))
    console.print(table)
    console.print(_NULL, style="dim")
