"""Strided views of a flat source, against direct evaluation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.computed import copies
from shardwise.core.expression import Expression, Stored, as_strided, permute, reshape, slice_dim
from shardwise.core.tensors import Box, DType, Strided


def flat(count: int) -> Stored:
    return Stored("x", (count,), DType.I64)


def evaluated(expression: Expression, count: int) -> np.ndarray:
    """The expression over 0, 1, 2, ..., by its copies."""
    made = np.full(expression.shape, -1, np.int64)
    source = np.arange(count)
    for copy in copies(expression, Box.whole(expression.shape)):
        strided(made.reshape(-1), copy.target)[...] = strided(source, copy.source)
    return made


def strided(memory: np.ndarray, of: Strided) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(memory[of.offset :], of.sizes, [8 * stride for stride in of.strides])


@st.composite
def views(draw: st.DrawFn) -> tuple[Strided, int]:
    """A view that sees no element twice, and how many elements there are."""
    steps: list[tuple[int, int]] = []
    stride = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(1, 4))
        steps.append((size, stride))
        stride = stride * (size - 1) + draw(st.integers(1, 6)) if size > 1 else stride
        # The next must step over all that this one reaches.
        stride = max(stride, 1 + sum((count - 1) * step for count, step in steps))
    steps = draw(st.permutations(steps))
    offset = draw(st.integers(0, 7))
    made = Strided(offset, tuple(size for size, _ in steps), tuple(step for _, step in steps))
    return made, made.stop + draw(st.integers(0, 9))


@given(views())
def test_a_view_equals_torch_as_strided(case: tuple[Strided, int]) -> None:
    of, count = case
    expression = as_strided(flat(count), of)
    assert expression.shape == of.sizes
    assert np.array_equal(evaluated(expression, count), strided(np.arange(count), of))


def test_a_view_of_a_whole_grid_is_no_more_than_it_needs() -> None:
    assert as_strided(flat(6), Strided(0, (2, 3), (3, 1))) == reshape(flat(6), (2, 3))
    assert as_strided(flat(6), Strided(0, (3, 2), (1, 3))) == permute(reshape(flat(6), (2, 3)), (1, 0))
    columns = as_strided(flat(48), Strided(2, (6, 3), (8, 1)))
    assert columns == slice_dim(reshape(flat(48), (6, 8)), 1, 2, 3)
    assert len(copies(columns, Box.whole((6, 3)))) == 1


def test_an_empty_view() -> None:
    made = as_strided(flat(6), Strided(6, (0, 4), (9, 9)))
    assert made == reshape(slice_dim(flat(6), 0, 0, 0), (0, 4))


@pytest.mark.parametrize(
    ("of", "count", "words"),
    [
        (Strided(1, (2, 3), (3, 1)), 6, "is no view of"),
        (Strided(0, (2, 3), (0, 1)), 6, "2 x 0 is outside"),
        (Strided(0, (3, 3), (1, 1)), 9, "see elements twice"),
        (Strided(0, (2, 3), (2, 1)), 9, "steps of 2 see elements twice"),
        (Strided(0, (2, 3), (4, 2)), 9, "steps of 4 see elements twice"),
        (Strided(0, (2, 2, 2), (3, 2, 1)), 9, "steps of 3 see elements twice"),
    ],
)
def test_invalid_views_are_refused(of: Strided, count: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        as_strided(flat(count), of)
