"""Random expressions over small arrays, and boxes of them against direct evaluation by numpy."""

import random

import numpy as np
from tests.files.scaled import scaled, scales_of

from shardwise.core.computed import compute_tasks, copies, copies_and_computed
from shardwise.core.expression import Expression, Stored, concat, permute, reshape, slice_dim, stack
from shardwise.core.tensors import Box, DType, Strided, numel

Array = np.ndarray
_MAX_NUMEL = 20_000


class Grower:
    """Grows one expression step by step, together with the array that it must evaluate to."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.leaves: dict[str, Array] = {}

    def leaf(self, shape: tuple[int, ...]) -> tuple[Expression, Array]:
        key = f"t{len(self.leaves)}"
        self.leaves[key] = np.arange(numel(shape)).reshape(shape) + 1_000_000 * len(self.leaves)
        return Stored(key, shape, DType.F32), self.leaves[key]

    def grow(self, steps: int, *, computing: bool = False) -> tuple[Expression, Array]:
        rank = self.rng.randint(0, 4)
        node, array = self.leaf(tuple(self.rng.choice([1, 2, 3, 4, 5, 6, 8]) for _ in range(rank)))
        for _ in range(steps):
            operation = self.rng.choice(
                [self.slice, self.permute, self.reshape, self.concat, self.stack, self.rotate]
                + 3 * [self.scale] * computing
            )
            node, array = operation(node, array)
        return node, array

    def slice(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        if not array.ndim:
            return node, array
        dim = self.rng.randrange(array.ndim)
        start = self.rng.randrange(array.shape[dim])
        step = self.rng.choice([1, 1, 2, 3])
        size = self.rng.randint(1, (array.shape[dim] - 1 - start) // step + 1)
        taken = np.take(array, range(start, start + step * size, step), dim)
        return slice_dim(node, dim, start, size, step), taken

    def permute(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        dims = self.rng.sample(range(array.ndim), array.ndim)
        return permute(node, dims), array.transpose(dims)

    def reshape(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        left, shape = array.size, []
        while left > 1 and len(shape) < 4:
            shape.append(self.rng.choice([size for size in range(1, left + 1) if left % size == 0]))
            left //= shape[-1]
        shape += [left] if left > 1 else []
        self.rng.shuffle(shape)
        return reshape(node, shape), array.reshape(shape)

    def concat(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        if not array.ndim:
            return node, array
        dim = self.rng.randrange(array.ndim)
        parts = [(node, array)]
        for _ in range(self.rng.randint(1, 2)):
            parts.append(self.leaf((*array.shape[:dim], self.rng.choice([1, 2, 3, 5]), *array.shape[dim + 1 :])))
        self.rng.shuffle(parts)
        return concat([part for part, _ in parts], dim), np.concatenate([part for _, part in parts], dim)

    def stack(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        dim = self.rng.randint(0, array.ndim)
        parts = [(node, array), *(self.leaf(array.shape) for _ in range(self.rng.randint(0, 2)))]
        self.rng.shuffle(parts)
        return stack([part for part, _ in parts], dim), np.stack([part for _, part in parts], dim)

    def scale(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        """Times a number for every two by two elements."""
        if array.ndim != 2 or not array.size:
            return node, array
        key, shape = f"s{len(self.leaves)}", scales_of(array.shape)
        self.leaves[key] = scales = np.array([self.rng.choice([1, 2, 3]) for _ in range(numel(shape))]).reshape(
            shape
        )
        wide = scales.repeat(2, 0).repeat(2, 1)[: array.shape[0], : array.shape[1]]
        return scaled(node, Stored(key, shape, DType.F32)), array * wide

    def rotate(self, node: Expression, array: Array) -> tuple[Expression, Array]:
        """A concatenation of two slices of the same node."""
        if not array.ndim or array.shape[-1] < 2:
            return node, array
        dim, size = array.ndim - 1, array.shape[-1]
        cut = self.rng.randint(1, size - 1)
        return (
            concat([slice_dim(node, dim, cut, size - cut), slice_dim(node, dim, 0, cut)], dim),
            np.roll(array, -cut, dim),
        )


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    """Sometimes everything, sometimes nothing, mostly something."""
    if rng.random() < 0.3:
        return Box.whole(shape)
    edges = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in shape]
    return Box(tuple(low for low, _ in edges), tuple(high - low for low, high in edges))


def view(array: Array, strided: Strided) -> Array:
    """The strided view of a flat array."""
    flat = array.reshape(-1)[strided.offset :]
    return np.lib.stride_tricks.as_strided(flat, strided.sizes, [array.itemsize * step for step in strided.strides])


def sampled(
    seed: int, depth: int, *, computing: bool = False
) -> tuple[random.Random, Grower, Expression, Box, Array] | None:
    """A random expression, a box of it and what the box has; None if it is large."""
    rng = random.Random(seed)
    grower = Grower(rng)
    node, array = grower.grow(rng.randint(1, depth), computing=computing)
    assert node.shape == array.shape, seed
    if array.size > _MAX_NUMEL:
        return None
    box = random_box(rng, array.shape)
    at = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
    return rng, grower, node, box, array[at]


def check_expression(seed: int) -> None:
    """One random expression and box: every element is written once, with the value of direct evaluation."""
    if (sample := sampled(seed, 7)) is None:
        return
    rng, grower, node, box, wanted = sample
    found = np.full(wanted.size, -1)
    written = np.zeros(wanted.size, dtype=int)
    max_span = rng.choice([1, 7, 64, 10**9])
    for copy in copies(node, box):
        assert 1 not in copy.source.sizes, seed
        for block in copy.blocks(max_span):
            assert block.source.stop - block.source.offset <= max_span or block.numel == 1, seed
            source = np.ascontiguousarray(grower.leaves[copy.leaf.key])
            view(found, block.target)[...] = view(source, block.source)
            view(written, block.target)[...] += 1
    assert (written == 1).all(), seed
    assert (found.reshape(wanted.shape) == wanted).all(), seed


def evaluated(
    leaves: dict[str, Array], node: Expression, box: Box, max_block_bytes: int, written: Array | None = None
) -> Array:
    """A box of an expression that may compute, by copies and blocks; ``written`` counts what is put where."""
    found = np.full(box.numel, -1)
    copied, computed = copies_and_computed(node, box)
    for copy in copied:
        view(found, copy.target)[...] = view(np.ascontiguousarray(leaves[copy.leaf.key]), copy.source)
        if written is not None:
            view(written, copy.target)[...] += 1
    for item in compute_tasks(((0, leaf, region) for leaf, region in computed), max_block_bytes):
        needs = zip(item.inputs, item.block.inputs, strict=True)
        values = [evaluated(leaves, source, need, max_block_bytes).reshape(need.sizes) for source, need in needs]
        outputs = item.operation.evaluate(item.block, values)
        for move in item.moves:
            view(found, move.place)[...] = view(np.ascontiguousarray(outputs[move.output]), move.source)
            if written is not None:
                view(written, move.place)[...] += 1
    return found


def check_computed(seed: int) -> None:
    """As :func:`check_expression`, with nodes that compute among the others."""
    if (sample := sampled(seed, 9, computing=True)) is None:
        return
    rng, grower, node, box, wanted = sample
    written = np.zeros(wanted.size, dtype=int)
    found = evaluated(grower.leaves, node, box, rng.choice([1, 50, 300, 10**9]), written)
    assert (written == 1).all(), seed
    assert (found.reshape(wanted.shape) == wanted).all(), seed
