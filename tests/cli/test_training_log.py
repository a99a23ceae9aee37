"""What the console tells of a training's data."""

from __future__ import annotations

import pytest

from shardwise.cli.training_log import describe_data
from shardwise.training.data.examples import Example, Examples
from shardwise.training.data.train_data import TrainData


@pytest.mark.parametrize(
    ("lines", "told"),
    [([1, 2, 3], "3 rows, 6 tokens, 3 learned"), ([1, 1, 2], "2 rows as 3 examples, 6 tokens, 3 learned")],
)
def test_rows_are_told_apart_from_what_they_make(lines, told):
    examples = Examples.of([Example.of([5, 6], [True, True]) for _ in lines], lines)
    assert describe_data(TrainData("chats.jsonl", examples, 0, (), ())).splitlines()[1].strip() == told
