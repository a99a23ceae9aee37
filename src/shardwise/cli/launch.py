"""The ranks of a command: those of a launcher, by the environment variables of torchrun, or new ones."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.progress import importing, signs_of_life
from shardwise.core.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.ranks.processes import RankFunction


def read_launch(environment: Mapping[str, str], nproc_per_node: int = 1) -> Mapping[str, int] | None:
    """Return the numbers set by a launcher such as torchrun, or None if there is no launcher.

    Raises:
        ConfigError: the environment contradicts ``--nproc-per-node``, or is incomplete or invalid.
    """
    if "RANK" not in environment:
        return None
    # RANK alone may be left over from another program, so all of torchrun's variables are checked.
    texts = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    bad = [f"{name}={text}" for name, text in texts.items() if not (text.isascii() and text.isdigit())]
    if not environment.get("MASTER_ADDR"):
        bad.append("MASTER_ADDR=")
    numbers = {} if bad else {name: int(text) for name, text in texts.items()}
    if bad or numbers["RANK"] >= numbers["WORLD_SIZE"] or numbers["MASTER_PORT"] >= 1 << 16:
        values = ", ".join(bad or [f"{name}={text}" for name, text in texts.items()])
        raise ConfigError(f"RANK: is in the environment, with {values}. Set what torchrun sets, or unset RANK")
    if nproc_per_node > 1:
        raise ConfigError(
            f"--nproc-per-node={nproc_per_node}: the ranks have been started already (RANK is set in the "
            "environment). Leave the option out, or start the command without torchrun"
        )
    return numbers


def require_one_process() -> None:
    """Refuse several ranks of a launcher, of which each would do the whole work.

    Raises:
        ConfigError: there are several, or as :func:`read_launch`.
    """
    launch = read_launch(os.environ)
    if launch is not None and launch["WORLD_SIZE"] > 1:
        raise ConfigError(
            f"RANK: is in the environment, with WORLD_SIZE={launch['WORLD_SIZE']}, and this command is one "
            "process. Start it without torchrun, or unset RANK"
        )


def run_ranks(nproc_per_node: int, function: RankFunction, *args: Any, libraries: str | None) -> list[Any]:
    """Call ``function(*args)`` on every rank of the launcher, or on new ranks. One rank on the CPU is this process.

    A first stop signal is passed on to new ranks. Return the values by rank, in all processes of a launcher. Say
    that these ``libraries`` are imported, or nothing if they have been. Ranks may open as many files as the hard
    limit of this process allows.

    Raises:
        ConfigError: as :func:`read_launch`.
        ShardwiseError: as raised by the function.
    """
    launch = read_launch(os.environ, nproc_per_node)
    # New ranks inherit it: each has a socket for every other rank, and files of data workers or of clients.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with nullcontext() if libraries is None else importing(libraries):
        from shardwise.fsdp.torch_private import accelerator
        from shardwise.ranks.processes import run_launched, run_spawned
    if launch is not None:
        return run_launched(os.environ, function, *args)
    # On an accelerator one rank has a process group, too: its mesh is what places a model there.
    if nproc_per_node == 1 and accelerator() is None:
        return [function(*args)]
    with signs_of_life(""):  # until the first rank shows its own
        return run_spawned(nproc_per_node, function, *args, asks_first=True)


def print_report(report: Any, *, as_json: bool) -> None:
    """Print a report as text, or as one JSON object."""
    click.echo(to_json(report.to_dict()) if as_json else str(report))


def to_json(value: Any) -> str:
    """Write JSON, with null for NaN and infinity, which JSON does not have."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=2)
