"""A tenant's rows as portions: those of a training alone, however much fits into a pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.tenants.turns import OwnSteps, PassBudget, evaluation_portions, learned_in, tensors_of
from shardwise.training.data.batches import Padded
from shardwise.training.data.loader import StepLoader, StepSampler
from shardwise.training.data.read_once import Examples, TrainData
from shardwise.training.options import Epochs, TrainOptions
from shardwise.training.texts.masking import Example


def data_of(lengths: list[int]) -> TrainData:
    rows = [Example.of(range(length), [True] * length) for length in lengths]
    return TrainData("rows.jsonl", Examples.of(rows, range(1, len(rows) + 1)), 0, (), ())


ROWS = st.lists(st.integers(1, 90), min_size=1, max_size=25)
OPTIONS = st.builds(
    TrainOptions,
    duration=st.builds(Epochs, st.integers(1, 3)),
    batch_size=st.integers(1, 5),
    gradient_accumulation_steps=st.integers(1, 3),
    seed=st.integers(0, 3),
)
BUDGETS = st.builds(
    PassBudget, tokens=st.integers(96, 400), pad_to=st.sampled_from([1, 16, 32]), longest=st.just(96)
)


@given(lengths=ROWS, options=OPTIONS, budget=BUDGETS, ranks=st.integers(1, 4))
def test_portions_are_the_steps_of_a_training_alone_and_fit(lengths, options, budget, ranks):
    data = data_of(lengths)
    steps = OwnSteps(data, options, ranks=ranks, budget=budget)
    found = list(steps)
    samplers = [StepSampler(len(lengths), options, rank=rank, size=ranks) for rank in range(ranks)]
    expected = [list(sampler) for sampler in samplers]
    assert len(found) == len(expected[0])
    assert [len(portions) for portions in found] == [steps.portions_per_step] * len(found)
    for number, portions in enumerate(found):
        for rank in range(ranks):
            alone = [row for batch in expected[rank][number] for row in batch if lengths[row] > 1]
            assert [row for portion in portions for row in portion.rows[rank]] == alone
        for portion in portions:
            assert portion.most_rows * portion.tokens <= budget.tokens
            assert portion.most_rows <= options.batch_size
            assert all(lengths[row] <= portion.tokens for own in portion.rows for row in own)
            assert portion.own_tokens == sum(lengths[row] for own in portion.rows for row in own)


@given(lengths=ROWS, options=OPTIONS, budget=BUDGETS, stop=st.integers(0, 6), ranks=st.sampled_from([1, 2, 4]))
def test_a_position_is_gone_on_from_on_other_ranks(lengths, options, budget, stop, ranks):
    data = data_of(lengths)
    on_four = replace(options, batch_size=1, gradient_accumulation_steps=1)
    on_others = replace(on_four, batch_size=4 // ranks)
    whole = [rows_of(portions) for portions in OwnSteps(data, on_four, ranks=4, budget=budget)]
    first = OwnSteps(data, on_four, ranks=4, budget=budget)
    done = [rows_of(portions) for portions, _ in zip(first, range(stop), strict=False)] if stop else []
    again = OwnSteps(data, on_others, ranks=ranks, budget=budget)
    position = OwnSteps(data, on_four, ranks=4, budget=budget)
    steps = iter(position)
    for _ in done:
        next(steps)
    again.load_state_dict(position.state_dict())
    assert done + [rows_of(portions) for portions in again] == whole


def rows_of(portions) -> list[int]:
    return sorted(row for portion in portions for own in portion.rows for row in own)


@given(lengths=ROWS, size=st.integers(1, 5), budget=BUDGETS, ranks=st.integers(1, 3))
def test_an_evaluation_looks_at_every_row_once(lengths, size, budget, ranks):
    portions = evaluation_portions(data_of(lengths), size, ranks=ranks, budget=budget)
    found = sorted(row for portion in portions for own in portion.rows for row in own)
    assert found == [number for number, length in enumerate(lengths) if length > 1]
    assert all(portion.most_rows * portion.tokens <= budget.tokens for portion in portions)


def test_rows_as_a_bank_takes_them():
    data = data_of([5, 3])
    rows = tensors_of(data, [1, 0])
    assert {key: tuple(values.shape) for key, values in rows.items()} == dict.fromkeys(rows, (2, 5))
    assert learned_in(rows) == 6
    assert tensors_of(data, [])["input_ids"].shape == (0, 1)
    assert learned_in(tensors_of(data, [])) == 0


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (PassBudget(64, 16, 96), "rows.jsonl, line 2: a row of 80 tokens, padded to 80, does not fit into bank.t"),
        (PassBudget(640, 16, 64), "rows.jsonl, line 2: a row of 80 tokens, and the model takes 64; lower data.max"),
    ],
)
def test_a_row_that_fits_into_no_pass_is_named(budget, told):
    with pytest.raises(ConfigError) as caught:
        OwnSteps(data_of([3, 80, 7]), TrainOptions(), ranks=1, budget=budget)
    assert str(caught.value).startswith(told)


def test_a_position_in_other_data_is_refused():
    budget = PassBudget(640, 16, 96)
    steps = OwnSteps(data_of([3, 8, 7]), TrainOptions(), ranks=1, budget=budget)
    other = OwnSteps(data_of([3, 8, 9]), TrainOptions(), ranks=1, budget=budget)
    with pytest.raises(ConfigError, match="the position is one in other data"):
        steps.load_state_dict(other.state_dict())
    assert np.array_equal(steps.data.examples.lengths, [3, 8, 7])
    loader = StepLoader(steps.data, TrainOptions(), Padded(), rank=0, size=1)
    steps.load_state_dict(loader.state_dict())
    assert Path(steps.name_rows([2, 0])).name == "rows.jsonl, lines 1, 3"
