"""Starts ranks as processes of this machine, or joins those of a launcher.

Imports no torch: the ranks do, once. They are forked from one process, which imports this module and then the
modules that they need. Importing torch and transformers makes objects by the hundred thousand, all of which stay,
and a fifth of the time would go to searches for unreachable cycles among them. So it has no threads until the ranks
are forked. Each rank starts them again (``live_as_rank``). The process that ranks are forked from does not end by a
SIGTERM or a Ctrl-C that is meant for all of a group, and imports nothing from the folder that it happens to be in.
"""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardwise.errors import RankLostError, ShardingError, ShardwiseError
from shardwise.execution.control_channel import TELL_AGAIN_S, TELL_S, waiting_for
from shardwise.execution.failure_detection import detector_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]


if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # nobody else's signals are changed
    gc.disable()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [folder for folder in sys.path if folder]

_log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""Seconds for which the other ranks may go on after one has failed, to fail by themselves."""

_ORPHANED_S = 600.0
"""Seconds that a rank may take to end in order after the process that started it is gone."""


class RankError(ShardwiseError):
    """A rank raised an error other than shardwise's. The text has its traceback."""


class RankEndedError(RankError):
    """A rank's process ended in the middle of a call."""


class RanksLateError(RankError):
    """Ranks did not finish in time, and none had failed."""


def run_spawned(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    asks_first: bool = False,
    preloaded: Sequence[str] = ("torch",),
    timeout_s: float = math.inf,
) -> list[Any]:
    """Call the function of an importable module on ``size`` new processes. Return its values (picklable) by rank.

    Each has its own accelerator, or all compute on the CPU if the machine has none. When this process is
    interrupted or terminated, the ranks are ended. With ``asks_first`` they get SIGTERM, and unlimited time until a
    second signal. They are forked from one process that has imported ``preloaded``.

    Raises:
        ShardwiseError: as raised by the function, from the lowest rank that raised it.
        RanksLateError: ranks had not finished ``timeout_s`` seconds after the start, imports included.
        RankError: a rank failed otherwise, or ended.
    """
    context = start_server(preloaded)
    with tempfile.TemporaryDirectory(prefix="shardwise-ranks-") as name:
        folder = Path(name)
        ranks = [context.Process(target=_live, args=(rank, size, name, function, args)) for rank in range(size)]
        with _signals(ranks, asks_first=asks_first):
            try:
                for process in ranks:
                    process.start()
                late = _await_end(ranks, timeout_s)
            except EOFError as error:
                cause = f"as it imported {', '.join(preloaded)}"
                raise RankError(f"the process that ranks are forked from ended {cause}") from error
            finally:
                for process in ranks:
                    if process.pid is not None:
                        process.kill()
                        process.join()
        values = [
            _outcome(folder / str(rank), rank, process.exitcode)
            for rank, process in enumerate(ranks)
            if rank not in late
        ]
    if failures := [value.error for value in values if isinstance(value, _Failed)]:
        raise min(failures, key=_priority)
    if late:
        raise RanksLateError(f"rank {', '.join(map(str, late))} did not finish in {timeout_s:g} s; it was ended")
    return values


def start_server(preloaded: Sequence[str]) -> multiprocessing.context.ForkServerContext:
    """Start the process that ranks are forked from, unless there is one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *preloaded])
    multiprocessing.forkserver.ensure_running()
    return context


class _Failed:
    """The error of a rank, as its outcome."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _priority(error: BaseException) -> int:
    """Return the priority of an error: deliberate errors come before those of ranks that then lost their peer."""
    later = (RankEndedError, RankLostError, RankError)
    return 3 - next((place for place, kind in enumerate(later) if isinstance(error, kind)), 3)


def _await_end(ranks: Sequence[BaseProcess], timeout_s: float) -> list[int]:
    """Wait for all ranks, but only a few seconds more once one has failed. Return those that still run."""
    end, has_failed = time.monotonic() + timeout_s, False
    while running := [rank for rank, process in enumerate(ranks) if process.is_alive()]:
        left_s = None if end == math.inf else max(0.0, end - time.monotonic())
        if not wait([ranks[rank].sentinel for rank in running], timeout=left_s):
            return running
        if not has_failed and any(process.exitcode for process in ranks):
            end, has_failed = min(end, time.monotonic() + _GRACE_S), True
    return []


def _outcome(file: Path, rank: int, exit_code: int | None) -> Any:
    if file.exists():
        return pickle.loads(file.read_bytes())
    return _Failed(RankEndedError(f"rank {rank}: its process ended with exit code {exit_code}"))


@contextmanager
def _signals(ranks: Sequence[BaseProcess], *, asks_first: bool) -> Iterator[None]:
    """With ``asks_first`` the first signal is passed on to the ranks as SIGTERM.

    The next one, or any otherwise, raises.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_asked = not asks_first

    def hear(number: int, _frame: FrameType | None) -> None:
        nonlocal has_asked
        if not has_asked:
            has_asked = True
            for process in ranks:
                if process.is_alive():
                    process.terminate()
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            sys.exit(128 + number)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# On the ranks


def _live(rank: int, size: int, folder: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    live_as_rank()
    outcome: Any
    try:
        _join(rank, size, folder)
        outcome = function(*args)
    except ShardwiseError as error:
        outcome = _Failed(error)
    except BaseException:
        text = "".join(f"[rank {rank}] {line}\n" for line in traceback.format_exc().splitlines())
        outcome = _Failed(RankError(text.strip()))
    try:
        message = pickle.dumps(outcome)
        pickle.loads(message)
    except Exception:  # an error with arguments of its own
        outcome = _Failed(RankError(f"[rank {rank}] {getattr(outcome, 'error', outcome)!r}"))
        message = pickle.dumps(outcome)
    Path(folder, f"{rank}.new").write_bytes(message)
    os.replace(Path(folder, f"{rank}.new"), Path(folder, str(rank)))
    sys.exit(isinstance(outcome, _Failed))


def live_as_rank() -> None:
    """Prepare a forked process: it receives SIGTERM but not Ctrl-C, and ends with its parent."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to all; the process that started this one hears
    threading.Thread(target=_end_with_the_parent, name="shardwise-orphaned", daemon=True).start()
    gc.freeze()  # what was there before the fork stays shared: collections would write to all of it
    gc.enable()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "ranks are started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORPHANED_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _join(rank: int, size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.storage import machine

    torch.set_num_threads(max(1, machine.processor_count() // size))
    store = dist.FileStore(str(Path(folder, "store")), size)  # type: ignore[attr-defined]
    dist.init_process_group(at_own_gpu(rank, size), store=store, rank=rank, world_size=size)
    try_collectives()


def at_own_gpu(rank: int, size: int) -> str:
    """Select this rank's accelerator, if the machine has any. Return the backends of its process group.

    Raises:
        ShardingError: there are more ranks than accelerators, or a module that was imported before the ranks were
            forked has begun to use them.
    """
    from shardwise.models.torch_api import accelerator, both_backends, is_in_bad_fork, module_of

    kind = accelerator()
    if kind is None:
        return "gloo"
    device = _own_device({}, rank, size)
    if is_in_bad_fork(kind):
        raise ShardingError(
            f"a library that was imported before the ranks were started uses {kind.type} already, and ranks cannot "
            f"share that; start them by torchrun --nproc-per-node {size} instead"
        )
    module_of(kind).set_device(device)
    return both_backends(kind)


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables in which a scheduler names the devices of a process."""


def _own_device(environment: Mapping[str, str], rank: int, size: int) -> int:
    """Return the number of the device of a rank, one of ``size`` on this machine.

    It is 0 if the environment shows each rank only its own device (``srun --gpus-per-task=1``).

    Raises:
        ShardingError: the machine has fewer devices.
    """
    import torch

    count = torch.accelerator.device_count()
    if max(rank + 1, size) <= count:
        return rank
    if count == 1 and any(environment.get(name, "").count(",") == 0 and environment.get(name) for name in _VISIBLE):
        return 0
    raise ShardingError(
        f"{max(rank + 1, size)} ranks on a machine: each needs a device, and this process sees {count}. Start "
        f"{count}, or hide the devices to compute on the CPU ({_VISIBLE[0]}=)."
    )


def try_collectives() -> None:
    """Carry out a first collective on accelerators, so that a backend that does not work is named at the start.

    Collective: yes, over the default group.

    Raises:
        ShardingError: it failed.
    """
    import torch
    import torch.distributed as dist

    from shardwise.models.torch_api import accelerator, backend_of, has_collectives

    kind = accelerator()
    if kind is None or not has_collectives(kind):
        return
    try:
        ones = torch.ones(1, device=kind)
        dist.all_reduce(ones)
        ones.cpu()
    except RuntimeError as error:
        raise ShardingError(
            f"{backend_of(kind)}: the first collective failed on rank {dist.get_rank()}: {error}. Each rank needs "
            "a device of its own, and a network that all of them reach; NCCL_DEBUG=INFO tells more."
        ) from error


# Ranks of a launcher

_RENDEZVOUS = timedelta(minutes=10)
"""The time that ranks of a launcher wait for each other."""


def run_launched(environment: Mapping[str, str], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call the function as a rank of a launcher. Return its values by rank on the first rank, none on the others.

    Ranks meet by the ``environment`` of torchrun, as by ``env://``. Afterwards the process group is left in order.
    If the function raises, the process group is left as it is, because the other ranks may never finish.
    Collective: yes, over all ranks.

    Raises:
        RankLostError: ranks have not come within ten minutes, or could not connect to each other.
        ShardingError: there are more ranks than accelerators, or these cannot communicate.
    """
    import torch.distributed as dist

    from shardwise.execution.world import World
    from shardwise.models.torch_api import accelerator, both_backends, default_store, module_of

    backend = "gloo"
    kind = accelerator()
    if kind is not None:
        size = int(environment.get("LOCAL_WORLD_SIZE") or 1)
        module_of(kind).set_device(_own_device(environment, int(environment["LOCAL_RANK"]), size))
        backend = both_backends(kind)
    try:
        store, rank, size = _store_of_launched(environment)
        dist.init_process_group(backend, timeout=_RENDEZVOUS, store=store, rank=rank, world_size=size)
    except (RuntimeError, ValueError) as error:
        cause = str(error).partition("\n")[0]
        raise RankLostError(
            f"the ranks could not meet ({cause}); start every rank, with one MASTER_ADDR and one free MASTER_PORT"
        ) from error
    detector_of(default_store(), dist.get_rank())
    try_collectives()
    own = function(*args)
    with World.current() as world:
        values = world.all_gather_object(own)
    if dist.is_initialized():  # accelerate may have ended it
        dist.destroy_process_group()
    return values if world.rank == 0 else []


def _store_of_launched(environment: Mapping[str, str]) -> tuple[Store, int, int]:
    """Return the store of the ranks that a launcher started, once all have come, and this rank and their number.

    It is the store of torch's ``env://``, which waits without output. Here, missing ranks are logged.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    holds = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    joint = TCPStore(host, port, size, holds, _RENDEZVOUS, wait_for_workers=False, multi_tenant=True)
    store = PrefixStore(f"shardwise/attempt/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", joint)
    store.set(f"here/{rank}", "")
    begun = time.monotonic()
    tell_at = begun + TELL_S
    while not store.check([f"here/{other}" for other in range(size)]):
        now = time.monotonic()
        if now > tell_at:
            missing = [other for other in range(size) if not store.check([f"here/{other}"])]
            if now > begun + _RENDEZVOUS.total_seconds():
                raise RankLostError(f"{waiting_for(missing, size, f'{host}:{port}')}, for too long")
            tell_at = now + TELL_AGAIN_S
            _log.warning("%s", waiting_for(missing, size, f"{host}:{port}"))
        time.sleep(0.05)
    return store, rank, size


def this_place() -> tuple[int, int]:
    """This rank, and how many there are."""
    from shardwise.execution.world import World

    world = World.current()
    return world.rank, world.size


def this_device() -> torch.device:
    """This rank's accelerator, else the CPU."""
    import torch
    import torch.distributed as dist

    from shardwise.models.torch_api import accelerator, has_collectives, module_of

    kind = accelerator()
    if kind is None or (dist.is_initialized() and not has_collectives(kind)):
        return torch.device("cpu")
    return torch.device(kind.type, module_of(kind).current_device())


# Collectives of torch's own, in which no rank waits for one that is lost
