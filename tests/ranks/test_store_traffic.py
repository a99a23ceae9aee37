"""The cost of meetings: calls of the store and bytes for each rank, for any number of ranks."""

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.ranks.counted_store import CountedRanks, counted_ranks
from torch import nn

import shardwise
from shardwise.core.errors import RankMismatchError, ShardingError, StorageError
from shardwise.core.reports import Available, RankEstimate
from shardwise.core.tensors import Box, DType
from shardwise.loading.agreement import compare_plans
from shardwise.ranks.timeouts import Timeouts
from shardwise.ranks.world import World
from shardwise.state import state_values
from shardwise.state.state_values import ProvidedValues, describe_tensors
from shardwise.transfer.matching import SourceTensor
from shardwise.transfer.tensor_metadata import TensorMetadata, describing_tensors

CALM = Timeouts(heartbeat_interval_s=60, heartbeat_timeout_s=600, join_timeout_s=600)
MANY = pytest.param(256, marks=pytest.mark.slow)

CALLS_TO_JOIN = 8
"""Of a rank, on the store: to come to a call, and to leave it."""

CALLS_TO_MEET = 6
"""Of a rank, in a meeting: what it says, that it came, whether there is an answer, the answer, that it has it."""

BYTES_TO_JOIN = 800
BYTES_TO_MEET = 300
"""Of a rank: names of keys for the most part. What is said comes on top, and the answer."""


def spent(ranks: CountedRanks) -> tuple[float, float]:
    """Calls and bytes, for each rank."""
    return ranks.store.calls.total() / ranks.size, ranks.store.nbytes / ranks.size


def forecast_of(rank: int) -> RankEstimate:
    numbers = {name: 1_000_000 + rank for name in RankEstimate.__dataclass_fields__ if name.endswith("bytes")}
    return RankEstimate(rank=rank, **numbers)


def prepared(rank: int, digest: str = "d" * 64, host_bytes: int | None = 10**12) -> dict[str, Any]:
    """What a rank has decided, as far as the ranks agree on it."""
    layout = SimpleNamespace(local_nbytes=10 + rank)
    fingerprints = {f"layers.{number}.weight": digest for number in range(20)}
    return {
        "plan": SimpleNamespace(digest=digest, layout=layout, fingerprints=fingerprints),
        "settings": {"hidden_size": "64"},
        "estimate": forecast_of(rank),
        "available": Available(host_bytes=host_bytes),
        "check_memory": True,
    }


@pytest.mark.parametrize("size", [16, 64, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_whole_load_costs_each_rank_the_same_however_many_they_are(size, tmp_path):
    """``shardwise.load`` of a model that each rank has whole: all of its meetings, through the public interface."""
    torch.manual_seed(0)
    values = nn.Linear(4, 4).state_dict()
    save_file(values, str(tmp_path / "model.safetensors"))
    models = [nn.Linear(4, 4) for _ in range(size)]
    options = shardwise.options.LoadOptions(
        shared_reads="never", timeouts=CALM, progress=False, budget_bytes=1 << 16
    )
    with counted_ranks(size) as ranks:
        reports = ranks.each(lambda rank: shardwise.load(models[rank], tmp_path, options=options))
        assert [getattr(report, "world_size", report) for report in reports] == [size] * size
        calls, nbytes = spent(ranks)
    for model in models:
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert calls < 60
    assert nbytes < 5000


@pytest.mark.parametrize("size", [64, MANY])
def test_ranks_that_differ_tell_details_and_all_raise_the_same(size):
    """Half of the ranks plan otherwise; and one has too little memory."""

    def agree(rank: int, **other: Any) -> Any:
        with World.current(timeouts=CALM, call="load") as world:
            return compare_plans(world, **prepared(rank, **other))

    with counted_ranks(size) as ranks:
        errors = ranks.each(lambda rank: agree(rank, digest="de"[rank % 2] * 64))
        assert {type(error) for error in errors} == {RankMismatchError}
        (text,) = set(map(str, errors))
        assert text.startswith("ranks plan 20 tensors differently: layers.{0..19}.weight. ")
        _, nbytes = spent(ranks)
        assert nbytes < BYTES_TO_JOIN + 3 * (BYTES_TO_MEET + 3000)
    with counted_ranks(size) as ranks:
        errors = ranks.each(lambda rank: agree(rank, host_bytes=10**12 if rank != 3 else 5))
        assert {type(error) for error in errors} == {ShardingError}
        (text,) = set(map(str, errors))
        assert text.startswith("rank 3 needs ")


@pytest.mark.parametrize("size", [64, MANY])
def test_a_phase_is_one_meeting_whatever_it_exchanges(size):
    kinds = ("collective", "broadcast", "all_reduce", "all_gather")

    def call(rank: int) -> list[Any]:
        results = []
        with World.current(timeouts=CALM) as world:
            for kind in kinds:
                with getattr(world, kind)("count") as exchange:
                    exchange.local = "x" * 100
                    if kind == "all_reduce":
                        exchange.reduce_fun = len
                results.append(exchange.result)
        return results

    everyones = ["x" * 100] * size
    with counted_ranks(size) as ranks:
        results = ranks.each(call)
        calls, nbytes = spent(ranks)
    assert results == [[None, "x" * 100, size, everyones]] * size
    assert calls < CALLS_TO_JOIN + len(kinds) * CALLS_TO_MEET
    assert nbytes < BYTES_TO_JOIN + len(kinds) * (BYTES_TO_MEET + 200)


@pytest.mark.parametrize("size", [64, MANY])
def test_a_layout_of_many_tensors_is_sent_to_each_rank_once(size):
    def call(rank: int) -> dict[str, Any]:
        box = Box((8 * rank, 0), (8, 128))
        tensor = TensorMetadata((8 * size, 128), "torch.bfloat16", (box,))
        with World.current(timeouts=CALM) as world, describing_tensors(world) as exchange:
            exchange.local = {f"layers.{number}.weight": tensor for number in range(900)}
        return exchange.result

    expected = tuple((Box((8 * rank, 0), (8, 128)),) for rank in range(size))
    with counted_ranks(size) as ranks:
        results = ranks.each(call)
    for boxes in results:
        assert len(boxes) == 900
        assert boxes["layers.899.weight"] == expected
        assert len({id(by_rank) for by_rank in boxes.values()}) == 1
    assert ranks.store.largest_bytes < 10_000 + 20 * size


@pytest.mark.parametrize("size", [64, MANY])
def test_a_given_state_of_many_tensors_is_described_to_each_rank_once(size, monkeypatch):
    monkeypatch.setattr(state_values, "describe_tensors", dict)

    def call(rank: int) -> dict[str, Any]:
        tensor = SourceTensor((8 * size, 128), DType.BF16, (Box((8 * rank, 0), (8, 128)),))
        with World.current(timeouts=CALM) as world:
            return ProvidedValues({f"layers.{number}.weight": tensor for number in range(900)}).describe(world)

    with counted_ranks(size) as ranks:
        results = ranks.each(call)
    for provided in results:
        assert len(provided) == 900
        assert [tensor.boxes[0].offsets[0] for tensor in provided["layers.899.weight"]] == [*range(0, 8 * size, 8)]
        assert len({id(by_rank) for by_rank in provided.values()}) == 1
    assert ranks.store.largest_bytes < 10_000 + 20 * size


def test_equal_tensors_of_a_given_state_have_one_description():
    described = describe_tensors({"a": torch.zeros(2), "b": torch.ones(2)})
    assert described["a"] is described["b"]


@pytest.mark.parametrize("size", [64, MANY])
def test_many_that_fail_or_differ_are_reported_in_few_words(size):
    def fail() -> None:
        raise StorageError(f"disk {threading.get_ident()} is gone" + "." * 500)

    def call(rank: int) -> list[str]:
        texts = []
        with World.current(timeouts=CALM) as world:
            for block in (world.collective, world.all_gather):
                try:
                    with block("write"):
                        fail()
                except StorageError as error:
                    texts.append(str(error))
            for value in (rank >= 3, rank % 2):
                try:
                    world.require_equal(value, "the number")
                except RankMismatchError as error:
                    texts.append(str(error))
        return texts

    with counted_ranks(size) as ranks:
        told = ranks.each(call)
        calls, nbytes = spent(ranks)
    assert {tuple(texts) for texts in told} == {tuple(told[0])}
    first, second, third, fourth = told[0]
    assert first.startswith("rank 0: disk ")
    assert second.startswith("rank 0: disk ")
    assert third == f"the number on rank 3-{size - 1} is not that of rank 0"
    assert fourth == f"the number on rank 1, 3, 5, 7, 9, 11, 13, 15 and {size // 2 - 8} more is not that of rank 0"
    assert calls < CALLS_TO_JOIN + 4 * (CALLS_TO_MEET + 2)
    assert nbytes < BYTES_TO_JOIN + 4 * (BYTES_TO_MEET + 2 * 800)


def test_an_answer_larger_than_torch_s_store_takes_comes_through():
    """8 MiB in one value."""
    told = [os.urandom(900_000) for _ in range(12)]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with counted_ranks(len(told), store) as ranks:

        def tell(rank: int) -> bool:
            with World.current(timeouts=Timeouts(heartbeat_timeout_s=600)) as world:
                with world.broadcast("choose") as exchange:
                    exchange.local = 7 if rank == 0 else None
                return world.all_gather_object(told[rank]) == told and exchange.result == 7

        assert ranks.each(tell) == [True] * len(told)


def test_an_error_of_reduce_fun_is_raised_on_all_ranks_which_stay_synchronized():
    def conclude(told: list[int]) -> int:
        raise RankMismatchError(f"{told} do not fit")

    def fail(rank: int) -> int:
        if rank == 1:
            raise StorageError("gone")
        return rank

    def call(rank: int) -> list[Any]:
        found: list[Any] = []
        with World.current(timeouts=CALM) as world:
            for tell in (lambda: rank, lambda: fail(rank)):
                try:
                    with world.all_reduce("count", conclude) as exchange:
                        exchange.local = tell()
                except (RankMismatchError, StorageError) as error:
                    found.append(str(error))
            found.append(world.all_gather_object(rank))
        return found

    with counted_ranks(3) as ranks:
        texts = ["[0, 1, 2] do not fit", "rank 1: gone"]
        assert ranks.each(call) == [[*texts, [0, 1, 2]], [*texts, [0, 1, 2]], [*texts, [0, 1, 2]]]
