"""Headers that lie. Each is refused with one FormatError that names the file, the tensor and the numbers."""

import itertools
import random
import re
import struct
import time

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from tests.files.building import file_of, file_with, one_line_of, tensor
from tests.support.memory_storage import MemoryReader
from tests.support.speed import slowness

from shardwise.core.errors import FormatError, StorageError
from shardwise.core.tensors import numel
from shardwise.files.safetensors_files import MAX_HEADER_BYTES, FileHeader, read_header

ONE = b'"data_offsets":[0,1]'


def refusal(content: bytes) -> str:
    return one_line_of(content, "some.safetensors", read_header)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        # How tensors lie in the data
        (
            {"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 8, 12)},
            bytes(12),
            "4 bytes from byte 133 on, between tensor a and tensor b, belong to no tensor",
        ),
        ({"a": tensor("U8", [4], 0, 4)}, bytes(9), "the last 5 bytes, from byte .* belong to no tensor"),
        ({"a": tensor("U8", [4], 0, 4)}, bytes(3), "tensor a reaches to byte 72, .* 71 bytes: 1 are missing"),
        ({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, bytes(6), "b .* inside tensor a"),
        ({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 0, 4)}, bytes(4), "b .* inside tensor a"),
        ({"a": tensor("U8", [4], 0, 4), "z": tensor("U8", [0], 2, 2)}, bytes(4), "z .* inside tensor a"),
        # data_offsets
        ({"a": tensor("U8", [4], 4, 0)}, bytes(4), r"tensor a has the data_offsets \[4, 0\]"),
        ({"a": tensor("U8", [4], -4, 0)}, bytes(4), r"data_offsets \[-4, 0\]"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"1", r"data_offsets \[0\]"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1.0]}}, b"1", r"data_offsets \[0, 1.0\]"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, b"1", "data_offsets .False"),
        ({"a": tensor("U8", [1], 2**64, 2**64 + 1)}, b"1", "data_offsets .18446744073709551616"),
        # Sizes
        ({"a": tensor("F32", [3], 0, 8)}, bytes(8), r"tensor a of F32 \[3\] takes 12 bytes, .* span 8"),
        ({"a": tensor("F32", [0], 0, 4)}, bytes(4), "takes 0 bytes"),
        ({"a": tensor("F4", [3], 0, 2)}, bytes(2), r"tensor a of F4 \[3\] does not end at a byte"),
        # Shapes
        ({"a": tensor("U8", [-1], 0, 1)}, b"1", r"tensor a has the shape \[-1\]"),
        ({"a": tensor("U8", [True], 0, 1)}, b"1", r"shape \[True\]"),
        ({"a": {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}}, b"1", r"shape \[1.0\]"),
        ({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, b"1", "shape 1"),
        ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"1", "shape None"),
        ({"a": tensor("U8", [2**63], 0, 1)}, b"1", r"shape \[9223372036854775808\]"),
        ({"a": tensor("U8", [2**62, 2**62], 0, 1)}, b"1", r"tensor a .* more than 2\*\*64 bits"),
        # dtypes
        ({"a": tensor("F31", [1], 0, 1)}, b"1", "tensor a has the unknown dtype 'F31'. Known are BOOL"),
        ({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"1", "unknown dtype None"),
        # Tensors that are none
        ({"a": ["U8", [1], [0, 1]]}, b"1", "tensor a is described by a list, not an object"),
        ({"a": None}, b"", "described by a NoneType"),
        # Metadata
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ has a int under a, not a string"),
        ({"__metadata__": [["a", "b"]]}, b"", "__metadata__ is a list"),
        # JSON
        (b"", b"", "not valid JSON"),
        (b"[]", b"", "a JSON list, not an object"),
        (b'{"a":', b"", "not valid JSON"),
        (b"{}\0\0", b"", "not valid JSON"),
        (b"\xef\xbb\xbf{}", b"", "not valid JSON"),
        (b'{"a\nb":{}}', b"", "not valid JSON"),
        (b'{"\xff":{}}', b"", "can't decode byte 0xff in position 2"),
        (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1", r"\\ud800.*surrogate"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"1", "NaN is not JSON"),
        (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a":' * 100_000, b"", "not valid JSON"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,1]}}', b"1", "JSON"),
        (b'{"a":{"dtype":"U8",%b},"a":{"dtype":"U8",%b}}' % (ONE, ONE), b"1", "the key a occurs twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],%b}}' % ONE, b"1", "dtype occurs twice"),
        (b'{"__metadata__":{"a":"1","a":"2"}}', b"", "the key a occurs twice"),
    ],
)  # fmt: skip
def test_a_header_that_lies(header: object, data: bytes, words: str) -> None:
    content = file_of(header, data)
    message = refusal(content)
    assert re.search(words, message), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"abc", "has 3 bytes"),
        (bytes(7), "has 7 bytes"),
        (bytes(8), "not valid JSON"),
        (struct.pack("<Q", 3) + b"{}", "3 bytes is announced, but the file ends after 10 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", f"{2**63} bytes is announced, {MAX_HEADER_BYTES} is the limit"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "is the limit"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "is the limit"),
        (struct.pack("<Q", MAX_HEADER_BYTES) + b"{}", "but the file ends after 10 bytes"),
        (b"PK\x03\x04" + bytes(100), "announced"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Run `git lfs pull`"),
    ],
)
def test_a_file_that_is_none(content: bytes, words: str) -> None:
    assert words in refusal(content)


def test_a_truncated_file_at_every_length() -> None:
    content = file_with("a", "b", "c")
    for nbytes in range(len(content)):
        refusal(content[:nbytes])


def test_the_safetensors_library_refuses_the_same() -> None:
    """Of the rules above, those about how tensors tile the data are the library's."""
    for header, nbytes in [
        ({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 8, 12)}, 12),
        ({"a": tensor("U8", [4], 4, 8)}, 8),
        ({"a": tensor("U8", [4], 0, 4)}, 9),
        ({}, 3),
        ({"a": tensor("U8", [4], 0, 4), "b": tensor("U8", [4], 2, 6)}, 6),
        ({"a": tensor("U8", [4], 0, 4), "z": tensor("U8", [0], 2, 2)}, 4),
        ({"a": tensor("U8", [4], 0, 4), "z": tensor("U8", [0], 9, 9)}, 4),
        ({"a": tensor("F4", [3], 0, 2)}, 2),
    ]:
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(file_of(header, bytes(nbytes)))


def test_escape_sequences_do_not_reach_the_terminal() -> None:
    message = refusal(file_of({"\x1b[2J\x07": tensor("U8", [2], 0, 1)}, b"1"))
    assert "\\x1b[2J\\x07" in message
    assert message.isprintable()


def test_names_of_megabytes_are_cut_in_messages() -> None:
    assert "(1000000 characters)" in refusal(file_of({"a" * 1_000_000: tensor("U8", [2], 0, 1)}, b"1"))


def test_a_shape_of_a_million_large_sizes_takes_no_time() -> None:
    start = time.process_time()
    assert "2**64 bits" in refusal(file_of({"a": tensor("U8", [2**62] * 1_000_000, 0, 1)}, b"1"))
    assert time.process_time() - start < 5 * slowness()


def test_a_header_that_cannot_be_read_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="f in .*no such file"):
        read_header(MemoryReader({}), "f")


# Fuzz


def check_consistent(header: FileHeader) -> None:
    """Every entry in the file, of the size its dtype and shape say, and no byte in two."""
    covered = header.data_start
    for entry in header.entries:
        assert entry.start == covered
        assert entry.nbytes * 8 == numel(entry.shape) * entry.dtype.bits
        covered = entry.stop
    assert covered == header.file_nbytes


def attempt(content: bytes) -> bool:
    """Whether the content is read as a safetensors file; if so, that it is consistent."""
    try:
        header = read_header(MemoryReader({"f": content}), "f")
    except FormatError:
        return False
    check_consistent(header)
    return True


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["U8", "F32", "F4", "dtype", "shape", ""]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)
descriptions = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "F4"]) | json_values,
        "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 12), min_size=2, max_size=2).map(sorted) | json_values,
    }
)


@given(
    header=st.dictionaries(st.sampled_from(["a", "b", "c", "__metadata__"]), descriptions | json_values),
    data=st.binary(max_size=12),
)
def test_arbitrary_headers_are_refused_or_consistent(header: dict[str, object], data: bytes) -> None:
    attempt(file_of(header, data))


@given(content=st.binary(max_size=64))
def test_arbitrary_bytes_are_refused_or_consistent(content: bytes) -> None:
    attempt(content)
    attempt(struct.pack("<Q", len(content)) + content)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """Byte ranges that often, but not always, tile a few bytes."""
    cuts = sorted(draw(st.lists(st.integers(0, 12), min_size=2, max_size=5)))
    ranges = list(itertools.pairwise(cuts))
    if draw(st.booleans()):
        where = draw(st.integers(0, len(ranges) - 1))
        start, stop = ranges[where]
        ranges[where] = (max(0, start + draw(st.integers(-1, 1))), stop)
    header = {
        f"t{number}": tensor("U8", [max(stop - start, 0)], start, stop)
        for number, (start, stop) in enumerate(ranges)
    }
    return header, draw(st.sampled_from([cuts[-1], cuts[-1], cuts[-1] + 1]))


@given(tiling=tilings(), seed=st.integers(0, 99))
def test_tilings_are_accepted_exactly_when_safetensors_accepts_them(
    tiling: tuple[dict[str, object], int], seed: int
) -> None:
    header, nbytes = tiling
    names = list(header)
    random.Random(seed).shuffle(names)
    content = file_of({name: header[name] for name in names}, bytes(nbytes))
    try:
        safetensors.deserialize(content)
        theirs = True
    except safetensors.SafetensorError:
        theirs = False
    assert attempt(content) == theirs
