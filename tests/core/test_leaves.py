"""Leaves, structure and text of expressions."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import Grower, view

from shardwise.core.computed import copies
from shardwise.core.expression import (
    Expression,
    Stored,
    Unstored,
    concat,
    count_stored_rows,
    iter_stored_leaves,
    permute,
    reshape,
    slice_dim,
    stack,
    structure,
    substitute,
)
from shardwise.core.tensors import Box, DType


def grown(seed: int) -> tuple[Expression, Grower, np.ndarray]:
    rng = random.Random(seed)
    grower = Grower(rng)
    node, array = grower.grow(rng.randint(0, 5))
    return node, grower, array


def evaluated(expression: Expression, leaves: dict[str, np.ndarray]) -> np.ndarray:
    """The expression by its copies; -1 where there is none."""
    made = np.full(expression.shape, -1)
    for copy in copies(expression, Box.whole(expression.shape)):
        view(made.reshape(-1), copy.target)[...] = view(leaves[copy.leaf.key], copy.source)
    return made


@given(st.integers(0, 2**32))
def test_other_leaves_of_the_same_shapes(seed: int) -> None:
    node, grower, array = grown(seed)
    leaves = list(iter_stored_leaves(node))
    renamed = {leaf.key: replace(leaf, key=f"other {leaf.key}") for leaf in leaves}
    made = substitute(node, renamed)
    assert list(iter_stored_leaves(made)) == [renamed[leaf.key] for leaf in leaves]
    assert np.array_equal(evaluated(made, {f"other {key}": value for key, value in grower.leaves.items()}), array)
    kind, keys = structure(node)
    assert structure(made) == (kind, tuple(renamed[key].key for key in keys))
    assert keys == tuple(dict.fromkeys(leaf.key for leaf in leaves))
    assert (
        structure(substitute(node, {key: replace(leaf, dtype=DType.I8) for key, leaf in renamed.items()}))[0]
        != kind
    )


@given(st.integers(0, 2**32))
def test_leaves_that_are_made_of_others(seed: int) -> None:
    node, grower, array = grown(seed)
    halves, leaves = {}, {}
    for leaf in iter_stored_leaves(node):
        whole = grower.leaves[leaf.key].reshape(-1)
        cut = len(whole) // 2
        parts = [
            Stored(f"{leaf.key} {number}", (size,), leaf.dtype)
            for number, size in enumerate((cut, whole.size - cut))
        ]
        leaves |= {parts[0].key: whole[:cut], parts[1].key: whole[cut:]}
        halves[leaf.key] = reshape(concat(parts, 0), leaf.shape)
    assert np.array_equal(evaluated(substitute(node, halves), leaves), array)


def test_expressions_that_differ_have_other_skeletons() -> None:
    a, b, half = Stored("a", (4, 6), DType.F32), Stored("b", (4, 6), DType.F32), Stored("a", (4, 6), DType.F16)
    cube = reshape(a, (2, 2, 6))
    different = [a, half, Stored("a", (4, 4), DType.F32), Unstored((4, 6), DType.F32), Unstored((4, 5), DType.F32)]
    different += [concat([a, b], 0), concat([a, a], 0), concat([a, b], 1), concat([a, b, b], 0)]
    different += [concat([a, Unstored((1, 6), DType.F32)], 0), stack([a, b], 0), stack([a, b], 1)]
    different += [slice_dim(a, *of) for of in ((0, 0, 2), (0, 1, 2), (0, 0, 2, 2), (0, 0, 3), (1, 0, 2))]
    different += [permute(a, (1, 0)), permute(cube, (1, 0, 2)), permute(cube, (1, 2, 0))]
    different += [reshape(a, (6, 4)), reshape(a, (24,))]
    assert len({structure(node)[0] for node in different}) == len(different)
    assert structure(concat([a, b], 0))[0] == structure(concat([b, a], 0))[0]
    assert structure(concat([b, a], 0))[1] == ("b", "a")


def test_rows_that_no_checkpoint_holds() -> None:
    """Of a vocabulary that has grown: nothing is copied there."""
    stored = Stored("embed", (5, 2), DType.F32)
    grown = concat([stored, Unstored((3, 2), DType.F32)], 0)
    assert count_stored_rows(grown) == 5
    found = substitute(grown, {"embed": replace(stored, key="e")})
    assert found == concat([replace(stored, key="e"), Unstored((3, 2), DType.F32)], 0)
    made = evaluated(grown, {"embed": np.arange(10)})
    assert np.array_equal(made, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], *[[-1, -1]] * 3])
    assert list(iter_stored_leaves(grown)) == [stored]
    for whole in (
        stored,
        concat([stored, stored], 0),
        concat([stored, Unstored((5, 2), DType.F32)], 1),
        concat([Unstored((3, 2), DType.F32), stored], 0),
    ):
        assert count_stored_rows(whole) is None


@pytest.mark.parametrize(
    ("start", "size", "step"), [(0, 5, 1), (1, 4, 1), (0, 1, 0), (-1, 1, 1), (0, -1, 1), (1, 2, 3), (4, 1, 1)]
)
def test_slices_beyond_the_source(start: int, size: int, step: int) -> None:
    with pytest.raises(ValueError, match="outside dimension 0"):
        slice_dim(Stored("a", (4, 6), DType.F32), 0, start, size, step)
