"""Boxes of expressions, pushed down to strided copies."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import check_computed, check_expression

from shardwise.core.computed import copies
from shardwise.core.expression import Stored, concat, permute, reshape, slice_dim, stack
from shardwise.core.tensors import Box, DType, Strided


@given(st.integers(min_value=0, max_value=2**63))
def test_random_expressions_agree_with_direct_evaluation(seed):
    check_expression(seed)


@given(st.integers(min_value=0, max_value=2**63))
def test_random_expressions_that_compute_agree_with_direct_evaluation(seed):
    check_computed(seed)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_seeded_expressions_agree(count):
    for seed in range(count):
        check_expression(seed)


def leaf(key, *shape):
    return Stored(key, shape, DType.BF16)


def test_three_experts_of_sixty_are_three_copies():
    experts = stack([leaf(f"experts.{i}.up", 16, 8) for i in range(60)], 0)
    found = copies(experts, Box((7, 0, 0), (3, 16, 8)))
    assert [copy.leaf.key for copy in found] == ["experts.7.up", "experts.8.up", "experts.9.up"]
    assert all(copy.source.is_contiguous and copy.target.is_contiguous for copy in found)


def test_the_middle_third_of_a_fused_projection_is_one_contiguous_copy():
    (copy,) = copies(slice_dim(leaf("qkv", 30, 8), 0, 10, 10), Box((2, 0), (5, 8)))
    assert copy.source == Strided(12 * 8, (40,), (1,))


def test_a_column_interleave_is_one_copy():
    """Pairs of columns taken apart: [a0 b0 a1 b1 ...] to [a0 a1 ... b0 b1 ...]."""
    columns = reshape(permute(reshape(leaf("w", 6, 8), (6, 4, 2)), (0, 2, 1)), (6, 8))
    assert len(copies(columns, Box.whole((6, 8)))) == 1


def test_an_empty_shard_needs_nothing():
    assert copies(leaf("w", 4, 8), Box((4, 0), (0, 8))) == []


def test_a_box_lands_where_it_is_copied_to():
    into = Strided(100, (2, 3), (10, 1))
    (copy,) = copies(leaf("w", 4, 3), Box((1, 0), (2, 3)), into)
    assert copy.target == Strided(100, (2, 3), (10, 1))
    assert copy.source == Strided(3, (2, 3), (3, 1))


def test_a_box_outside_is_refused():
    with pytest.raises(ValueError, match="not within"):
        copies(leaf("w", 4, 3), Box((3, 0), (2, 3)))


def test_blocks_of_a_copy_cover_it_within_the_span():
    (copy,) = copies(permute(leaf("w", 100, 64), (1, 0)), Box.whole((64, 100)))
    written = np.zeros(6400, dtype=int)
    for block in copy.blocks(500):
        assert block.source.stop - block.source.offset <= 500
        indices = np.add.outer(np.arange(block.target.sizes[0]) * block.target.strides[0], block.target.offset)
        for size, step in zip(block.target.sizes[1:], block.target.strides[1:], strict=True):
            indices = np.add.outer(indices, np.arange(size) * step)
        written[indices.reshape(-1)] += 1
    assert (written == 1).all()


@given(st.integers(1, 60), st.integers(1, 70))
def test_a_run_is_cut_into_no_more_blocks_than_it_takes(count, span):
    (copy,) = copies(leaf("w", count, 8), Box.whole((count, 8)))
    assert len(list(copy.blocks(span))) == -(-8 * count // span)


@given(st.integers(1, 39), st.integers(0, 7))
def test_an_interleave_of_two_parts_is_taken_apart_at_the_seam_only(row, column):
    """Forty rows [a0 a1 a2 a3 b0 b1 b2 b3] become [a0 b0 a1 b1 ...]; in two parts that meet in some row."""
    sizes = (8 * row + column, 320 - 8 * row - column)
    whole = concat([leaf(str(number), size) for number, size in enumerate(sizes)], 0)
    found = copies(reshape(permute(reshape(whole, (40, 2, 4)), (0, 2, 1)), (40, 8)), Box.whole((40, 8)))
    # Of each part the whole rows, and of the row at the seam what it has of either half.
    halves = [(column > 0) + (column > 4), (column > 0) + (0 < column < 4)]
    rows = [1, int(8 * row + column <= 312)]
    told = [sum(copy.leaf.key == key for copy in found) for key in "01"]
    assert told == [one + more for one, more in zip(rows, halves, strict=True)]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: concat([leaf("a", 2, 3), leaf("b", 2, 4)], 0), "cannot concatenate"),
        (lambda: concat([], 0), "nothing"),
        (lambda: stack([leaf("a", 2), leaf("b", 3)], 0), "cannot stack"),
        (lambda: reshape(leaf("a", 2, 3), (7,)), "cannot reshape"),
        (lambda: permute(leaf("a", 2, 3), (0, 0)), "does not permute"),
        (lambda: slice_dim(leaf("a", 5), 0, 3, 3), "outside"),
    ],
)
def test_an_expression_that_cannot_be_is_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_nodes_print_as_what_they_are():
    node = concat([stack([leaf(f"gate.{i}", 2, 3) for i in range(4)], 0), leaf("up", 4, 5, 3)], 1)
    assert str(node) == "Concat(Stack(gate.0, ... 2 more ..., gate.3), up)"
