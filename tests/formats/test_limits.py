"""The last value that a rule takes, and the first that it does not; and what is done once, or at once."""

import collections
import json
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.formats.building import file_of
from tests.formats.test_distributed import GRID, Written, cut
from tests.formats.torch_building import Called, saved, storage, tensor, torch_file
from tests.harness.memory_storage import MemoryReader

from shardwise.errors import FormatError
from shardwise.formats.contract import Joined, View, Whole, each
from shardwise.formats.distributed import holds_optimizer, open_state
from shardwise.formats.joining import MAX_DIMS, beside
from shardwise.formats.opening import open_checkpoint
from shardwise.formats.pickles import TORCH_FILE, read_pickle
from shardwise.formats.safetensors_files import read_header
from shardwise.formats.torch_files import read_torch_file
from shardwise.storage.contract import ReadPolicy

LARGEST = 2**63 - 1


def opened(files: dict[str, bytes]) -> MemoryReader:
    return MemoryReader(files)


def refusal_of_torch(value: object) -> str:
    with pytest.raises(FormatError) as caught:
        read_torch_file(opened({"some.bin": torch_file(value)}), "some.bin")
    return str(caught.value)


# Numbers


def test_sizes_of_safetensors_end_below_two_to_the_63() -> None:
    def shape_of(*sizes: int) -> tuple[int, ...]:
        field = {"dtype": "F32", "shape": list(sizes), "data_offsets": [0, 0]}
        return read_header(opened({"f": file_of({"a": field}, b"")}), "f").entries[0].shape

    assert shape_of(0, LARGEST) == (0, LARGEST)
    with pytest.raises(FormatError, match="not a list of integers"):
        shape_of(0, LARGEST + 1)


def test_sizes_of_torch_end_below_two_to_the_63() -> None:
    content = torch_file({"a": tensor((0, LARGEST), (1, LARGEST), offset=LARGEST)})
    (found,) = read_torch_file(opened({"some.bin": content}), "some.bin").tensors
    assert found.shape == (0, LARGEST)
    for faulty in (tensor((0, LARGEST + 1)), tensor((0, 1), (1, LARGEST + 1))):
        assert "has numbers that are not 0.." in refusal_of_torch({"a": faulty})
    assert "a tensor has no offset" in refusal_of_torch({"a": tensor((0, 1), offset=LARGEST + 1)})


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
def test_what_pickle_writes_is_read(value: object, protocol: int) -> None:
    assert repr(read_pickle(pickle.dumps(value, protocol), TORCH_FILE, what="here")) == repr(value)


def test_a_call_among_items_of_a_tuple() -> None:
    value = (1, collections.OrderedDict(), 2, [collections.OrderedDict()], 3)
    for protocol in range(2, 6):
        assert read_pickle(pickle.dumps(value, protocol), TORCH_FILE, what="here") == (1, {}, 2, [{}], 3)
    assert read_pickle(b"\x80\x02(t.", TORCH_FILE, what="here") == ()


def third(*arguments: object) -> Called:
    return Called(torch._utils._rebuild_tensor_v3, storage(), 0, (2, 2), (2, 1), False, *arguments)


def test_a_tensor_that_tells_its_dtype() -> None:
    for more in ((), ({},), (None,)):
        content = torch_file({"a": third({}, torch.float32, *more)})
        (found,) = read_torch_file(opened({"some.bin": content}), "some.bin").tensors
        assert (found.shape, found.dtype.label) == ((2, 2), "F32")
    assert "conjugated or negated" in refusal_of_torch({"a": third({}, torch.float32, {"conj": True})})
    for arguments in (({},), ({}, torch.float32, {}, {})):
        assert "it takes 7 arguments" in refusal_of_torch({"a": third(*arguments)})


# At once, or one after the other


def memory(*, is_remote: bool) -> MemoryReader:
    return MemoryReader({}, policy=ReadPolicy(0, 1 << 20, 3, is_remote=is_remote, bytes_per_s=1e9))


def test_where_a_read_is_a_wait_many_are_at_once() -> None:
    meeting = threading.Barrier(3)  # broken where fewer than three are there together

    def meet(item: int) -> int:
        meeting.wait(20)
        return item * item

    assert each(memory(is_remote=True), meet, range(6)) == [0, 1, 4, 9, 16, 25]
    here = threading.get_ident()
    assert each(memory(is_remote=False), lambda _: threading.get_ident(), range(4)) == [here] * 4


# Archives


# Folders of torch.distributed.checkpoint


def messages_of(*names: str) -> str:
    with pytest.raises(FormatError) as caught:
        open_checkpoint(opened(dict.fromkeys(names, b"")))
    return str(caught.value)


def test_chunks_one_level_down_without_metadata() -> None:
    message = messages_of("model/__0_0.distcp")
    assert "no weights found, but folders of torch.distributed.checkpoint" in message
    assert "the folders with .distcp files lack their .metadata" in message
    assert "lack their" not in messages_of("a/model/__0_0.distcp")


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


def test_all_tensors_of_a_file_or_of_a_folder() -> None:
    values = {
        "model": {"a": torch.ones(2), "t": torch.arange(6.0).reshape(2, 3).t()},
        "optimizer": {"b": torch.ones(3)},
    }
    index = open_state(opened({"some.bin": saved(values)}), "some.bin")
    assert set(index.entries) == {"model.a", "model.t (storage)", "optimizer.b"}
    assert (index.layout, set(index.files), set(index.composed)) == ("torch file", {"some.bin"}, {"model.t"})
    folder = Written({"model.a": ((2,), {(0,): torch.ones(2)}), "optimizer.b": ((2,), {(0,): torch.ones(2)})})
    folder.metadata.planner_data = {"model.a": ("model", "a"), "optimizer.b": ("optimizer", "b")}
    index = open_state(folder.reader())
    assert set(index.entries) == {"model.a", "optimizer.b"}
    assert (index.layout, set(index.files)) == ("torch distributed checkpoint", {"__0_0.distcp"})


def test_whether_a_folder_has_an_optimizers_state_only() -> None:
    def folder_of(*paths: tuple[str, ...]) -> MemoryReader:
        folder = Written({".".join(path): ((2,), {(0,): torch.ones(2)}) for path in paths})
        folder.metadata.planner_data = {".".join(path): path for path in paths}
        return folder.reader()

    assert holds_optimizer(folder_of(("state", "a", "exp_avg")))
    assert not holds_optimizer(folder_of(("model", "a")))
    assert not holds_optimizer(folder_of(("model", "a"), ("optimizer", "state", "a")))
    assert not holds_optimizer(folder_of())
    assert not holds_optimizer(opened({"model.safetensors": b""}))


def test_one_checkpoint_beside_another() -> None:
    first = open_checkpoint(
        opened({"model.safetensors": file_of({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"ab")})
    )
    chunks = Written({"g": cut(GRID, [3, 3], [8]), "t": ((3, 2), {(0, 0): torch.arange(6.0).reshape(2, 3).t()})})
    both = beside(first, open_checkpoint(chunks.reader()), "more")
    assert set(both.files) == {"model.safetensors", "more/__0_0.distcp"}
    assert {entry.key: entry.file for entry in both.entries.values()} == {
        "a": "model.safetensors",
        "more/g[0:3, 0:8]": "more/__0_0.distcp",
        "more/g[3:6, 0:8]": "more/__0_0.distcp",
        "more/t (storage)": "more/__0_0.distcp",
    }
    assert both.entries.keys() == {entry.key for entry in both.entries.values()}
    assert both.composed["more/g"].part == Joined((Whole("more/g[0:3, 0:8]"), Whole("more/g[3:6, 0:8]")), 0)
    part = both.composed["more/t"].part
    assert isinstance(part, View)
    assert part.key == "more/t (storage)"


def test_parts_of_two_saves_are_named_in_their_order() -> None:
    def chunk(dtype: str, rows: int, at: int) -> bytes:
        nbytes = rows * (4 if dtype == "F32" else 2)
        told = json.dumps({"g": {"saved_offsets": [at]}})
        header = {
            "__metadata__": {"DCP_SHARDING_INFO": told},
            "g": {"dtype": dtype, "shape": [rows], "data_offsets": [0, nbytes]},
        }
        return file_of(header, bytes(nbytes))

    files = {"shard-1.safetensors": chunk("F32", 2, 0), "shard-2.safetensors": chunk("F16", 3, 2)}
    with pytest.raises(FormatError, match=r"g: F32 \(2,\) in shard-1.safetensors, and F16 \(3,\) in shard-2"):
        open_checkpoint(opened(files))
