"""Boxes of the leaves that hold all a box of an expression is made of; and blocks that lie in one piece."""

import random
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.conversion.random_expressions import Grower, random_box, view

from shardwise.conversion.computed import apart, covering_box, pieces
from shardwise.conversion.expression import Region
from shardwise.tensors import Box, Strided, row_blocks


def cut(array, box):
    return array[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


@given(seed=st.integers(0, 2**32))
def test_a_box_is_made_of_the_boxes_that_it_needs(seed):
    rng = random.Random(seed)
    grower = Grower(rng)
    expression, array = grower.grow(rng.randint(0, 5))
    box = random_box(rng, expression.shape)
    made = np.full(box.numel, -7)
    around: dict[str, list[Box]] = {}
    for leaf, region in expression.leaves(Region.of(box, Strided.contiguous(box.sizes))) if box.numel else ():
        around.setdefault(leaf.key, []).append(region.bounds)
    for key, parts in ((key, apart(boxes)) for key, boxes in around.items()):
        assert all(part.is_within(grower.leaves[key].shape) for part in parts)
        times = np.zeros(grower.leaves[key].shape, int)
        for part in parts:
            times[tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))] += 1
            memory = np.ascontiguousarray(cut(grower.leaves[key], part)).reshape(-1)
            for copy in pieces(expression, {key: [(part, Strided.contiguous(part.sizes))]}, box):
                view(made, copy.target)[...] = view(memory, copy.source)
        assert times.max(initial=0) <= 1  # parts do not overlap
    wanted = cut(array, box)
    assert np.array_equal(made.reshape(wanted.shape), wanted)


def test_columns_need_no_more_than_columns():
    assert covering_box(Strided(2, (5, 3), (8, 1)), (5, 8)) == Box((0, 2), (5, 3))
    assert covering_box(Strided(3, (4, 5), (1, 8)), (5, 8)) == Box((0, 3), (5, 4))
    assert covering_box(Strided(16, (16,), (1,)), (5, 8)) == Box((2, 0), (2, 8))
    assert covering_box(Strided(0, (), ()), ()) == Box((), ())
    # Every third element from (1, 1, 3) to (1, 3, 2): rows 1 to 3, whole.
    assert covering_box(Strided(28, (4,), (3,)), (3, 4, 5)) == Box((1, 1, 0), (1, 3, 5))


@given(shape=st.lists(st.integers(0, 5), max_size=4), most=st.integers(1, 30))
def test_row_blocks_are_the_tensor_in_order(shape, most):
    places = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    found = [cut(places, box).reshape(-1) for box in row_blocks(shape, most)]
    assert all(0 < len(block) <= most for block in found)
    assert np.array_equal(np.concatenate([np.empty(0, int), *found]), places.reshape(-1))
    assert all(one[-1] + 1 == two[0] for one, two in pairwise(found))


def bounds(of, shape):
    """The smallest box around the elements, found one by one."""
    if not shape:
        return Box((), ())
    places = np.array([of.offset])
    for size, stride in zip(of.sizes, of.strides, strict=True):
        places = np.add.outer(places, np.arange(size) * stride).reshape(-1)
    indices = np.array(np.unravel_index(places, shape)).reshape(len(shape), -1)
    first, last = indices.min(axis=1), indices.max(axis=1)
    return Box(tuple(map(int, first)), tuple(map(int, last - first + 1)))


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_rows_and_columns_with_steps_need_no_more_than_their_bounds(shape, data):
    axes = []
    offset = 0
    for size, stride in zip(shape, Strided.contiguous(shape).strides, strict=True):
        first = data.draw(st.integers(0, size - 1))
        step = data.draw(st.integers(1, 3))
        axes.append((data.draw(st.integers(1, (size - 1 - first) // step + 1)), stride * step))
        offset += first * stride
    # An axis of one step reaches nothing, whatever its stride.
    axes = data.draw(
        st.permutations([(n, stride if n > 1 else data.draw(st.integers(0, 9))) for n, stride in axes])
    )
    of = Strided(offset, tuple(size for size, _ in axes), tuple(stride for _, stride in axes))
    assert covering_box(of, shape) == bounds(of, shape)


@given(shapes, st.data())
def test_any_elements_are_within_the_box_around_them(shape, data):
    room = int(np.prod(shape, dtype=int)) - 1
    offset = data.draw(st.integers(0, room))
    left, axes = room - offset, []
    for _ in range(data.draw(st.integers(1, 3))):
        stride = data.draw(st.integers(1, max(1, left)))
        size = data.draw(st.integers(1, left // stride + 1))
        left -= stride * (size - 1)
        axes.append((size, stride))
    of = Strided(offset, tuple(size for size, _ in axes), tuple(stride for _, stride in axes))
    box, least = covering_box(of, shape), bounds(of, shape)
    assert box.is_within(shape)
    assert box.intersect(least) == least
    # Of one axis, no more than the rows from its first element to its last.
    if sum(size > 1 for size, _ in axes) == 1:
        ends = [np.unravel_index(place, shape) for place in (of.offset, of.stop - 1)]
        differing = next(dim for dim in range(len(shape)) if ends[0][dim] != ends[1][dim])
        assert box.offsets[: differing + 1] == least.offsets[: differing + 1]
        assert box.sizes[: differing + 1] == least.sizes[: differing + 1]
