"""Functions that ranks run until one of them fails, and the ways in which it does."""

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.faults.fault_injection import PATIENT, Outcome, Seat
from tests.loading.on_ranks import Plain, angles
from tests.state import sharding
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.files.local_reader import LocalReader
from shardwise.ranks import control_channel, failure_detection
from shardwise.ranks.timeouts import Timeouts

STAGES = {
    "open": ("shardwise.loading.source", "open_storage"),
    "headers": ("shardwise.loading.source", "open_checkpoint"),
    "build": ("shardwise.loading.meta_model", "build_meta_model"),
    "wrap": ("shardwise.fsdp.wrap", "wrap"),
    "plan": ("shardwise.loading.prepare", "plan_load"),
    "materialize": ("shardwise.loading.load", "materialize"),
    "read": ("shardwise.files.local_reader", "LocalReader.read_vectored"),
    "join": ("shardwise.loading.shared_reads", "boxes_by_rank"),
    "share": ("shardwise.transfer.move", "ShardExchange._step"),
    "send": ("torch.distributed", "all_to_all_single"),
    "fill": ("shardwise.loading.load", "fill_unread"),
    "audit": ("shardwise.loading.load", "audit"),
    "look": ("shardwise.state.shard", "collect_tensors"),
    "give": ("shardwise.transfer.move", "ShardExchange._source_values"),
    "take": ("shardwise.transfer.move", "ShardExchange._put"),
    "pack": ("shardwise.transfer.replicas", "ShardSender.share"),
    "plan_reads": ("shardwise.saving.prepare", "prepare"),
    "create": ("shardwise.files.local_writer", "LocalWriter.create"),
    "mark": ("shardwise.saving.save", "require_lock"),
    "write": ("shardwise.saving.write", "ShardWriter._buffers"),
    "sync": ("shardwise.files.local_writer", "LocalWriter.sync"),
    "compare": ("shardwise.saving.write", "ShardWriter.require_same"),
    "commit": ("shardwise.saving.save", "commit_save"),
    "beside": ("shardwise.saving.commit", "fingerprints.to_bytes"),
    "name": ("shardwise.files.local_writer", "LocalWriter.rename"),
    "remove": ("shardwise.files.local_writer", "LocalWriter.remove"),
    "tidy": ("shardwise.saving.saving_lock", "release_lock"),
}
"""By stage, a function that a rank calls in it, as module and name."""


@dataclass(frozen=True, slots=True)
class Blow:
    """What befalls a rank as it calls the function of a stage, after so many calls that go well."""

    kind: str
    stage: str
    rank: int
    after: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.stage}-{self.rank}"


def assert_all_end_alike(blow: Blow, outcome: Outcome, size: int, *, found_by_one: Collection[str] = ()) -> None:
    """Those that are left have ended with one error; in some stages one rank acts for all, and is not named."""
    assert outcome.is_struck
    survivors = [rank for rank in range(size) if rank != blow.rank or blow.kind == "raise"]
    assert sorted(outcome.ends) == survivors
    errors = outcome.errors()
    assert len(set(errors.values())) == 1, errors
    kind, text = errors[survivors[0]]
    if blow.kind == "raise":
        told = f"struck at {blow.stage}"
        assert (kind, text) == ("StorageError", told if blow.stage in found_by_one else f"rank {blow.rank}: {told}")
    else:
        place = f"rank {blow.rank} (host {socket.gethostname()}, process {outcome.pids[blow.rank]}) is lost"
        assert kind == "RankLostError"
        assert place in text


@contextmanager
def falling(request: Any, fall: Callable[[Blow], None]) -> Iterator[Callable[[Blow], None]]:
    """A function that raises what is not as it should be of a blow. Some worlds run at once: they mostly wait."""
    params = [vars(item).get("callspec") for item in request.session.items if item.module is request.module]
    chosen = [spec.params["blow"] for spec in params if spec is not None and "blow" in spec.params]
    with ThreadPoolExecutor(3) as pool:
        falls = {blow: pool.submit(fall, blow) for blow in chosen}
        yield lambda blow: falls[blow].result()
        pool.shutdown(cancel_futures=True)


def lay(blow: Blow, seat: Seat) -> None:
    """Have the blow fall once, on its rank."""
    if seat.rank != blow.rank:
        return
    module, path = STAGES[blow.stage]
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    lock = threading.Lock()
    calls = 0

    def struck(*args: Any, **keywords: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            falls = calls == blow.after + 1
        if falls:
            strike(blow, seat)
        return original(*args, **keywords)

    setattr(owner, name, struck)


def strike(blow: Blow, seat: Seat) -> None:
    match blow.kind:
        case "raise":
            seat.tell()
            raise shardwise.StorageError(f"struck at {blow.stage}")
        case "exit":
            seat.tell()
            os._exit(7)
        case "kill":
            seat.tell()
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            seat.wait_to_be_stopped()
        case "interrupt":
            seat.tell()
            raise KeyboardInterrupt
        case _:
            raise AssertionError(blow.kind)


def load(seat: Seat, directory: str, way: str, timeouts: Timeouts, blow: Blow | None = None) -> None:
    """Bring a model up in a certain way while the blow falls."""
    if blow is not None:
        lay(blow, seat)
    if way in ("flat", "hsdp"):
        sizes = (2, seat.size // 2) if way == "hsdp" else (seat.size,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
        shared = {"flat": "auto", "hsdp": "always"}[way]
        options = shardwise.options.LoadOptions(timeouts=timeouts, shared_reads=shared, budget_bytes=1 << 14)
        shardwise.from_pretrained(directory, sharding=shardwise.Sharding(mesh=mesh), options=options)
    elif way in ("reader", "whole"):
        with torch.device("meta"):
            model = Plain()
        shared = "always" if way == "whole" else "auto"
        options = shardwise.options.LoadOptions(timeouts=timeouts, shared_reads=shared, budget_bytes=1 << 14)
        checkpoint = LocalReader(directory) if way == "reader" else directory
        shardwise.load(model, checkpoint, buffers={"*.angles": angles}, options=options)
    elif way == "shard":  # the model is on rank 0 alone
        model = sharding.live_model() if seat.rank == 0 else sharding.meta_model()
        shardwise.shard(model, options=shardwise.options.StateOptions(timeouts=timeouts, budget_bytes=4096))
    elif way == "stream":
        model = sharding.live_model()
        options = shardwise.options.StreamOptions(timeouts=timeouts, bucket_bytes=4096)
        for _ in shardwise.iter_hf_tensors(model, options=options):
            pass
    else:
        raise AssertionError(way)


def load_and_end(seat: Seat, directory: str, timeouts: Timeouts, blow: Blow) -> None:
    """A load with which rank 0's process ends, and so does what it holds."""
    seat.leaves = seat.rank == 0
    load(seat, directory, "flat", timeouts, blow)


def load_and_leave(seat: Seat, directory: str, way: str, timeouts: Timeouts, blow: Blow) -> None:
    """A load after which the process group is left as the end of a program leaves it."""
    try:
        load(seat, directory, way, timeouts, blow)
    finally:
        dist.destroy_process_group()


def load_busy(seat: Seat, directory: str, busy: int) -> None:
    """One rank comes to the call after a silence."""
    if seat.rank == busy:
        seat.be_silent()
    load(seat, directory, "reader", PATIENT)


def load_too_late(seat: Seat, directory: str, late: int) -> None:
    """One rank comes to the call after the others have given up. They wait by the clock that goes forward."""
    control_channel.time = failure_detection.time
    control_channel.running_s = failure_detection.running_s
    if seat.rank == late:
        seat.be_silent()
        seat.wait_for_others("ended")
    load(seat, directory, "reader", PATIENT)


def load_stalled(seat: Seat, directory: str, stalled: int) -> None:
    """One rank's storage does not answer during a silence."""
    original, lock = LocalReader.read_vectored, threading.Lock()
    silences = [seat.be_silent] if seat.rank == stalled else []

    def read_vectored(self: LocalReader, file: str, start: int, buffers: Any) -> None:
        with lock:
            if silences:
                silences.pop()()
        original(self, file, start, buffers)

    LocalReader.read_vectored = read_vectored  # type: ignore[method-assign]
    load(seat, directory, "flat", PATIENT)
