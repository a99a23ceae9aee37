"""Several data sets, by their weights; rows that are held out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training import tiny

from shardwise.errors import ConfigError
from shardwise.training.configuration.config import config_of
from shardwise.training.data.batches import Packed, Padded
from shardwise.training.data.loader import StepLoader, StepSampler
from shardwise.training.data.read_once import HeldOut, RowsAsked, TrainData, read_and_hold_out, read_data
from shardwise.training.data.sources import DataName
from shardwise.training.data.train_data import ByWeight, RowOrder, held_out_rows
from shardwise.training.options import Epochs, TrainOptions
from shardwise.training.session import read_rows

counts = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@given(counts=counts, data=st.data(), seed=st.integers(0, 9))
def test_shares_are_as_weights_say_and_all_rows_come_equally_often(counts: list[int], data: Any, seed: int) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(counts), max_size=len(counts)))
    order = RowOrder(sum(counts), ByWeight(tuple(weights), tuple(counts)))
    shares = order.mixing.shares  # type: ignore[union-attr]
    assert sum(shares) == sum(counts)
    exact = [weight / sum(weights) * sum(counts) for weight in weights]
    assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))
    firsts = np.cumsum([0, *counts])
    seen: Counter[int] = Counter()
    for epoch in range(3):
        rows = order.of_epoch(seed, epoch)
        assert rows == order.of_epoch(seed, epoch)
        owners = np.searchsorted(firsts, rows, side="right") - 1
        assert np.bincount(owners, minlength=len(counts)).tolist() == list(shares)
        seen.update(rows)
    for number, count in enumerate(counts):
        own = [seen[row] for row in range(firsts[number], firsts[number] + count)]
        assert max(own) - min(own) <= 1


def test_without_weights_the_order_is_what_it_was() -> None:
    expected = np.random.default_rng([3, 1]).permutation(9).tolist()
    assert RowOrder(9).of_epoch(3, 1) == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_takes_the_same_rows(size: int) -> None:
    order = RowOrder(18, ByWeight((3.0, 1.0), (6, 12)))
    options = TrainOptions(batch_size=6 // size, duration=Epochs(2))
    steps = [list(StepSampler(order, options, rank=rank, size=size)) for rank in range(size)]
    alone = list(StepSampler(order, TrainOptions(batch_size=6, duration=Epochs(2))))
    together = [
        sorted(row for rank in step for batch in rank for row in batch) for step in zip(*steps, strict=True)
    ]
    assert together == [sorted(row for batch in step for row in batch) for step in alone]


@pytest.fixture
def two(tmp_path: Path) -> list[DataName]:
    few = tiny.write_rows(tmp_path / "few.jsonl", *[{"text": f"few {n}"} for n in range(4)])
    many = tiny.write_rows(tmp_path / "many.jsonl", *[{"text": f"many {n}"} for n in range(12)])
    return [DataName(str(few), weight=3.0), DataName(str(many), weight=1.0)]


def read(names: Any) -> TrainData:
    return read_data(names, tiny.tokenizer(), max_length=64)


def texts(loader: StepLoader, count: int) -> list[list[str]]:
    tokenizer = tiny.tokenizer()
    taken = [batch for _, batches in zip(range(count), loader, strict=False) for batch in batches]
    return [[tokenizer.decode(row, skip_special_tokens=True) for row in batch.input_ids] for batch in taken]


def test_an_epoch_takes_more_of_what_weighs_more_and_goes_on_where_it_was(two: list[DataName]) -> None:
    options = TrainOptions(batch_size=4, duration=Epochs(2))
    data = read(two)
    assert data.shares() == [(two[0].path, 12, 4), (two[1].path, 4, 12)]
    whole = texts(StepLoader(data, options, Padded(), rank=0, size=1), 8)
    first_epoch = Counter(text for step in whole[:4] for text in step)
    assert sorted(first_epoch[f"few {n}"] for n in range(4)) == [3, 3, 3, 3]
    assert sum(count for text, count in first_epoch.items() if text.startswith("many")) == 4
    loader = StepLoader(data, options, Padded(), rank=0, size=1)
    assert texts(loader, 3) == whole[:3]
    again = StepLoader(read(two), options, Padded(), rank=0, size=1)
    again.load_state_dict(loader.state_dict())
    assert texts(again, 5) == whole[3:]
    for others in ([*two[:1], DataName(two[1].path, weight=2.0)], [DataName(name.path) for name in two]):
        other = StepLoader(read(others), options, Padded(), rank=0, size=1)
        for one, state in ((other, loader.state_dict()), (loader, other.state_dict())):
            with pytest.raises(ConfigError, match=r"the position is one in other data \(.*weights"):
                one.load_state_dict(state)


def test_packs_are_of_one_data_set_where_these_have_weights(two: list[DataName]) -> None:
    data = read(two)
    loader = StepLoader(data, TrainOptions(batch_size=1), Packed(64), rank=0, size=1)
    packs = loader.batches.packs
    assert packs is not None
    assert sorted(row for pack in packs for row in pack) == list(range(16))
    assert all(max(pack) < 4 or min(pack) >= 4 for pack in packs)
    assert len(loader) == len(packs)
    mixed = StepLoader(read([name.path for name in two]), TrainOptions(batch_size=1), Packed(64), rank=0, size=1)
    assert mixed.batches.packs != packs


def test_weights_that_are_none(two: list[DataName]) -> None:
    few, many = two
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(
            ConfigError, match=r"few.jsonl: its weight is .*; it must be greater than 0, and finite"
        ):
            read([DataName(few.path, weight=weight), many])
    with pytest.raises(ConfigError, match=r"few.jsonl: it has no weight, and other data sets have"):
        read([DataName(few.path), many])
    with pytest.raises(ConfigError, match="with the weight 0.001 an epoch of 16 rows would take none"):
        read([DataName(few.path, weight=0.001), many])
    with pytest.raises(ConfigError, match="there is no data set in the list"):
        read([])


# Held out


@given(count=st.integers(2, 200), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**63 - 1))
def test_a_fraction_is_held_out(count: int, fraction: float, seed: int) -> None:
    hashes = np.random.default_rng(count).permutation(np.arange(count, dtype=np.uint64))
    [held] = held_out_rows([hashes], fraction, seed) or []
    assert held.sum() == min(max(round(fraction * count), 1), count - 1)
    [again] = held_out_rows([hashes[::-1]], fraction, seed) or []
    assert set(hashes[::-1][again]) == set(hashes[held])


def held_out(names: list[DataName], fraction: float, seed: int = 0) -> tuple[TrainData, TrainData]:
    return read_and_hold_out(names, RowsAsked(tiny.tokenizer(), 64), HeldOut(fraction, seed))


def test_rows_that_are_held_out_are_not_learned(tmp_path: Path, two: list[DataName]) -> None:
    learned, looked_at = held_out(two, 0.25)
    both = [[tuple(example.tokens) for example in data.examples] for data in (learned, looked_at)]
    assert [len(each) for each in both] == [12, 4]
    assert sorted(both[0] + both[1]) == sorted(tuple(example.tokens) for example in read(two).examples)
    assert (learned.tokens, looked_at.tokens) == tuple(sum(map(len, each)) for each in both)
    # The places are those in the files, and the same rows are held out whatever their order.
    assert sorted([*learned.examples.lines, *looked_at.examples.lines]) == list(range(1, 17))
    twice = [{"text": f"a {n}"} for n in (4, 1, 3, 2, 0, 1, 2, 3, 0, 4)]
    once = tiny.write_rows(tmp_path / "rows.jsonl", *[{"text": f"a {n}"} for n in range(5)])
    shuffled = tiny.write_rows(tmp_path / "twice.jsonl", *twice)
    [of_once, of_twice] = [held_out([DataName(str(file))], 0.4)[1] for file in (once, shuffled)]
    assert len(of_twice.examples) == 2 * len(of_once.examples) == 4
    assert {tuple(e.tokens) for e in of_once.examples} == {tuple(e.tokens) for e in of_twice.examples}
    assert {tuple(held_out([DataName(str(once))], 0.4, seed)[1].examples.lines) for seed in range(9)} != {(1, 2)}
    alike = tiny.write_rows(tmp_path / "alike.jsonl", *[{"text": "a"}] * 3)
    with pytest.raises(ConfigError, match=r"alike.jsonl: data.validation_fraction=0.4 cannot be held out"):
        held_out([DataName(str(alike))], 0.4)
    for fraction in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="it must be greater than 0 and less than 1"):
            HeldOut(fraction)


def test_a_configuration_says_all_that(two: list[DataName]) -> None:
    few, many = (name.path for name in two)
    base: dict[str, Any] = {"model": {"name": "m"}, "output": {"directory": "out"}}
    columns = {"text": "text"}
    listed = [{"path": few, "weight": 3.0, "columns": columns, "layout": "text"}, {"path": many, "weight": 1.0}]
    config = config_of({**base, "data": {"train": listed, "validation_fraction": 0.25}, "evaluation": {"every": 2}})
    learned, looked_at = read_rows(config, tiny.tokenizer())
    assert looked_at is not None
    assert (len(learned.examples), len(looked_at.examples)) == (12, 4)
    assert isinstance(learned.mixing, ByWeight)
    assert config_of({**base, "data": {"train": [few, many]}}).data.train == [few, many]
    faults = {
        "evaluation: data and data.validation_fraction both say what is evaluated": {
            "data": {"train": few, "validation_fraction": 0.5},
            "evaluation": {"data": many},
        },
        "evaluation: every says how often, but data does not say on what": {
            "data": {"train": few},
            "evaluation": {"every": 3},
        },
        "data.validation_fraction=0.0: it must be greater than 0": {
            "data": {"train": few, "validation_fraction": 0.0}
        },
        "data.validation_fraction=1.0: it must be less than 1": {
            "data": {"train": few, "validation_fraction": 1.0}
        },
        "data.train[1].weight=0.0: it must be greater than 0": {
            "data": {"train": [{"path": few, "weight": 1.0}, {"path": many, "weight": 0.0}]}
        },
        "data.train[0].wieght: no such key; did you mean": {"data": {"train": [{"path": few, "wieght": 1.0}]}},
        "data.layout='chatml': it must be 'messages'": {"data": {"train": few, "layout": "chatml"}},
        "data.processes=0": {"data": {"train": few, "processes": 0}},
    }
    for message, values in faults.items():
        with pytest.raises(ConfigError) as caught:
            config_of({**base, **values})
        assert message in str(caught.value)
