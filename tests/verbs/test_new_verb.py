"""What a verb takes that is not ours: a page over the rooms below, and every rank gets the same answer or error."""

import pytest
from tests.verbs import largest

from shardwise.errors import ConfigError

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_has_the_same_answer(worlds, size):
    for found, expected in worlds(size).run(largest.on_ranks):
        assert found == expected


def test_ranks_that_ask_for_different_things_are_told_so_together(worlds):
    first, second = worlds(2).run(largest.told_to_odd_ranks)
    assert first == second
    assert first[0] == "DisagreementError"
    assert "parameters" in first[1]


def test_an_argument_is_what_is_meant():
    with pytest.raises(ConfigError, match="model"):
        largest.largest("a model")
