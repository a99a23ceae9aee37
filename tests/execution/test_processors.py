"""How many processors a rank has to compute with, and that it starts no more threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests import zoo
from tests.execution.counting import counted_ranks
from tests.execution.test_meetings import CALM, prepared
from transformers import AutoModelForCausalLM, Qwen3Config

import shardwise
from shardwise.conversion import quantise
from shardwise.execution.ranks.agreement import agree_on
from shardwise.execution.ranks.processors import ProcessorSet, ProcessorShares
from shardwise.execution.ranks.world import World
from shardwise.execution.reading.workers import computing
from shardwise.storage import machine
from shardwise.storage.policies import LOCAL, OBJECT_STORE


def shares(*told: tuple[str, int]) -> list[int]:
    """``told``: machine, and the processors of a rank as bits."""
    found = ProcessorShares.of([ProcessorSet(*one) for one in told])
    return [found.on(rank) for rank in range(len(told))]


def test_processors_are_shared_by_the_ranks_that_may_run_on_them():
    assert shares(("a", 0b11)) == [2]
    assert shares(*[("a", 0b11)] * 4) == [1] * 4, "at least one"
    assert shares(*[("a", 0xFF)] * 3) == [2] * 3
    assert shares(*[("a", 0xFFFFFF)] * 3) == [8] * 3, "three thirds are one"
    assert shares(("a", 0b0011), ("a", 0b1100)) == [2, 2], "each has been given its own"
    assert shares(("a", 0b11), ("b", 0b11)) == [2, 2], "another machine"
    assert shares(("a", 0xFF), ("a", 0xF0)) == [6, 2]
    assert shares(("a", 0)) == [1]


def test_ranks_learn_from_their_meeting_how_many_share_a_machine(monkeypatch):
    monkeypatch.setattr(machine, "processors", lambda: frozenset(range(32)))

    def agree(rank: int) -> int:
        with World.current(patience=CALM, call="load") as world:
            return agree_on(world, **prepared(rank)).processors.on(rank)

    with counted_ranks(8) as ranks:
        assert ranks.each(agree) == [4] * 8


def test_as_many_compute_as_read_where_reading_is_waiting():
    assert computing(LOCAL, 1) == 1
    assert computing(LOCAL, 2) == 2
    assert computing(LOCAL, 100) == LOCAL.concurrency
    assert computing(OBJECT_STORE, 1) == OBJECT_STORE.concurrency


@pytest.mark.parametrize("count", [1, 2])
def test_a_load_computes_on_no_more_threads(count, tmp_path, monkeypatch):
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config)
    zoo.fill(model)
    zoo.save_original(model, tmp_path)
    real, seen = quantise.quantise_rows, set()

    def slowly(*arguments):
        seen.add(threading.current_thread())
        time.sleep(0.01)
        return real(*arguments)

    monkeypatch.setattr(machine, "processors", lambda: frozenset(range(count)))
    monkeypatch.setattr(quantise, "quantise_rows", slowly)
    options = shardwise.options.LoadOptions(progress=False)
    shardwise.from_pretrained(
        str(tmp_path), quantization=shardwise.options.Nf4(), dtype=torch.bfloat16, options=options
    )
    assert len(seen) == count
