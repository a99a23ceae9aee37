"""Pieces of an expression that ranks hold cover each element once."""

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.core.random_expressions import Grower, random_box, view

from shardwise.core.computed import copies_from_shards
from shardwise.core.tensors import Box, Strided


def dealt(rng, array):
    """The array in two to four boxes along some dimension, each with memory of its own that begins with padding."""
    if not array.ndim:
        return [(Box((), ()), array.reshape(-1).copy(), Strided.contiguous(()))]
    dim = rng.randrange(array.ndim)
    edges = sorted(rng.randint(0, array.shape[dim]) for _ in range(rng.randint(1, 3)))
    found = []
    for start, stop in zip([0, *edges], [*edges, array.shape[dim]], strict=True):
        part = np.take(array, range(start, stop), dim)
        offsets = tuple(start if axis == dim else 0 for axis in range(array.ndim))
        memory = np.concatenate([np.full(3, -1), part.reshape(-1)])
        found.append((Box(offsets, part.shape), memory, Strided.contiguous(part.shape, 3)))
    return found


@given(seed=st.integers(0, 2**32), is_whole=st.booleans())
def test_pieces_of_all_holders_make_the_box(seed, is_whole):
    rng = random.Random(seed)
    grower = Grower(rng)
    expression, array = grower.grow(rng.randint(0, 5))
    box = Box.whole(expression.shape) if is_whole else random_box(rng, expression.shape)
    made = np.full(box.numel, -7)
    times = np.zeros(box.numel, dtype=int)
    for key, leaf in grower.leaves.items():
        for held, memory, place in dealt(rng, leaf):
            for copy in copies_from_shards(expression, {key: [(held, place)]}, box):
                assert copy.leaf.key == key
                view(made, copy.target)[...] = view(memory, copy.source)
                view(times, copy.target)[...] += 1
    wanted = array[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
    assert (times == 1).all()
    assert np.array_equal(made.reshape(wanted.shape), wanted)
