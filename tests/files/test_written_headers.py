"""The header of a file that is to be written, against the safetensors library, byte by byte."""

import json

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.errors import FormatError
from shardwise.core.tensors import DType, numel
from shardwise.files import safetensors_files as safetensors_header
from shardwise.files.safetensors_files import _POSITION, lay_out, parse_header
from shardwise.fsdp.torch_private import from_torch, to_torch

WRITABLE = sorted(_POSITION, key=lambda dtype: dtype.label)
tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6).filter(
        lambda key: key != "__metadata__"
    ),
    st.tuples(st.sampled_from(WRITABLE), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    min_size=1,
    max_size=6,
)


@given(tensors, st.dictionaries(st.just("format"), st.text(max_size=5), max_size=1))
def test_the_same_file_as_the_library_writes(
    made: dict[str, tuple[DType, tuple[int, ...]]], metadata: dict[str, str]
):
    content = safetensors.torch.save(
        {key: torch.empty(shape, dtype=to_torch(dtype)) for key, (dtype, shape) in made.items()}, metadata or None
    )
    new = lay_out("f", ((key, *what) for key, what in made.items()), metadata)
    assert content[: len(new.header)] == new.header
    assert new.nbytes == len(content)
    header = parse_header("f", len(content), new.header[8:])
    found = {(entry.key, entry.start, entry.stop, entry.shape) for entry in header.entries}
    assert found == {(entry.key, entry.start, entry.stop, entry.shape) for entry in new.entries}
    assert all(entry.nbytes == numel(entry.shape) * entry.dtype.itemsize for entry in new.entries)
    assert all(entry.file == new.name == "f" for entry in new.entries)
    assert from_torch(torch.bfloat16, "x") is DType.BF16


def test_tensors_lie_by_dtype_the_widest_first_then_by_name() -> None:
    made = lay_out("f", [("b", DType.U8, (1,)), ("a", DType.U8, (1,)), ("z", DType.I64, (1,))], {})
    assert [entry.key for entry in made.entries] == ["z", "a", "b"]
    assert len(made.header) % 8 == 0
    assert json.loads(made.header[8:]) == {
        "z": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [8, 9]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]},
    }
    assert int.from_bytes(made.header[:8], "little") == len(made.header) - 8


def test_headers_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match="a: F4 elements cannot be saved"):
        lay_out("f", [("a", DType.F4, (2,))], {})
    with pytest.raises(FormatError, match="cannot be named __metadata__"):
        lay_out("f", [("__metadata__", DType.U8, (2,))], {})
    nbytes = len(lay_out("f", [("a", DType.U8, (2,))], {}).header) - 8
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", nbytes)
    lay_out("f", [("a", DType.U8, (2,))], {})
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", nbytes - 1)
    with pytest.raises(FormatError, match=f"a header of {nbytes} bytes would be needed, {nbytes - 1} is the limit"):
        lay_out("f", [("a", DType.U8, (2,))], {})
