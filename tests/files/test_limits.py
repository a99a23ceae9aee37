"""The last value that a rule takes, and the first that it does not; and what is done once, or at once."""

import pickle
import threading

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.files.building import refusal_of
from tests.files.test_distributed import Written
from tests.files.torch_building import Called, storage, torch_file
from tests.support.local_ranks import LIMIT_S
from tests.support.memory_storage import MemoryReader

from shardwise.files.checkpoint_index import each
from shardwise.files.join_entries import MAX_DIMS
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.pickles import read_pickle
from shardwise.files.storage import ReadPolicy
from shardwise.files.torch_files import read_torch_file


def opened(files: dict[str, bytes]) -> MemoryReader:
    return MemoryReader(files)


def refusal_of_torch(value: object) -> str:
    return refusal_of(opened({"some.bin": torch_file(value)}), "some.bin", read=read_torch_file)


# Numbers


def test_as_many_dimensions_as_torch_has() -> None:
    ones = torch.ones((1,) * MAX_DIMS)
    folder = Written({"a": (tuple(ones.shape), {(0,) * MAX_DIMS: ones})})
    assert open_checkpoint(folder.reader()).entries["a"].shape == (1,) * MAX_DIMS


# Pickles


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(-9, 300), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(trees, st.integers(2, 5))
def test_values_written_by_pickle_are_read(value: object, protocol: int) -> None:
    assert repr(read_pickle(pickle.dumps(value, protocol), what="here")) == repr(value)


def third(*arguments: object) -> Called:
    return Called(torch._utils._rebuild_tensor_v3, storage(), 0, (2, 2), (2, 1), False, *arguments)


def test_a_tensor_with_a_dtype() -> None:
    for more in ((), ({},), (None,)):
        content = torch_file({"a": third({}, torch.float32, *more)})
        (found,) = read_torch_file(opened({"some.bin": content}), "some.bin").tensors
        assert (found.shape, found.dtype.label) == ((2, 2), "F32")
    assert "conjugated or negated" in refusal_of_torch({"a": third({}, torch.float32, {"conj": True})})
    for arguments in (({},), ({}, torch.float32, {}, {})):
        assert "it cannot be decoded" in refusal_of_torch({"a": third(*arguments)})


# At once, or one after the other


def memory(*, is_remote: bool) -> MemoryReader:
    return MemoryReader({}, policy=ReadPolicy(0, 1 << 20, 3, is_remote=is_remote))


def test_where_a_read_is_a_wait_many_are_at_once() -> None:
    meeting = threading.Barrier(3)  # broken where fewer than three are there together

    def meet(item: int) -> int:
        meeting.wait(LIMIT_S)
        return item * item

    assert each(memory(is_remote=True), meet, range(6)) == [0, 1, 4, 9, 16, 25]
    here = threading.get_ident()
    assert each(memory(is_remote=False), lambda _: threading.get_ident(), range(4)) == [here] * 4


# Archives


# Folders of torch.distributed.checkpoint


def messages_of(*names: str) -> str:
    return refusal_of(opened(dict.fromkeys(names, b"")))


def test_chunks_one_level_down_without_metadata() -> None:
    assert "model: there are .distcp files, but no .metadata" in messages_of("model/__0_0.distcp")
    assert "no weights found" in messages_of("a/model/__0_0.distcp")


def test_files_of_ranks_are_not_called_files_of_models() -> None:
    message = messages_of("pytorch_model_fsdp_rank0.bin", "other.bin", "notes.txt")
    assert "other.bin: if one of them holds the model" in message
    assert "notes.txt: if" not in message
    assert "rank0.bin, other.bin: if" not in message


def test_an_empty_tensor_lies_where_its_first_chunk_does() -> None:
    folder = Written({"a": ((0, 6), {(0, 0): torch.ones(0, 3), (0, 3): torch.ones(0, 3)})})
    entry = open_checkpoint(folder.reader()).entries["a"]
    first, second = folder.metadata.storage_data.values()
    assert (entry.shape, entry.nbytes, entry.file) == ((0, 6), 0, "__0_0.distcp")
    assert first.offset < entry.start < second.offset


# A state of its own, and one checkpoint beside another
