"""The last case that a rule of planning takes, and the first that it does not."""

import numpy as np
import pytest
from tests.conversion.random_expressions import view
from tests.planning.test_load_plan import F32

from shardwise.conversion.computed import copies
from shardwise.conversion.expression import Expression, Stored
from shardwise.formats.contract import CheckpointIndex, Composed, Joined, TensorEntry, View, Whole
from shardwise.planning.load_memory import stored_tensors
from shardwise.planning.moves import own_share
from shardwise.tensors import Box, Strided, numel

# Shares


@pytest.mark.parametrize(("nbytes", "shares"), [(1 << 16, [1, 0]), ((1 << 16) + 2, [1, 1])])
def test_what_is_of_64_kib_is_given_whole(nbytes: int, shares: list[int]) -> None:
    box = Box((0,), (nbytes // 2,))
    given = [own_share(box, replica, 2, 0, 2) for replica in range(2)]
    assert [len(parts) for parts in given] == shares
    assert sum(part.numel for parts in given for part in parts) == box.numel


# Loads


def test_tensors_that_are_composed() -> None:
    def entry(key: str, shape: tuple[int, ...], start: int) -> TensorEntry:
        return TensorEntry(key, F32, shape, "f", start, start + 4 * numel(shape))

    entries = {
        "a": entry("a", (2, 3), 0),
        "b": entry("b", (1, 3), 24),
        "s": entry("s", (6,), 36),
        "p": entry("p", (2,), 60),
    }
    composed = {
        "ab": Composed(F32, (3, 3), Joined((Whole("a"), Whole("b")), 0)),
        "t": Composed(F32, (3, 2), View("s", Strided(0, (3, 2), (1, 3)))),
    }
    found = stored_tensors(CheckpointIndex("here", {"f": 68}, entries, {}, "single file", composed))
    assert list(found) == ["p", "ab", "t"]
    assert found["p"] == Stored("p", (2,), F32)

    def evaluated(expression: Expression) -> list[object]:
        values = {"a": np.arange(6), "b": np.arange(6, 9), "s": np.arange(6), "p": np.arange(2)}
        made = np.full(expression.shape, -1)
        for copy in copies(expression, Box.whole(expression.shape)):
            view(made.reshape(-1), copy.target)[...] = view(values[copy.leaf.key], copy.source)
        return made.tolist()

    assert evaluated(found["ab"]) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert evaluated(found["t"]) == [[0, 3], [1, 4], [2, 5]]


# Sources
