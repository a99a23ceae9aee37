"""Where the ranks of a command come from: the environment of a launcher, an option, or nowhere.

Commands whose work is done by ranks give it to :func:`run_ranks`. What torchrun leaves in the environment is read
here and nowhere else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, assert_never

import click

from shardwise.errors import ConfigError, ShardwiseError

TRAINING = ("shardwise.training.session", "transformers.models.auto.modeling_auto")
"""What every training imports, whatever the model: seconds."""

_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Has torch lay large tensors on the CPU in huge pages: one fault for 512, and what is freed is given back."""

_CUDA_FROM_AFAR = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Has torch ask the driver's library whether there are GPUs (its notes on CUDA), so that no import begins to use
CUDA in a process that ranks are then forked from."""

_JOINED_AT_ONCE = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"}
"""Has glibc join what is freed with what is free beside it. Else tensors leave holes that are some bytes too small
for the next of their size, and a training on the CPU has a heap half as large again as what is in it."""

_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel*", "davinci[0-9]*")
"""Of accelerators, below ``/dev``."""


@dataclass(frozen=True, slots=True)
class InThisProcess:
    """This process does all the work, without a process group."""


@dataclass(frozen=True, slots=True)
class Spawned:
    """``size`` new processes on this machine do the work."""

    size: int


@dataclass(frozen=True, slots=True)
class Launched:
    """This process is one rank of those that torchrun, or a launcher like it, has started."""

    rank: int
    size: int
    local_rank: int
    has_generations: bool = False
    """Whether ranks are started again over the same store (torchrun's)."""


Launch: TypeAlias = InThisProcess | Spawned | Launched


def read_launch(environment: Mapping[str, str], nproc_per_node: int = 1) -> Launch:
    """What the environment and ``--nproc-per-node`` say about the ranks.

    Raises:
        ConfigError: they contradict each other, or the environment is incomplete or makes no sense.
    """
    if "RANK" not in environment:
        return InThisProcess() if nproc_per_node == 1 else Spawned(nproc_per_node)
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is in the environment, but {', '.join(missing)} is not; set what torchrun sets, or unset RANK"
        )
    rank, size, local_rank = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    has_generations = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    launched = Launched(rank, size, local_rank, has_generations)
    if (port := _number(environment, "MASTER_PORT")) >= 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} in the environment is not a port: these are below 65536")
    if launched.rank >= launched.size:
        raise ConfigError(f"RANK={launched.rank} in the environment is not below WORLD_SIZE={launched.size}")
    if nproc_per_node > 1:
        raise ConfigError(
            f"--nproc-per-node={nproc_per_node}, but the ranks have been started already (RANK is set in the "
            "environment): leave the option out, or start the command without torchrun"
        )
    return launched


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} in the environment is not a number")
    return int(text)


def run_ranks(
    nproc_per_node: int,
    function: Callable[..., Any],
    *args: Any,
    asks_first: bool = False,
    preloaded: Sequence[str] = ("torch", "transformers"),
) -> list[Any]:
    """Call ``function(*args)`` on every rank.

    When this process is interrupted or terminated, the ranks it started are ended at once; or, with ``asks_first``,
    sent SIGTERM, and ended on a second signal. Those ranks are forked from a process that imports ``preloaded``.

    Returns the values of all ranks, in order, where the result is to be shown; and an empty list in the other
    processes of a launcher. The function belongs to an importable module, and values can be pickled.

    Raises:
        ConfigError: as :func:`read_launch`.
        ShardwiseError: as raised by the function.
    """
    from shardwise.execution.memory.garbage import import_all

    launch = read_launch(os.environ, nproc_per_node)
    with _defaults(_huge_pages(os.environ)):
        match launch:
            case InThisProcess():
                import_all(preloaded)
                from shardwise.execution.processes.launched import run_alone

                return run_alone(function, *args)
            case Spawned(size):
                from shardwise.execution.processes.spawned import AskFirst, EndAtOnce, run_spawned

                ending = AskFirst() if asks_first else EndAtOnce()
                with _defaults({**_CUDA_FROM_AFAR, **_joined_at_once(Path("/dev"))}):
                    return run_spawned(size, function, *args, ending=ending, preloaded=preloaded)
            case Launched(rank, size, local_rank, has_generations):
                import_all(preloaded)
                from shardwise.execution.processes.launched import Seat, run_seated

                host, port = os.environ["MASTER_ADDR"], _number(os.environ, "MASTER_PORT")
                return run_seated(Seat(rank, size, local_rank, host, port, has_generations), function, *args)
            case _:
                assert_never(launch)


def run_fresh(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    preloaded: Sequence[str] = ("torch", "transformers"),
    timeout_s: float | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on ``size`` new processes, also where that is one; its values by rank.

    Each call has processes of its own, with the environment as the user has it.

    Raises:
        ConfigError: this process is itself one that a launcher started.
        ShardwiseError: as raised by the function, or by a rank that ended; RanksLateError after ``timeout_s``.
    """
    if isinstance(read_launch(os.environ), Launched):
        raise ConfigError("this command starts its ranks itself (RANK is set): call it without torchrun")
    from shardwise.execution.processes.spawned import run_spawned

    with _defaults(_CUDA_FROM_AFAR):
        return run_spawned(size, function, *args, preloaded=preloaded, timeout_s=timeout_s)


def _huge_pages(environment: Mapping[str, str]) -> Mapping[str, str]:
    """What is set for torch's allocator: huge pages, where the user has not decided and they cost less here."""
    from shardwise.execution.memory.first_touch import huge_pages_pay

    is_decided = not _HUGE_PAGES.keys().isdisjoint(environment)
    return _HUGE_PAGES if not is_decided and huge_pages_pay() else {}


def _joined_at_once(devices: Path) -> Mapping[str, str]:
    """What is set for glibc's heap: where there may be accelerators, nothing, since tensors are there then."""
    has_any = any(next(devices.glob(pattern), None) is not None for pattern in _DEVICES)
    return {} if has_any else _JOINED_AT_ONCE


@contextmanager
def _defaults(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these in the environment of this process, and of those it starts, where the user has not set them."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def this_place() -> tuple[int, int]:
    """This rank, and how many there are."""
    from shardwise.execution.processes import launched

    return launched.this_place()


def fail(error: ShardwiseError) -> NoReturn:
    """Say what went wrong and leave with exit code 2."""
    click.echo(f"error: {error}", err=True)
    sys.exit(2)
