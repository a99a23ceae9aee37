"""What moves the bytes of tensors between ranks, and out of them, while verbs are at work. Run on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise
from shardwise import Sharding
from shardwise.engines import saving
from shardwise.execution.moving import Exchange
from shardwise.execution.write import Sink
from shardwise.storage.contract import WritePolicy
from shardwise.storage.writing import LocalWriter

STREAMS = WritePolicy(
    has_random_writes=False, can_rename=False, block_bytes=1, request_bytes=1 << 16, concurrency=1
)


@contextlib.contextmanager
def counted(owner: type, name: str) -> Iterator[list[int]]:
    """How often a method has been called."""
    calls = [0]
    original = getattr(owner, name)

    def method(*args: Any, **keywords: Any) -> Any:
        calls[0] += 1
        return original(*args, **keywords)

    with patch.object(owner, name, method):
        yield calls


def replicated(checkpoint: str) -> nn.Module:
    """A model on meta that every rank has whole."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))


def moves(checkpoint: str, folder: str) -> dict[str, tuple[int, int]]:
    """By call: the rounds that the exchange has gone through, and the runs that the sink has written."""
    out = Path(folder)
    small = shardwise.options.StateOptions(budget_bytes=1 << 16)
    streamed = shardwise.options.StreamOptions(bucket_bytes=1 << 15)
    model = shardwise.from_pretrained(checkpoint)
    state: dict[str, torch.Tensor] = {}

    def stream() -> None:
        for _ in shardwise.iter_hf_tensors(model, options=streamed):
            pass

    def save_as_streams() -> None:
        with patch.object(saving, "open_writer", lambda url, **_: LocalWriter(url, policy=STREAMS)):
            shardwise.save(model, str(out / "streams"))

    calls: dict[str, Callable[[], object]] = {
        "load, read once": lambda: shardwise.load(
            replicated(checkpoint),
            checkpoint,
            options=shardwise.options.LoadOptions(shared_reads="always"),
        ),
        "gather": lambda: state.update(shardwise.model_state(model, options=small)),
        "set": lambda: shardwise.set_model_state(model, state, options=small),
        "iterate": stream,
        "save, as streams": save_as_streams,
        "save one file": lambda: shardwise.save_accelerate_model(model, str(out / "one"), "full", options=small),
        "save a folder": lambda: shardwise.save_accelerate_model(
            model, str(out / "folder"), "sharded", options=small
        ),
    }
    found: dict[str, tuple[int, int]] = {}
    for name, call in calls.items():
        with counted(Exchange, "_step") as rounds, counted(Sink, "write") as runs:
            call()
        found[name] = rounds[0], runs[0]
        dist.barrier()
    if dist.get_rank() == 0:
        with counted(Sink, "write") as runs:
            shardwise.merge_weights(str(out / "folder" / "pytorch_model_fsdp_0"), str(out / "merged"))
        found["merge"] = 0, runs[0]
    dist.barrier()
    return found


def mean_of_all() -> list[float]:
    """A buffer that has another value on each rank, as every rank gets it."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    shardwise.shard(model, Sharding(wrap="whole_model"))
    mean = model.get_buffer("0.running_mean")
    mean.fill_(float(dist.get_rank() + 1))
    state = shardwise.model_state(model, "full_on_all_ranks")
    assert mean.tolist() == [dist.get_rank() + 1] * 4
    return state["0.running_mean"].tolist()
