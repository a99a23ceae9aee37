"""The headers of sound files: what safetensors writes is read back, in few reads and in no time."""

import math

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from tests.files.building import file_of, file_with, tensor
from tests.support.memory_storage import MemoryReader

from shardwise.core.tensors import DType, numel
from shardwise.files import safetensors_files as header_module
from shardwise.files.safetensors_files import read_header

NUMPY = {f"{kind.upper()}{8 * size}": f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}
NUMPY |= {"BOOL": "?", "F16": "f2", "F32": "f4", "F64": "f8"}

arrays = st.builds(
    lambda label, shape, seed: (
        label,
        np.frombuffer(
            np.random.default_rng(seed)
            .integers(0, 2, math.prod(shape) * np.dtype(NUMPY[label]).itemsize, dtype="u1")
            .tobytes(),
            NUMPY[label],
        ).reshape(shape),
    ),
    st.sampled_from(sorted(NUMPY)),
    st.lists(st.integers(0, 4), max_size=4),
    st.integers(0, 999),
)


@given(
    tensors=st.dictionaries(st.text(min_size=1, max_size=12), arrays, max_size=8),
    metadata=st.none() | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
def test_tensors_written_by_safetensors_are_found_at_their_offsets(
    tensors: dict[str, tuple[str, np.ndarray]], metadata: dict[str, str] | None
) -> None:
    tensors.pop("__metadata__", None)
    # Not empty metadata: for that and no tensors, safetensors 0.8 writes `{},"__metadata__":{}}`.
    content = safetensors.numpy.save({key: array for key, (_, array) in tensors.items()}, metadata or None)
    with MemoryReader({"f": content}) as reader:
        header = read_header(reader, "f")
        assert header.metadata == (metadata or {})
        assert {entry.key for entry in header.entries} == set(tensors)
        for entry in header.entries:
            label, array = tensors[entry.key]
            assert (entry.dtype.label, entry.shape) == (label, array.shape)
            assert (numel(entry.shape), entry.nbytes) == (array.size, array.nbytes)
            assert reader.read("f", entry.range.start, entry.range.stop) == array.tobytes()


@pytest.mark.parametrize(
    ("header", "data_nbytes"),
    [
        pytest.param({}, 0, id="no tensors"),
        pytest.param({"__metadata__": None}, 0, id="metadata null"),
        pytest.param({"__metadata__": {"a": "b"}}, 0, id="metadata only"),
        pytest.param({"a": tensor("F32", [0, 3], 0, 0)}, 0, id="zero-size tensor"),
        pytest.param(
            {
                "z2": tensor("F32", [0], 4, 4),
                "a": tensor("U8", [4], 0, 4),
                "z1": tensor("F64", [2, 0], 0, 0),
                "b": tensor("U8", [1], 4, 5),
            },
            5,
            id="zero-size tensors at every border",
        ),
        pytest.param({"a": tensor("F32", [], 0, 4)}, 4, id="scalar"),
        pytest.param({"a": tensor("F4", [3, 2], 0, 3)}, 3, id="half a byte per element"),
        pytest.param({"a": tensor("F6_E2M3", [4], 0, 3)}, 3, id="six bits per element"),
        pytest.param({"a": {**tensor("U8", [1], 0, 1), "note": [1.5]}}, 1, id="field of a newer version"),
        pytest.param({"": tensor("U8", [1], 0, 1)}, 1, id="empty key"),
        pytest.param(b'  {"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}} \n\n', 1, id="padding"),
        pytest.param({"schön/🙂": tensor("U8", [1], 0, 1)}, 1, id="not ASCII"),
    ],
)
def test_unusual_and_legal(header: object, data_nbytes: int) -> None:
    content = file_of(header, bytes(data_nbytes))
    theirs = {key: (info["dtype"], info["shape"]) for key, info in safetensors.deserialize(content)}
    ours = {entry.key: entry for entry in read_header(MemoryReader({"f": content}), "f").entries}
    assert {key: (entry.dtype.label, list(entry.shape)) for key, entry in ours.items()} == theirs
    assert sum(entry.nbytes for entry in ours.values()) == data_nbytes


@pytest.mark.parametrize("label", [dtype.label for dtype in DType if dtype is not DType.OTHER])
def test_every_dtype_is_one_that_safetensors_has(label: str) -> None:
    nbytes = DType[label].bits  # of eight elements
    content = file_of({"a": tensor(label, [8], 0, nbytes)}, bytes(nbytes))
    ((_, theirs),) = safetensors.deserialize(content)
    (ours,) = read_header(MemoryReader({"f": content}), "f").entries
    assert theirs["dtype"] == ours.dtype.label == label
    assert ours.nbytes == nbytes


def test_a_short_header_takes_one_read_and_a_long_one_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "_FIRST_READ_BYTES", 512)
    short = file_with("a")
    long = file_with(*[f"tensor.number.{number}" for number in range(100)])
    reader = MemoryReader({"short": short, "long": long})
    assert len(read_header(reader, "short").entries) == 1
    assert (reader.reads, reader.bytes_read) == (1, len(short))
    header = read_header(reader, "long")
    assert len(header.entries) == 100
    assert (reader.reads, reader.bytes_read) == (3, len(short) + header.data_start)


@pytest.mark.parametrize("first_read", [8, 9, 40, 77, 78, 79, 80])
def test_the_border_of_the_first_read_does_not_matter(monkeypatch: pytest.MonkeyPatch, first_read: int) -> None:
    content = file_with("abc")
    expected = read_header(MemoryReader({"f": content}), "f")
    monkeypatch.setattr(header_module, "_FIRST_READ_BYTES", first_read)
    assert read_header(MemoryReader({"f": content}), "f") == expected
