"""Functions that ranks run and that fail."""

import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.world import attempt
from torch import nn

from shardwise.core import machine
from shardwise.core.errors import CheckpointError, FormatError, StorageError
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.loading.audit import require_equal_buffers
from shardwise.ranks import stop_signals
from shardwise.ranks.call_arguments import comparing_arguments
from shardwise.ranks.collective_errors import translate_collective_errors
from shardwise.ranks.stop_signals import stopping_on_signals
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import Clock, World
from shardwise.transfer.replicas import require_alike_models
from shardwise.transfer.tensor_metadata import collect_all_boxes, metadata_by_name


def raise_on(ranks: tuple[int, ...], same: bool) -> tuple[str, str]:
    def call() -> None:
        world = World.current()
        with world.collective("write"):
            if world.rank in ranks:
                raise StorageError("the disk is gone" if same else f"disk {world.rank} is gone")

    return attempt(call)


def first_fails() -> tuple[str, str, list[int]]:
    """The first rank's failure is everybody's, and the ranks are in step afterwards."""
    world = World.current()

    def read() -> None:
        with world.broadcast("read headers"):
            if world.rank == 0:
                raise FormatError("the header lies")

    return *attempt(read), world.all_gather_object(world.rank)


def read_after_the_first_has_returned() -> str:
    """The first rank has the store."""
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().set("word", "hello")
        return ""
    time.sleep(0.5)
    return dist.distributed_c10d._get_default_store().get("word").decode()


def last_fails() -> tuple[str, str]:
    """A rank fails where the first one works for all."""
    world = World.current()

    def read() -> None:
        with world.broadcast("read headers"):
            if world.rank == world.size - 1:
                raise FormatError("the header lies")

    return attempt(read)


def first_shares() -> Any:
    world = World.current()
    with world.broadcast("choose") as exchange:
        if world.rank == 0:
            exchange.local = {"rank": dist.get_rank()}
    return exchange.result


def foreign_error() -> tuple[str, str]:
    return attempt(in_block, World.current(), lambda: {}["absent"])


def in_block(world: World, function: Callable[..., Any], *args: Any) -> Any:
    with world.collective("work"):
        return function(*args)


def leave_early() -> tuple[list[Any], list[Any]]:
    """Blocks that a rank leaves by ``return`` and ``continue`` are exchanges all the same."""
    world = World.current()

    def by_return() -> Any:
        with world.all_gather("describe") as exchange:
            exchange.local = world.rank
            if world.rank == 1:
                return exchange
            exchange.local = "last"
        return exchange

    told = []
    for number in range(2):
        with world.all_gather("count") as exchange:
            if world.rank == number:
                continue
            exchange.local = number
        told.append(exchange.result)
    return by_return().result, told


def fail_nested(inner: bool) -> tuple[str, str, list[int]]:
    """Rank 1 fails within an inner block, or within the outer one where the others are in the inner one."""
    world = World.current()

    def nest() -> None:
        with world.collective("save"):
            if world.rank == 1 and not inner:
                raise StorageError("gone")
            with world.collective("write"):
                if world.rank == 1:
                    raise StorageError("gone")

    return *attempt(nest), world.all_gather_object(world.rank)


def in_threads() -> list[list[Any]]:
    """Blocks of two worlds of the same ranks, each in a thread of its own."""
    told: list[list[Any]] = [[], []]
    foreground = World.current()
    foreground.join()
    both = foreground, World.current(foreground=foreground)

    def work(place: int) -> None:
        with both[place] as world:
            for number in range(20):
                with world.all_gather("count") as exchange:
                    exchange.local = (place, number, world.rank)
                told[place].append(exchange.result)

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def begin_another_call(left: int) -> tuple[str, str, list[int]]:
    """A rank leaves a call by a generator that it keeps, and goes on to the next one."""
    timeouts = Timeouts(heartbeat_interval_s=0.1, heartbeat_timeout_s=8, join_timeout_s=3600)

    def count() -> Generator[None]:
        with World.current(timeouts=timeouts, call="count") as world:
            while True:
                world.all_gather_object(world.rank)
                yield

    counting = count()
    next(counting)
    error = "", ""
    if dist.get_rank() != left:
        error = attempt(next, counting)
    with World.current(timeouts=timeouts, call="save") as world:
        ranks = world.all_gather_object(world.rank)
    counting.close()
    return *error, ranks


def nest_calls() -> list[int]:
    """A call within another one, again and again, in which ranks wait for each other at different times."""
    timeouts = Timeouts(heartbeat_interval_s=0.01, heartbeat_timeout_s=3600, join_timeout_s=3600)
    with World.current(timeouts=timeouts, call="count") as outer:
        for number in range(20):
            with World.current(timeouts=timeouts, call="save") as inner:
                time.sleep(0.02 * (number % 2 == inner.rank))
                inner.all_gather_object(None)
            time.sleep(0.02 * (number % 3 == outer.rank))
            ranks = outer.all_gather_object(outer.rank)
    return ranks


def interrupted(error: type[BaseException]) -> tuple[str, str]:
    """Ctrl-C on rank 1, in a block."""

    def call() -> None:
        with World.current(call="save") as world, world.collective("write"):
            if world.rank == 1:
                raise error

    try:
        return attempt(call)
    except BaseException as raised:
        return type(raised).__name__, ""


def lines_of_the_cause() -> list[str]:
    """The functions in the trace of an error on the rank that has failed."""
    world = World.current()
    try:
        with world.collective("divide"):
            if world.rank == 1:
                print(1 // (world.size - 2))
    except CheckpointError as error:
        cause = error.__cause__
        return [] if cause is None else [frame.name for frame in traceback.extract_tb(cause.__traceback__)]
    return ["no error"]


def unpicklable() -> tuple[str, str]:
    def call() -> None:
        world = World.current()
        with world.all_gather("describe") as exchange:
            exchange.local = threading.Lock() if world.rank == 1 else None

    return attempt(call)


class Unreadable:
    """An object that can be sent, but not received."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def unreadable() -> tuple[str, str]:
    def call() -> None:
        world = World.current()
        with world.all_gather("describe") as exchange:
            exchange.local = Unreadable() if world.rank == 1 else None

    return attempt(call)


def fail_in_training(failure: BaseException) -> tuple[str, str]:
    """The second rank fails, out of memory for example, while the first waits for it. Its process lives on."""
    world = World.current(call="training")
    world.all_gather_object(None)

    def step() -> None:
        with translate_collective_errors(world, lambda: "in step 2"):
            if world.rank == 1:
                raise failure
            world.all_gather_object(None)

    try:
        return attempt(step)
    except SystemExit as error:
        return "SystemExit", str(error)


def start_no_thread() -> list[tuple[str, str]]:
    """The second rank may start no thread, with which it fails in a phase, and then leaves a call."""

    def read() -> None:
        with World.current(call="load") as world, world.collective("read"):
            if world.rank == 1:
                threading.Thread(target=print).start()

    def step() -> None:
        world = World.current(call="training")
        world.all_gather_object(None)
        with world:
            if world.rank == 1:
                raise ValueError("row 7 is odd")
            world.all_gather_object(None)

    no_thread = RuntimeError("can't start new thread")
    with mock.patch.object(threading.Thread, "start", side_effect=no_thread) if dist.get_rank() else nullcontext():
        return [attempt(read), attempt(step)]


def meet_in_other_calls() -> list[tuple[str, str]]:
    """Of a world that lasts longer than a call, the second rank is in another call than the first and the third."""
    world = World.current(call="a bank")

    def meet() -> None:
        with world.collective("find the adapter"):
            pass

    world.begin_call("save" if world.rank == 1 else "load")
    return [attempt(meet), attempt(meet)]


def fail_together_in_training(failure: Exception) -> tuple[str, bool]:
    """Both ranks raise an error, the first one later. Return it, and whether the first heard of the other."""
    world = World.current(timeouts=Timeouts(heartbeat_interval_s=0.1), call="training")
    world.all_gather_object(None)
    is_told = False
    try:
        with translate_collective_errors(world, lambda: "in step 2"):
            try:
                with world.collective("save"):
                    if world.rank == 1:
                        raise failure
            finally:
                time.sleep(0.0 if world.rank else 0.6)
                is_told = world.channel is not None and world.channel.loss() is not None
    except CheckpointError as error:
        return str(error), is_told
    raise AssertionError


def disagree() -> tuple[str, str]:
    world = World.current()
    return attempt(world.require_equal, "odd" if world.rank == 2 else "even", "the number")


def subgroup_errors() -> list[str]:
    """Messages of differences between the ranks 1 and 2, in a group of their own."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    with World.current(group) as world:
        odd = "odd" if world.rank == 1 else "even"
        model, first_only, last_only = nn.Linear(world.rank + 1, 1), nn.Module(), nn.Module()
        (last_only if world.rank else first_only).register_buffer("table", torch.ones(1), persistent=False)
        with world.all_gather("describe tensors") as exchange:
            exchange.local = metadata_by_name({"w": model.weight})
        calls = (
            (world.require_equal, odd, "the number"),
            (with_arguments, world, {"dtype": "same", "seed": "same"}),
            (with_arguments, world, {"dtype": odd}),
            (with_arguments, world, {"size": odd, "word": "same"}, "the config"),
            (in_block, world, collect_all_boxes, exchange.result, world.global_ranks),
            (require_alike_models, world, collect_tensors(model), ()),
            (require_equal_buffers, world, collect_tensors(first_only)),
            (require_equal_buffers, world, collect_tensors(last_only)),
        )
        return [attempt(*call)[1] for call in calls]


def with_arguments(world: World, arguments: dict[str, str], *what: str) -> None:
    """Pass arguments in another order on the second rank."""
    with comparing_arguments(world, *what) as exchange:
        exchange.local = dict(sorted(arguments.items(), reverse=world.rank == 1))


def first_on_host(with_names: bool = False) -> bool:
    """With names, every rank has a host name of its own, as containers of one machine have."""
    name = f"container-{dist.get_rank()}" if with_names else socket.gethostname()
    with mock.patch("socket.gethostname", return_value=name):
        return World.current().is_first_at(machine.namespace_id("mnt"))


def exit_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    threading.Event().wait()


def killed_on(rank: int) -> None:
    with World.current(call="load") as world, world.collective("open files"):
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)


def killed_before_a_collective(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


def terminate(process: int) -> None:
    """Send SIGTERM to the process that started the ranks, and go on."""
    if dist.get_rank() == 0:
        os.kill(process, signal.SIGTERM)
    threading.Event().wait()


def terminate_when_stoppable(process: int) -> bool:
    """The same once the first rank, and not the other one, can be asked to stop. Return whether it was."""
    if dist.get_rank() > 0:
        dist.barrier()
        return False
    with stopping_on_signals() as request:
        os.kill(process, signal.SIGTERM)
        while not request.is_made:
            time.sleep(0.01)
        dist.barrier()
    return True


def end_by_the_request(process: int) -> None:
    """As a rank does that waits for another one for long after a request."""
    if dist.get_rank() > 0:
        threading.Event().wait()
    with stopping_on_signals() as request:
        os.kill(process, signal.SIGUSR1)
        while request.number is None:
            time.sleep(0.01)
        stop_signals.raise_signal(request.number)


def remove_folder() -> int:
    """Remove the folder of the parent process and its ranks."""
    if dist.get_rank() == 0:
        shutil.rmtree(stop_signals._announcements[-1].parent)
    dist.barrier()
    return dist.get_rank()


def raise_here(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("not like this")
    return dist.get_rank()


def add(one: int, other: int) -> int:
    return one + other + dist.get_rank()


def gone_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise StorageError("gone")


def fail_in_a_step() -> tuple[str, str, list[str]]:
    """The message, the step and the notes of an error that one rank raises in a phase of a call."""
    with World.current(call="load") as world, Clock().phase("read"):
        try:
            with world.collective("open files"):
                gone_on(1)
        except StorageError as error:
            return str(error), error.phase, error.__notes__
    return "", "", []
