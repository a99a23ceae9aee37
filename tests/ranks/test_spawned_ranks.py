"""Ranks that the command line starts: outcomes, accelerators, and their end with the process that started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import faults
from tests.support.fork_server import start_server
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import start_processes

from shardwise.core.errors import RankLostError, ShardingError, StorageError
from shardwise.fsdp import wrap
from shardwise.fsdp.torch_private import select_accelerator
from shardwise.fsdp.wrap import Sharding
from shardwise.ranks import processes
from shardwise.ranks.processes import (
    RankEndedError,
    RankError,
    _open_store,
    _priority,
    run_spawned,
)
from shardwise.ranks.stop_signals import StoppedNowError


@pytest.fixture
def forked(monkeypatch):
    """Ranks are forked from a process that has imported torch, in place of new interpreters."""
    start_server()

    def start(*args: Any, start_method: str, **keywords: Any) -> Any:
        assert start_method == "spawn"
        return start_processes(*args, start_method="forkserver", **keywords)

    monkeypatch.setattr(processes, "start_processes", start)


@pytest.mark.distributed
def test_values_come_by_rank_and_errors_as_they_are(monkeypatch, forked):
    monkeypatch.setattr(processes, "_GRACE_S", 1.0)
    assert run_spawned(2, faults.add, 3, 4) == [7, 8]
    assert run_spawned(2, faults.read_after_the_first_has_returned) == ["", "hello"]
    with pytest.raises(StorageError, match="^gone$"):
        run_spawned(2, faults.gone_on, 1)
    with pytest.raises(RankError, match=r"\[rank 1\] ValueError: not like this"):
        run_spawned(2, faults.raise_here, 1)
    with pytest.raises(RankEndedError, match="rank 1: its process ended with exit code 7"):
        run_spawned(2, faults.exit_on, 1)


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_a_rank_that_was_killed_is_named_before_what_others_lost():
    """Here the store, which the first rank has."""
    with pytest.raises(RankEndedError, match=r"rank 0: its process ended with exit code -9 .*dmesg"):
        run_spawned(2, faults.killed_on, 0)
    with pytest.raises(RankEndedError, match=r"rank 0: its process ended with exit code -9 .*dmesg"):
        run_spawned(2, faults.killed_before_a_collective, 0)


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_a_signal_ends_all_ranks_until_the_first_one_can_be_asked():
    """Before, they import TRL and have no handlers. Of the others, those that are not ready go on."""
    with pytest.raises(StoppedNowError) as caught:
        run_spawned(2, faults.terminate, os.getpid(), asks_first=True)
    assert caught.value.code == 128 + signal.SIGTERM
    assert run_spawned(2, faults.terminate_when_stoppable, os.getpid(), asks_first=True) == [True, False]


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_a_stop_that_could_not_wait_ends_by_its_signal(monkeypatch):
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    with pytest.raises(StoppedNowError) as caught:
        run_spawned(2, faults.end_by_the_request, os.getpid(), asks_first=True)
    assert caught.value.code == 128 + signal.SIGUSR1


@pytest.mark.distributed
@pytest.mark.usefixtures("forked")
def test_the_folder_of_the_ranks_may_be_removed(tmp_path):
    """As other programs clean /tmp."""
    assert run_spawned(2, faults.remove_folder) == [0, 1]
    stoppable = tmp_path / "stoppable"
    stop = processes._Stop(stoppable)
    assert not stop.look()
    stoppable.touch()
    assert stop.look()
    stoppable.unlink()
    assert stop.look()


def test_what_ranks_exchange_is_in_no_file_and_on_no_network(tmp_path):
    first, second = (_open_store(rank, 2, str(tmp_path)) for rank in (0, 1))
    for number in range(10):
        first.set(f"turn {number}", b"." * 10_000)
        assert len(second.get(f"turn {number}")) == 10_000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 1000
    # A socket for all addresses would answer here.
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", first.port)):
        pass


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_end_when_their_launcher_is_killed(tmp_path):
    program = (
        "from shardwise.ranks.processes import run_spawned\n"
        "from tests.ranks.forked_launcher import goes_on\n"
        f"run_spawned(2, goes_on, {str(tmp_path)!r})\n"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as starter:
        try:
            while len(os.listdir(tmp_path)) < 2:
                assert starter.poll() is None
                time.sleep(0.05)
        finally:
            starter.kill()
    ranks = [int(name) for name in os.listdir(tmp_path)]
    try:
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            time.sleep(0.05)
    except BaseException:  # the test's limit
        for rank in ranks:
            os.kill(rank, signal.SIGKILL)
        raise


@pytest.fixture
def machine_with(monkeypatch):
    """``machine_with("xpu", 4)``: torch has four of these. What ranks take is told."""
    taken: list[int] = []
    module = SimpleNamespace(
        set_device=taken.append,
        is_initialized=lambda: bool(taken),
        current_device=lambda: taken[-1],
        memory_reserved=lambda _: reserved_bytes[0],
    )
    reserved_bytes = [0]

    def pretend(kind: str, count: int, nbytes: int = 0) -> list[int]:
        reserved_bytes[0], module.device_count = nbytes, lambda: count
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        return taken

    return pretend


@pytest.mark.parametrize(("kind", "backends"), [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")])
def test_a_rank_takes_the_accelerator_of_its_number(machine_with, kind, backends):
    taken = machine_with(kind, 4)
    assert select_accelerator({}, 3, 4) == backends
    assert taken == [3]


def test_more_ranks_than_accelerators_are_refused(machine_with):
    taken = machine_with("cuda", 4)
    for rank in range(5):
        with pytest.raises(ShardingError, match="5 ranks on a machine: .* sees 4. Start at most 4"):
            select_accelerator({}, rank, 5)
    assert taken == []


def test_a_rank_of_a_launcher_takes_the_device_that_it_is_shown(machine_with):
    """``srun --gpus-per-task=1``: every rank sees one device, whatever its number on the machine."""
    taken = machine_with("cuda", 1)
    select_accelerator({"CUDA_VISIBLE_DEVICES": "3"}, 3, 4)
    select_accelerator({"HIP_VISIBLE_DEVICES": "3"}, 3, 4)
    with pytest.raises(ShardingError, match="4 ranks on a machine"):
        select_accelerator({}, 0, 4)
    machine_with("cuda", 4)
    select_accelerator({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 3, 4)
    assert taken == [0, 0, 3]


def test_a_mesh_of_a_process_group_takes_the_device_of_a_launchers_rank(machine_with, monkeypatch):
    """As torch's ``init_device_mesh`` does, and ``from_group`` does not."""
    taken = machine_with("cuda", 4)
    monkeypatch.setattr(wrap, "has_collectives", lambda *_: True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrap.default_mesh(dist.group.WORLD)
        assert taken == [], "there is no launcher"
        monkeypatch.setenv("LOCAL_RANK", "3")
        for _ in range(2):
            assert wrap.default_mesh(dist.group.WORLD).device_type == "cuda"
        assert taken == [3], "by the first"
        taken.clear()
        machine_with("cuda", 1)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
        wrap.default_mesh(dist.group.WORLD)
        assert taken == [0]
    finally:
        dist.destroy_process_group()


def test_a_rank_leaves_the_first_device_if_it_was_only_asked_something(machine_with, monkeypatch):
    """Importing bitsandbytes initializes CUDA."""
    monkeypatch.setattr(wrap, "has_collectives", lambda *_: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for mesh in (None, DeviceMesh.from_group(dist.group.WORLD, "cuda")):
            for current, nbytes, selected in [(0, 0, [3]), (0, 1, []), (2, 0, [])]:
                taken = machine_with("cuda", 4, nbytes)
                taken[:] = [current]
                wrap.with_mesh(Sharding(mesh=mesh), dist.group.WORLD)
                assert taken[1:] == selected
            machine_with("cuda", 1)[:] = [0]
            wrap.with_mesh(Sharding(mesh=mesh), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def test_accelerators_without_collectives_of_many_ranks_are_passed_by(machine_with):
    assert machine_with("mps", 1) == []
    assert select_accelerator({}, 0, 1) == "gloo"


def test_nodes_that_count_restarts_differently_meet_in_the_store_of_earlier_attempts():
    """As those of torchrun do after a worker of one has died."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "2"}
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def meet(rank: int, count: int) -> Any:
        variables = {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(count)}
        return processes._launcher_store({**environment, **variables})[0]

    for counts in ((0, 0), (1, 0), (1, 0)):
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(meet, range(2), counts)
        assert not first.check(["key"])
        first.set("key", "value")
        assert second.check(["key"])


def test_an_error_of_a_rank_is_preferred_to_its_loss():
    """Others only lost a rank: to say so is of use where nothing else is known."""
    kinds = (StorageError, RankError, RankLostError, RankEndedError)
    assert [_priority(kind("gone")) for kind in kinds] == [0, 1, 2, 3]
