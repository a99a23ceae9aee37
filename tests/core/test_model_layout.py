"""Model layouts: sums, names and rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.layout import LocalBox, last_rows, locate_box
from shardwise.core.tensors import Box, Strided


@given(
    st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(0, 2), st.integers(1, 3)),
    st.tuples(st.integers(0, 7), st.integers(1, 3)),
    st.integers(-1, 6),
)
def test_last_rows(spans: tuple[int, ...], place: tuple[int, int], cut: int) -> None:
    """The elements of the part, looked up in a rank's memory, are those of the box from this row on."""
    first, rows, column, columns = spans
    cut = max(0, first + cut)
    offset, stride = place
    local = Strided(offset, (rows, columns), (columns * stride, stride))
    item = LocalBox(Box((first, column), (rows, columns)), local)
    below = last_rows([item], cut)
    assert all(part.box.offsets[0] >= cut for part in below)
    assert all(part.box.sizes[0] > 0 for part in below)
    memory = np.arange(1000)

    def seen(part: LocalBox) -> list[tuple[int, int, int]]:
        found = []
        for row in range(part.box.sizes[0]):
            for index in range(part.box.sizes[1]):
                at = part.local.offset + row * part.local.strides[0] + index * part.local.strides[1]
                found.append((part.box.offsets[0] + row, part.box.offsets[1] + index, int(memory[at])))
        return found

    wanted = [element for element in seen(item) if element[0] >= cut]
    assert [element for part in below for element in seen(part)] == wanted
    assert all(part.local.sizes == part.box.sizes for part in below)


@given(st.data())
def test_where_a_box_within_one_that_is_held_lies(data: st.DataObject) -> None:
    held: list[LocalBox] = []
    memory: dict[tuple[int, int], int] = {}
    for number in range(2):  # two boxes, one below the other, in memory with gaps
        sizes = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        column, offset = data.draw(st.integers(0, 3)), 200 * number + data.draw(st.integers(0, 9))
        strides = (10, data.draw(st.integers(1, 2)))
        held.append(LocalBox(Box((5 * number, column), sizes), Strided(offset, sizes, strides)))
        for row in range(sizes[0]):
            for index in range(sizes[1]):
                memory[5 * number + row, column + index] = offset + row * strides[0] + index * strides[1]
    around = data.draw(st.sampled_from(held)).box
    starts = [data.draw(st.integers(0, size - 1)) for size in around.sizes]
    sizes = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(around.sizes, starts, strict=True))
    box = Box(tuple(offset + start for offset, start in zip(around.offsets, starts, strict=True)), sizes)
    place = locate_box(box, held)
    assert place.sizes == sizes
    for row in range(sizes[0]):
        for index in range(sizes[1]):
            at = place.offset + row * place.strides[0] + index * place.strides[1]
            assert at == memory[box.offsets[0] + row, box.offsets[1] + index]
    with pytest.raises(ValueError, match="is not within"):
        locate_box(Box((0, 0), (10, 1)), held)
