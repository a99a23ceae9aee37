"""Folders of ``torch.distributed.checkpoint``: what they hold, which of them is meant, and those that lie."""

import io
import pickle
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.files.building import file_with, refusal_of
from tests.files.torch_building import Touch, same, saved, values_of
from tests.support.http_store import HttpStore
from tests.support.memory_storage import MemoryReader
from tests.support.speed import slowness
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.core.errors import FormatError
from shardwise.core.tensors import Box
from shardwise.files.checkpoint_index import Joined, View, Whole
from shardwise.files.join_entries import merge_indexes, tiling
from shardwise.files.local_reader import LocalReader
from shardwise.files.objects import RemoteReader
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.transfer.distributed_chunks import build_metadata, data_file, envelope, flat_key, plan_tensors


def save(value: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(value, checkpoint_id=folder, no_dist=True)
    return folder


Chunks = dict[tuple[int, ...], torch.Tensor]


class Written:
    """A folder by hand, of tensors in chunks; its metadata may be changed before they are pickled."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], Chunks]]) -> None:
        self.metadata = Metadata({}, {}, {}, StorageMeta(checkpoint_id=Path("/somewhere")), "1.0.0")
        self.stream = io.BytesIO()
        for key, (shape, chunks) in tensors.items():
            self.add(key, shape, chunks)

    def add(self, key: str, shape: tuple[int, ...], chunks: Chunks) -> None:
        first = next(iter(chunks.values()))
        described = [ChunkStorageMetadata(torch.Size(at), chunk.shape) for at, chunk in chunks.items()]
        self.metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=first.dtype), torch.Size(shape), described
        )
        for at, chunk in chunks.items():
            start = self.stream.tell()
            self.stream.write(saved(chunk))
            info = _StorageInfo("__0_0.distcp", start, self.stream.tell() - start)
            self.metadata.storage_data[MetadataIndex(key, at)] = info

    def files(self) -> dict[str, bytes]:
        return {".metadata": pickle.dumps(self.metadata), "__0_0.distcp": self.stream.getvalue()}

    def reader(self) -> MemoryReader:
        return MemoryReader(self.files())


def cut(value: torch.Tensor, *rows_and_columns: list[int]) -> tuple[tuple[int, ...], Chunks]:
    """A tensor in the chunks of a grid: the sizes along each dimension."""
    chunks: Chunks = {(): value}
    for dim, sizes in enumerate(rows_and_columns):
        chunks = {
            (*at, sum(sizes[:number])): part
            for at, whole in chunks.items()
            for number, part in enumerate(whole.split(sizes, dim))
        }
    return tuple(value.shape), {at: part.clone() for at, part in chunks.items()}


GRID = torch.arange(48.0).reshape(6, 8)


# Sound ones


def test_saves_of_torch_in_one_process(tmp_path: Path) -> None:
    values = {
        "a": torch.randn(3, 4),
        "t": torch.randn(3, 4).t(),
        "0-d": torch.tensor(2.5),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "b.c": torch.tensor([True, False]),
    }
    index = open_checkpoint(save({**values, "step": 3}, tmp_path / "saved"))
    with LocalReader(tmp_path / "saved") as reader:
        found = values_of(index, reader)
    assert {key: same(found[key], value) for key, value in values.items()} == dict.fromkeys(values, True)
    assert set(found) == set(values)
    assert (index.layout, index.wrapper, index.ignored) == ("torch distributed checkpoint", "", ("step (bytes)",))
    assert isinstance(index.composed["t"].composition, View)
    assert open_checkpoint(tmp_path / "saved" / ".metadata").entries == index.entries


@pytest.mark.parametrize(
    "grid", [[[6], [8]], [[2, 4], [8]], [[1, 2, 3], [5, 3]], [[6], [1] * 8], [[0, 6, 0], [8]], [[3, 3], [4, 4]]]
)
def test_chunks_are_put_together(grid: list[list[int]]) -> None:
    folder = Written({"model.grid": cut(GRID, *grid), "other": ((), {(): torch.tensor(7)})})
    index = open_checkpoint(folder.reader())
    found = values_of(index, folder.reader())
    assert same(found["model.grid"], GRID)
    assert same(found["other"], torch.tensor(7))
    assert [item.key for item in sorted(index.tensors(), key=lambda item: item.key)] == ["model.grid", "other"]
    assert index.nbytes == GRID.nbytes + 8


def test_chunks_of_chunks() -> None:
    """Ranks of one mesh dimension hold unequal parts, and cut them elsewhere."""
    chunks = {(0, 0): GRID[:2, :3], (0, 3): GRID[:2, 3:], (2, 0): GRID[2:, :5], (2, 5): GRID[2:, 5:]}
    folder = Written({"g": ((6, 8), {at: chunk.clone() for at, chunk in chunks.items()})})
    index = open_checkpoint(folder.reader())
    assert isinstance(index.composed["g"].composition, Joined)
    assert same(values_of(index, folder.reader())["g"], GRID)


def test_chunks_that_are_views() -> None:
    chunks = {(0, 0): GRID[:2].clone().t().contiguous().t(), (2, 0): GRID[2:].clone()}
    folder = Written({"g": ((6, 8), chunks)})
    index = open_checkpoint(folder.reader())
    assert same(values_of(index, folder.reader())["g"], GRID)
    assert [entry.key for entry in index.tensors()[0].entries] == ["g[0:2, 0:8] (storage)", "g[2:6, 0:8]"]


def test_a_chunk_that_replicas_list_twice_is_one() -> None:
    folder = Written({"g": cut(GRID, [3, 3], [8])})
    folder.metadata.state_dict_metadata["g"].chunks *= 2
    index = open_checkpoint(folder.reader())
    assert same(values_of(index, folder.reader())["g"], GRID)


@pytest.mark.parametrize("levels", [(), ("model",), ("app", "model"), ("state_dict",)])
def test_the_wrapper_is_identified_by_the_planner(tmp_path: Path, levels: tuple[str, ...]) -> None:
    content: dict[str, Any] = {"model.embed": torch.ones(2), "model.norm": torch.zeros(2)}
    for level in reversed(levels):
        content = {level: content, "epoch": 1}
    index = open_checkpoint(save(content, tmp_path / "x"))
    assert set(index.entries) == {"model.embed", "model.norm"}
    assert index.wrapper == ".".join(levels)


def test_prefixes_that_the_planner_does_not_tell_of_stay() -> None:
    folder = Written({"model.a": ((2,), {(0,): torch.ones(2)})})
    assert set(open_checkpoint(folder.reader()).entries) == {"model.a"}
    folder.metadata.planner_data = {"model.a": ("other", "a")}
    assert set(open_checkpoint(folder.reader()).entries) == {"model.a"}


def test_a_model_beside_its_optimizer_in_one_folder(tmp_path: Path) -> None:
    state = {"state": {"a": {"exp_avg": torch.zeros(2), "step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]}
    index = open_checkpoint(save({"model": {"a": torch.ones(2)}, "optimizer": state}, tmp_path / "x"))
    assert (set(index.entries), index.wrapper) == ({"a"}, "model")
    assert index.ignored == ("optimizer (an optimizer's state)",)
    flat = open_checkpoint(save({"a": torch.ones(2), "optimizer": state}, tmp_path / "y"))
    assert (set(flat.entries), flat.wrapper) == ({"a"}, "")


def test_metadata_of_older_torch() -> None:
    folder = Written({"g": cut(GRID, [3, 3], [8])})
    content = folder.files()
    old = b"torch.distributed._shard.sharded_tensor.metadata"
    name = b"torch.distributed.checkpoint.metadata"
    assert content[".metadata"].count(name) == 1
    # The module's name is written once, and then referred to: TensorProperties gets one of its own.
    before, after = content[".metadata"].split(b"\x8c\x10TensorProperties", 1)
    recall = before.rindex(b"h")
    changed = before[:recall] + b"\x8c" + bytes([len(old)]) + old + b"\x8c\x10TensorProperties" + after
    content[".metadata"] = changed
    index = open_checkpoint(MemoryReader(content))
    assert same(values_of(index, MemoryReader(content))["g"], GRID)


def test_a_folder_at_a_url() -> None:
    files = Written({"g": cut(GRID, [2, 4], [5, 3])}).files()
    with HttpStore({f"m/{name}": content for name, content in files.items()}) as store:
        for url in (f"{store.url}/m", f"{store.url}/m/.metadata"):
            index = open_checkpoint(url)
            with RemoteReader(index.root) as reader:
                assert same(values_of(index, reader)["g"], GRID)


def shards(ranks: int) -> dict[str, bytes]:
    """A folder as shardwise writes it: two tensors of equal shape, of which each rank has written a row."""
    full = {("model", name): torch.zeros(ranks, 4) for name in "ab"}
    rows = tuple((Box((rank, 0), (1, 4)),) for rank in range(ranks))
    plan = plan_tensors(full, {flat_key(path): rows for path in full}, 0, ranks)
    files = {".metadata": build_metadata(plan, [{} for _ in range(ranks)])}
    for rank, chunks in plan.by_rank.items():
        content = bytearray(plan.nbytes(rank))
        for number, chunk in enumerate(chunks):
            around = envelope(chunk.box.sizes, chunk.dtype)
            row = torch.full((4,), 10.0 * number + rank).numpy().tobytes()
            content[chunk.start : chunk.stop] = around.before + row + around.after
        files[data_file(rank)] = bytes(content)
    return files


def test_chunks_of_many_ranks_are_read_file_by_file(tmp_path: Path) -> None:
    for name, content in shards(5).items():
        (tmp_path / name).write_bytes(content)
    with LocalReader(tmp_path, max_open_files=2) as reader:
        found = values_of(open_checkpoint(reader), reader)
        read = reader.files_opened
        open_checkpoint(reader)
        # .metadata, then each file for its size, and for its chunks
        assert reader.files_opened - read <= 1 + 2 * 5
    rows = torch.arange(5.0)[:, None].expand(5, 4)
    assert same(found["a"], rows)
    assert same(found["b"], rows + 10)


def test_metadata_is_pickled_once_for_values_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {("model", name): torch.zeros(3, 4) for name in "ab"}
    rows = tuple((Box((rank, 0), (1, 4)),) for rank in range(3))
    plan, again, of_second_rank = (
        plan_tensors(full, {flat_key(path): rows for path in full}, rank, 3) for rank in (0, 0, 1)
    )
    # Another rank plans its own file alone, as the first rank does.
    assert of_second_rank.by_rank == {1: plan.by_rank[1]}
    pickled: list[object] = []
    dumps = pickle.dumps
    monkeypatch.setattr(pickle, "dumps", lambda value: pickled.append(value) or dumps(value))
    values = [{("rng", "rank_0"): 1, ("data",): 2**40}, {}, {("rng", "rank_2"): 3}]
    build_metadata(plan, [dict.fromkeys(sizes, 100) for sizes in values])
    content = build_metadata(plan, values)
    assert len(pickled) == 1
    assert content == build_metadata(again, values)
    stored = pickle.loads(content).storage_data
    end = plan.nbytes(0)
    assert stored[MetadataIndex("rng.rank_0")] == _StorageInfo("__0_0.distcp", end, 1)
    assert stored[MetadataIndex("data")] == _StorageInfo("__0_0.distcp", end + 1, 2**40)
    assert stored[MetadataIndex("rng.rank_2")] == _StorageInfo("__2_0.distcp", end, 3)
    # Other values, or names of files.
    other = pickle.loads(build_metadata(plan, [{}, values[0], {}], 7)).storage_data
    assert other[MetadataIndex("data")] == _StorageInfo("__1_7.distcp", end + 1, 2**40)
    assert len(other) == 2 * 3 + 2


def test_equal_archives_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    files = shards(5)
    parsed: list[object] = []
    original = zipfile.ZipFile
    monkeypatch.setattr(zipfile, "ZipFile", lambda window: parsed.append(window) or original(window))
    open_checkpoint(MemoryReader(files))
    assert len(parsed) == 1
    # One byte in the envelope of a later chunk: of its local header, its pickle, or its directory.
    last = data_file(4)
    around = envelope((1, 4), torch.float32)
    start = files[last].rindex(around.before)
    directory = files[last].rindex(b"PK\1\2")
    for at in (start, start + around.before.index(b"torch"), directory, len(files[last]) - 22):
        changed = bytearray(files[last])
        changed[at] ^= 0xFF
        with pytest.raises(FormatError):
            open_checkpoint(MemoryReader({**files, last: bytes(changed)}))


# Which folder


def test_the_folder_that_accelerate_makes_is_found(tmp_path: Path) -> None:
    model = {"model": {"model.a": torch.ones(2), "lm_head": torch.ones(3)}}
    save(model, tmp_path / "pytorch_model_fsdp_0")
    save({"optimizer": {"state": {"a": {"exp_avg": torch.zeros(2)}}}}, tmp_path / "optimizer_0")
    (tmp_path / "config.json").write_text("{}")
    index = open_checkpoint(tmp_path)
    assert list(index.files) == ["pytorch_model_fsdp_0/__0_0.distcp"]
    assert set(index.entries) == {"model.a", "lm_head"}
    assert index.wrapper == "model"
    assert open_checkpoint(tmp_path / "pytorch_model_fsdp_0").entries.keys() == index.entries.keys()
    with pytest.raises(FormatError) as caught:
        open_checkpoint(tmp_path / "optimizer_0")
    assert "holds the state of an optimizer, not a model" in str(caught.value)
    assert f"Pass the folder of the model: {tmp_path}/pytorch_model_fsdp_0" in str(caught.value)


def test_an_optimizer_without_a_model_near() -> None:
    folder = Written({"state.a.exp_avg": ((2,), {(0,): torch.ones(2)})})
    folder.metadata.planner_data = {"state.a.exp_avg": ("state", "a", "exp_avg")}
    with pytest.raises(FormatError, match=r"state of an optimizer.*Pass the folder or the file of the model"):
        open_checkpoint(folder.reader())


@pytest.mark.parametrize(
    ("saves", "words"),
    [
        ([], "copy .metadata here from the machine of rank 0"),
        (["one", "optimizer_0"], "Pass the folder of the model: {0}/here/one ({0}/here/optimizer_0: an optim"),
        (["../model_0"], "Pass the folder of the model: {0}/model_0"),
        (["../optimizer_0"], "copy .metadata here from the machine of rank 0"),
    ],
)
def test_without_metadata_other_saves_are_named(tmp_path: Path, saves: list[str], words: str) -> None:
    """Saves inside the folder, or beside it."""
    here = tmp_path / "here"
    here.mkdir()
    (here / "__0_0.distcp").write_bytes(b"")
    for name in saves:
        save({"a": torch.ones(1)}, (here / name).resolve())
    with pytest.raises(FormatError) as caught:
        open_checkpoint(here)
    assert "there are 1 .distcp files, but no .metadata" in str(caught.value)
    assert words.format(tmp_path) in str(caught.value)


def test_several_saves_and_none_is_chosen(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        save({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(tmp_path)
    assert f"Pass the folder of the model: {tmp_path}/step-1 or {tmp_path}/step-2" in str(caught.value)


# Those that lie


def refusal(folder: Written) -> str:
    return refusal_of(folder.reader())


def changing(change: Callable[[Metadata], object]) -> str:
    folder = Written({"g": cut(GRID, [3, 3], [8]), "other": ((2,), {(0,): torch.ones(2)})})
    change(folder.metadata)
    return refusal(folder)


FIRST, SECOND = MetadataIndex("g", (0, 0)), MetadataIndex("g", (3, 0))


def info(file: object = "__0_0.distcp", start: object = 0, nbytes: object = 100, **more: Any) -> Any:
    return _StorageInfo(file, start, nbytes, **more)  # type: ignore[arg-type]


def place(told: object) -> Callable[[Metadata], object]:
    """The first chunk is said to lie elsewhere."""
    return lambda made: made.storage_data.update({FIRST: told})


def facts(key: str, **changes: object) -> Callable[[Metadata], object]:
    return lambda made: [setattr(made.state_dict_metadata[key], *change) for change in changes.items()]


def second_chunk(**changes: object) -> Callable[[Metadata], object]:
    return lambda made: [setattr(made.state_dict_metadata["g"].chunks[1], *change) for change in changes.items()]


def whole(**changes: object) -> Callable[[Metadata], object]:
    return lambda made: [setattr(made, *change) for change in changes.items()]


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", "a//b", "a\0b"])
def test_paths_that_climb_out(file: str) -> None:
    assert "which is refused: it" in changing(place(info(file)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made.storage_data.pop(SECOND), "g has no file for the chunk at (3, 0)"),
        (place(info(nbytes=10**9)), "overlap in __0_0.distcp"),
        (place(info(start=-1)), "g has an invalid byte range"),
        (place(info(nbytes=-1)), "g has an invalid byte range"),
        (place(info(start=2**63)), "g has an invalid byte range"),
        (place(info(start=0.5)), "g has an invalid byte range"),
        (place(info(nbytes=None)), "g has an invalid byte range"),
        (place(info(start=10**8)), "a chunk ends at"),
        (place(info(nbytes=0)), "does not end in the directory of a zip archive"),
        (place(info("absent")), "copy them all into one folder): 1\n    absent"),
        (place(info(3)), "g has no file"),
        (lambda made: place(made.storage_data[SECOND])(made), "overlap"),
        (place(info(transform_descriptors=["zstd"])), "was saved through a transform"),
        (lambda it: it.state_dict_metadata["g"].chunks.pop(), "overlap or leave gaps: 1\n    g of shape (6, 8)"),
        (lambda made: made.state_dict_metadata["g"].chunks.clear(), "chunks overlap or leave gaps: 1"),
        (second_chunk(offsets=torch.Size((4, 0))), "g of shape (6, 8) has a chunk at (4, 0) of sizes (3, 8)"),
        (second_chunk(offsets=torch.Size((2, 0))), "g has no file for the chunk at (2, 0)"),
        (second_chunk(sizes=torch.Size((3,))), "has a chunk at (3, 0) of sizes (3,)"),
        (facts("g", size=torch.Size((7, 8))), "chunks overlap or leave gaps"),
        (facts("g", size=(2**62, 2**62)), "chunks overlap or leave gaps"),
        (facts("g", size=None), "the size of g is not a tuple of sizes"),
        (facts("g", chunks=None), "g has no list of chunks"),
        (facts("g", properties=TensorProperties(torch.int32)), "where the metadata has I32 (3, 8)"),
        (facts("g", properties=TensorProperties(torch.complex128)), "no dtype that can be loaded"),
        (facts("other", size=torch.Size((1, 2))), "other of shape (1, 2) has a chunk at (0,)"),
        (whole(storage_data=None), "storage_data is not a dict"),
        (whole(state_dict_metadata=[1]), "state_dict_metadata is not a dict"),
        (lambda made: made.state_dict_metadata.update({3: BytesStorageMetadata()}), "is not by key"),
        (lambda made: made.storage_data.update({"g": info()}), "an object of class MetadataIndex is missing"),
    ],
)
def test_metadata_that_contradict_themselves(change: Callable[[Metadata], object], words: str) -> None:
    assert words in changing(change)


def test_missing_and_short_files_are_one_error() -> None:
    def change(made: Metadata) -> None:
        made.storage_data.update({FIRST: info("absent"), SECOND: info(start=10**8)})

    told = changing(change)
    assert "absent" in told
    assert "a chunk ends at 100000100" in told


def test_chunks_that_overlap_and_leave_a_hole() -> None:
    chunks = {(0, 0): GRID[:4].clone(), (3, 0): GRID[3:5].clone()}
    assert "chunks overlap or leave gaps" in refusal(Written({"g": ((6, 8), chunks)}))


def test_a_pinwheel_is_no_grid() -> None:
    grid = torch.arange(9.0).reshape(3, 3)
    chunks = {
        (0, 0): grid[:1, :2],
        (0, 2): grid[:2, 2:],
        (2, 1): grid[2:, 1:],
        (1, 0): grid[1:, :1],
        (1, 1): grid[1:2, 1:2],
    }
    words = "chunks overlap or leave gaps"
    assert words in refusal(Written({"g": ((3, 3), {at: part.clone() for at, part in chunks.items()})}))


def spiral(count: int) -> list[Box]:
    """Boxes that are peeled off one by one, a row, a column, a row, ..."""
    made, offsets, sizes = [], [0, 0], [count, count]
    for number in range(2 * count - 2):
        dim = number % 2
        made.append(Box(tuple(offsets), tuple(1 if axis == dim else size for axis, size in enumerate(sizes))))
        offsets[dim] += 1
        sizes[dim] -= 1
    return [*made, Box(tuple(offsets), tuple(sizes))]


def test_cuts_within_cuts_end_somewhere() -> None:
    assert tiling((9, 9), [(box, Whole(str(box))) for box in spiral(9)]) is not None
    start = time.process_time()
    assert tiling((3000, 3000), [(box, Whole("x")) for box in spiral(3000)]) is None
    assert tiling((1,) * 100_000, [(Box.whole((1,) * 100_000), Whole("x"))]) is None
    assert time.process_time() - start < 5 * slowness()


def test_shapes_and_paths_of_too_many_parts() -> None:
    many = (2**62,) * 100_000
    start = time.process_time()
    words = "the size of g is not a tuple of sizes"
    assert words in changing(lambda made: setattr(made.state_dict_metadata["g"], "size", many))
    path = tuple("a" * 10_000)
    folder = Written({".".join(path): ((2,), {(0,): torch.ones(2)})})
    folder.metadata.planner_data = {".".join(path): path}
    assert open_checkpoint(folder.reader()).wrapper == ""
    pairs: tuple[Any, ...] = ()
    for _ in range(60):
        pairs = (pairs, pairs)
    folder = Written({"g": ((2,), {(0,): torch.ones(2)})})
    folder.metadata.planner_data = {"g": (pairs,)}  # its text would have 2^60 parts
    assert [*open_checkpoint(folder.reader()).entries] == ["g"]
    assert time.process_time() - start < 5 * slowness()


def test_chunks_that_are_no_tensors() -> None:
    folder = Written({"g": ((2,), {(0,): torch.ones(2)})})
    folder.stream = io.BytesIO(saved({"g": torch.ones(2)}))
    folder.metadata.storage_data[MetadataIndex("g", (0,))] = info(nbytes=len(folder.stream.getvalue()))
    assert "it holds a dict, not a tensor" in refusal(folder)


def test_a_program_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "was run"
    for change in (
        lambda made: setattr(made, "planner_data", Touch(trace)),
        lambda made: setattr(made.storage_meta, "save_id", Touch(trace)),
        lambda made: made.state_dict_metadata.update({"x": Touch(trace)}),
    ):
        assert "posix.system, which does not belong" in changing(change)
    content = Written({"g": ((2,), {(0,): torch.ones(2)})}).files()
    with pytest.raises(FormatError, match="posix.system"):
        open_checkpoint(MemoryReader({**content, ".metadata": pickle.dumps(Touch(trace))}))
    assert not trace.exists()


@pytest.mark.parametrize("value", [Metadata, {"g": 1}, info()], ids=["class", "dict", "place"])
def test_metadata_of_another_kind(value: object) -> None:
    with pytest.raises(FormatError, match="an object of class Metadata is missing"):
        open_checkpoint(MemoryReader({".metadata": pickle.dumps(value), "__0_0.distcp": b""}))


def test_one_checkpoint_beside_another() -> None:
    """Its parts have their own names everywhere."""
    first = open_checkpoint(MemoryReader({"model.safetensors": file_with("a")}))
    turned = torch.arange(6.0).reshape(2, 3).t()
    chunks = Written({"g": cut(GRID, [3, 3], [8]), "t": ((3, 2), {(0, 0): turned})})
    both = merge_indexes(first, open_checkpoint(chunks.reader()), "more")
    keys = ["more/g[0:3, 0:8]", "more/g[3:6, 0:8]", "more/t (storage)"]
    assert set(both.files) == {"model.safetensors", "more/__0_0.distcp"}
    found = {key: (entry.key, entry.file) for key, entry in both.entries.items()}
    assert found == {"a": ("a", "model.safetensors"), **{key: (key, "more/__0_0.distcp") for key in keys}}
    assert both.composed["more/g"].composition == Joined((Whole(keys[0]), Whole(keys[1])), 0)
    assert isinstance(part := both.composed["more/t"].composition, View)
    assert part.key == keys[2]
