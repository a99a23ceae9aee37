"""Starts ranks as processes of this machine, or joins those of a launcher."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessException, start_processes

from shardwise.core import machine
from shardwise.core.console import surviving_console
from shardwise.core.errors import RankLostError, ShardingError, ShardwiseError
from shardwise.core.phases import phase
from shardwise.ranks.control_channel import ADVICE_ON_ENDS, WARN_AGAIN_S, WARN_S, waiting_for
from shardwise.ranks.failure_detection import get_detector
from shardwise.ranks.outcomes import Failure, decode, encode
from shardwise.ranks.stop_signals import (
    RELAYED,
    SAME_REQUEST_S,
    STOP_SIGNALS,
    StoppedNowError,
    acknowledge_stop,
    announce_stoppable,
    get_handlers,
    ignore_stop_signals,
    raise_signal,
)

RankFunction: TypeAlias = Callable[..., Any]
"""A function of an importable module, called on every rank."""

_log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""Seconds for which the other ranks may continue after one has failed, and as many after SIGTERM."""

_LOOK_S = 1.0
"""Seconds between two looks at whether ranks can be asked to stop."""


class RankError(ShardwiseError):
    """A rank raised an error other than shardwise's. The text has its traceback."""


class RankEndedError(RankError):
    """A rank's process ended in the middle of a call."""


def run_spawned(size: int, function: RankFunction, *args: Any, asks_first: bool = False) -> list[Any]:
    """Call the function of an importable module on ``size`` new processes. Return its values (picklable) by rank.

    ``torch.multiprocessing`` starts the processes. Each has its own accelerator, if the machine has any. When this
    process is interrupted or terminated, the ranks are ended. With ``asks_first`` the request is passed on to them
    once the first one is in a block of ``stopping_on_signals``, and they have unlimited time until a later signal.

    Raises:
        ShardwiseError: as raised by the function, from the rank that failed first.
        RankError: a rank failed otherwise, or ended.
        StoppedNowError: a signal has ended the ranks. KeyboardInterrupt if it was Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as folder, _lock(folder):
        # The folder has the port of the ranks' store, "begun" and "stoppable" of the first rank, and outcomes.
        call = size, folder, function, args
        context: Any = start_processes(_run_rank, call, size, join=False, start_method="spawn")
        with _signals(context.processes, Path(folder, "stoppable") if asks_first else None) as stop:
            try:
                first = _join_all(context, Path(folder, "begun"), stop)
            # Even when a signal raises here: no rank outlives this call.
            finally:
                for process in context.processes:
                    process.kill()
                    process.join()
        outcomes = [
            _read_outcome(Path(folder, str(rank)), rank, process.exitcode)
            for rank, process in enumerate(context.processes)
        ]
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, ShardwiseError)}
    # The cause, not its consequences: other ranks lost their peer, or were ended because the first one had failed.
    if failures:
        error = failures[min(failures, key=lambda rank: (_priority(failures[rank]), rank != first))]
        # A signal ended the first one, as the OOM killer's: others have lost it, or the store that it held, or
        # raised another library's error of their connection to it.
        if first is not None and isinstance(error, RankLostError | RankError):
            is_killed = (context.processes[first].exitcode or 0) < 0
            error = failures.get(first, error) if is_killed else error
        # A rank that ended by the request itself has waited for another one, which is no error of either.
        codes = {128 + number for number in (*STOP_SIGNALS, RELAYED)}
        has_waited = first is not None and context.processes[first].exitcode in codes
        if stop.number is not None and has_waited and _priority(error) > 1:
            raise_signal(stop.number)
        raise error
    return outcomes


def _priority(error: BaseException) -> int:
    """Return a sort key: deliberate errors (0) come before those of ranks that then lost their peer."""
    later = (RankEndedError, RankLostError, RankError)
    return 3 - next((place for place, kind in enumerate(later) if isinstance(error, kind)), 3)


@contextmanager
def _lock(folder: str) -> Iterator[None]:
    """Keep systemd-tmpfiles from removing an old folder, which it does not if the folder is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


class _Stop:
    """A stop that ranks can be asked for.

    Attributes:
        number: the signal that was passed on to them, if any.
    """

    def __init__(self, stoppable: Path | None) -> None:
        self.number: int | None = None
        self._stoppable = stoppable
        self._was_stoppable = False

    def look(self) -> bool:
        """Return whether the first rank has ever made the file ``stoppable``, which others may have removed."""
        self._was_stoppable = self._was_stoppable or (self._stoppable is not None and self._stoppable.exists())
        return self._was_stoppable


def _join_all(context: Any, begun: Path, stop: _Stop) -> int | None:
    """Wait for all ranks, but only a few seconds more once one has failed. Return the rank that failed first.

    The first rank makes the file ``begun`` when it calls the function.
    """
    try:
        with phase(f"start {len(context.processes)} ranks, which import torch, too"):
            while not begun.exists() and not context.join(timeout=0.1, grace_period=_GRACE_S):
                pass
        while not context.join(timeout=_LOOK_S, grace_period=_GRACE_S):
            stop.look()
    except ProcessException as error:
        return int(error.error_index)
    return None


def _read_outcome(file: Path, rank: int, exit_code: int | None) -> Any:
    """Return the value or the error of a rank."""
    # A folder that was removed may have been made again by another user.
    if not file.exists() or file.parent.stat().st_uid != os.getuid():
        text = f"rank {rank}: its process ended with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            text += f" ({signal.strsignal(-exit_code)}). {ADVICE_ON_ENDS}"
        return RankEndedError(text)
    outcome = decode(file.read_bytes())
    if not isinstance(outcome, Failure):
        return outcome
    return RankError(outcome.message) if outcome.kind == RankError.__name__ else outcome.to_error()


@contextmanager
def _signals(ranks: Sequence[BaseProcess], stoppable: Path | None) -> Iterator[_Stop]:
    """Raise on stop signals. Once the file ``stoppable`` exists, the first one is passed on to the ranks instead.

    See [Note: One request] in ``ranks/stop_signals.py``.
    """
    stop = _Stop(stoppable)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    requested_s: float | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal requested_s
        # This process ends now, and its ranks with it: no rank can be asked, or this is a second request.
        is_second = requested_s is not None and time.monotonic() - requested_s > SAME_REQUEST_S
        if is_second or not stop.look():
            raise_signal(number)
        if requested_s is None:
            stop.number, requested_s = number, time.monotonic()
            for process in ranks:  # before anything that may fail or block
                with suppress(OSError, ValueError):
                    if process.pid is not None and process.exitcode is None:
                        os.kill(process.pid, RELAYED)
            acknowledge_stop()

    handlers = get_handlers(STOP_SIGNALS)
    for number, handler in handlers.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup
            signal.signal(number, pass_on)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


# On the ranks


def _run_rank(rank: int, size: int, folder: str, function: RankFunction, args: Sequence[Any]) -> None:
    """Join the other ranks, call the function, and write its outcome to a file in ``folder``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; the parent handles it
    # A request reaches all ranks as soon as the first one is stoppable. One that is not yet, or no longer, goes on:
    # ranks agree on a request to any of them.
    signal.signal(RELAYED, signal.SIG_IGN)
    if rank == 0:
        announce_stoppable(Path(folder, "stoppable"))
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: sent when the parent ends
    # A spawned process would spawn its own children, too: data workers start as they do under other launchers.
    multiprocessing.set_start_method(None, force=True)
    with surviving_console():
        outcome = _call_in_group(rank, size, folder, function, args)
    with suppress(FileExistsError):  # all of /tmp may have been removed
        os.mkdir(folder, 0o700)
    # By a rename: the parent process takes a file that exists for a whole outcome.
    Path(folder, f"{rank}.new").write_bytes(encode(outcome))
    os.replace(Path(folder, f"{rank}.new"), Path(folder, str(rank)))
    has_failed = isinstance(outcome, Failure)
    # The first rank has the store, in which others may still read a result. If one of them ends without an outcome,
    # the parent process ends all.
    while rank == 0 and not has_failed and not all(Path(folder, str(other)).exists() for other in range(1, size)):
        time.sleep(0.02)
    sys.exit(has_failed)


def _call_in_group(rank: int, size: int, folder: str, function: RankFunction, args: Sequence[Any]) -> Any:
    """Return the function's value on a rank of a new process group, or its failure."""
    from shardwise.fsdp.torch_private import select_accelerator

    try:
        torch.set_num_threads(max(1, machine.processor_count() // size))
        backends, store = select_accelerator({}, rank, size), _open_store(rank, size, folder)
        dist.init_process_group(backends, store=store, rank=rank, world_size=size)
        try_collectives()
        if rank == 0:
            Path(folder, "begun").touch()
        return function(*args)
    except ShardwiseError as error:
        return Failure.from_error(error)
    except StoppedNowError:
        raise
    except BaseException:
        text = "".join(f"[rank {rank}] {line}\n" for line in traceback.format_exc().splitlines())
        return Failure(RankError.__name__, text.strip())


def _open_store(rank: int, size: int, folder: str) -> Store:
    """Return the store of new ranks: a server in the first one, whose port the others read from a file.

    The file itself would do only for a short call, because each value that is set is appended to it.
    """
    ports = FileStore(str(Path(folder, "store")), size)
    if rank != 0:
        return TCPStore("127.0.0.1", int(ports.get("port")), size, is_master=False, wait_for_workers=False)
    # A socket of ours, because torch's would listen on all interfaces.
    listener = socket.create_server(("127.0.0.1", 0))
    port, descriptor = listener.getsockname()[1], listener.detach()
    store = TCPStore("127.0.0.1", port, size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    ports.set("port", str(port))
    return store


def try_collectives() -> None:
    """Carry out a first collective on accelerators, so that a backend that does not work is named at the start.

    Collective: yes, over the default group.

    Raises:
        ShardingError: it failed.
    """
    from shardwise.fsdp.torch_private import accelerator, has_collectives

    kind = accelerator()
    if kind is None or not has_collectives(kind):
        return
    try:
        ones = torch.ones(1, device=kind)
        dist.all_reduce(ones)
        ones.cpu()
    except RuntimeError as error:
        raise ShardingError(
            f"{dist.get_default_backend_for_device(kind)}: the first collective failed on rank {dist.get_rank()}: "
            f"{error}. Each rank needs a device of its own, and a network that all of them reach. NCCL_DEBUG=INFO "
            "shows more"
        ) from error


# Ranks of a launcher

_RENDEZVOUS = timedelta(minutes=10)
"""The time for which ranks of a launcher wait for each other."""


def run_launched(environment: Mapping[str, str], function: RankFunction, *args: Any) -> list[Any]:
    """Call the function as a rank of a launcher. Return its values by rank, on every rank.

    Ranks meet by the ``environment`` of torchrun, as by ``env://``. Afterwards the process group is destroyed,
    unless the function raises: the other ranks may never finish. If the function destroys it, as accelerate does,
    only this rank's value is returned. Collective: yes, over all ranks.

    Raises:
        RankLostError: ranks have not come within ten minutes, or could not connect to each other.
        ShardingError: there are more ranks than accelerators.
    """
    from shardwise.fsdp.torch_private import default_store, select_accelerator, set_timeout
    from shardwise.ranks.world import World

    local_size = int(environment.get("LOCAL_WORLD_SIZE") or 1)
    backends = select_accelerator(environment, int(environment["LOCAL_RANK"]), local_size)
    try:
        store, rank, size = _launcher_store(environment)
        dist.init_process_group(backends, timeout=_RENDEZVOUS, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise RankLostError(
            f"the ranks could not meet ({cause}). Start every rank, with one MASTER_ADDR and one free MASTER_PORT"
        ) from error
    # The timeout above was for ranks that start late. Collectives get torch's default.
    set_timeout(dist.default_pg_timeout.total_seconds())
    # Before the first collective: a rank that is lost in it is named.
    get_detector(default_store(), dist.get_rank())
    try_collectives()
    values = [function(*args)]
    # Before any rank can end: a launcher ends all others once one has ended with a code other than 0, and each is
    # to end with its own.
    ignore_stop_signals()
    if dist.is_initialized():
        with World.current(call="run_launched") as world:
            values = world.all_gather_object(values[0])
        dist.destroy_process_group()
    return values


def _launcher_store(environment: Mapping[str, str]) -> tuple[Store, int, int]:
    """Return the store of the ranks that a launcher started, once all have come, and this rank and their number.

    As ``env://`` of torch it connects to the address of the master. But missing ranks are logged, and attempts are
    told apart: the store of torchrun outlives its ranks, and nodes count restarts differently. So each rank sets
    a new token under its number, and the first one answers every token by its own, which names the attempt.
    """
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    # torchrun has a store of its own, to which all ranks connect. Otherwise the first rank has it.
    is_server = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    tcp_store = TCPStore(host, port, size, is_server, _RENDEZVOUS, wait_for_workers=False, multi_tenant=True)
    tokens, token = PrefixStore("shardwise/tokens", tcp_store), secrets.token_hex(8)
    tokens.set(str(rank), token)
    store: Store | None = None
    # Polled, not waited for: torch's wait says nothing of the ranks that are missing.
    end, warn_at = time.monotonic() + _RENDEZVOUS.total_seconds(), time.monotonic() + WARN_S
    while True:
        if rank == 0:  # a token may be of an earlier attempt, and replaced once its rank has come
            for other in _missing_ranks(store, size):
                if tokens.check([str(other)]):
                    tokens.set(tokens.get(str(other)).decode(), token)
        if store is None and tokens.check([token]):
            store = PrefixStore(f"shardwise/attempt/{tokens.get(token).decode()}", tcp_store)
            store.set(f"here/{rank}", "")
        if store is not None and store.check([f"here/{other}" for other in range(size)]):
            return store, rank, size
        if time.monotonic() > warn_at:
            warn_at = time.monotonic() + WARN_AGAIN_S
            missing = [0] if store is None else _missing_ranks(store, size)
            text = waiting_for(missing, size, tcp_store)
            if time.monotonic() > end:
                raise RankLostError(f"{text}: timed out. Start every rank")
            _log.warning("%s", text)
        time.sleep(0.05)


def _missing_ranks(store: Store | None, size: int) -> list[int]:
    return [rank for rank in range(size) if store is None or not store.check([f"here/{rank}"])]


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD`` of glibc's malloc.h."""


def return_freed_blocks(environment: Mapping[str, str]) -> None:
    """Have glibc return freed blocks of 1 MiB and more to the system at once, if this rank computes on the CPU.

    By default it keeps blocks below 32 MiB once one was freed. torch asks for aligned blocks, and none of the freed
    ones fits a block of its own size, so that a training run holds its peak twice. A threshold of the user's stays.
    """
    _set_malloc({_MMAP_THRESHOLD: 1 << 20}, environment)


def keep_freed_blocks(environment: Mapping[str, str]) -> None:
    """Have glibc keep freed blocks of less than 1 GiB for later ones, if this rank computes on the CPU.

    By default blocks of 32 MiB and more are mapped anew, and the system clears their pages: a sixth of the time of
    a pass of 8,192 tokens through a model of 36 million parameters. A threshold of the user's stays, and so do all
    before glibc 2.35, which takes none above 32 MiB.
    """
    _set_malloc({_MMAP_THRESHOLD: 1 << 30, _TRIM_THRESHOLD: 1 << 30}, environment)


def _set_malloc(values: Mapping[int, int], environment: Mapping[str, str]) -> None:
    from shardwise.fsdp.torch_private import accelerator

    tunables = environment.get("GLIBC_TUNABLES", "")
    for name in ("mmap_threshold", "trim_threshold"):
        if f"MALLOC_{name.upper()}_" in environment or f"glibc.malloc.{name}" in tunables:
            return
    library = ctypes.CDLL(None)
    if accelerator() is not None or not hasattr(library, "mallopt"):
        return
    # In order: if the first is refused, the second alone would fix glibc's adaptive threshold at 128 KiB.
    for option, value in values.items():
        if not library.mallopt(option, value):
            return


def get_rank_and_size() -> tuple[int, int]:
    """Return this rank, and the number of ranks, or (0, 0) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 0)
