"""The files of a checkpoint, and all faults of them in one error."""

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tests.files.building import file_of, file_with, index_of, refusal_of, tensor
from tests.support.http_store import HttpStore, Status
from tests.support.memory_storage import MEMORY, MemoryReader

from shardwise.core.errors import CheckpointError, FormatError, StorageError
from shardwise.core.tensors import DType
from shardwise.files import join_entries, objects
from shardwise.files.checkpoint_index import CheckpointIndex, each
from shardwise.files.objects import RemoteReader
from shardwise.files.open_checkpoint import open_checkpoint


def opened(files: Mapping[str, bytes], **options: object) -> CheckpointIndex:
    return open_checkpoint(MemoryReader(files), **options)  # type: ignore[arg-type]


def refusal(files: Mapping[str, bytes], **options: object) -> str:
    return refusal_of(MemoryReader(files), **options)


A, B, C = file_with("a"), file_with("b"), file_with("c")


# Which files


INDEX = "model.safetensors.index.json"
X, XY = index_of({"a": "x.safetensors"}), index_of({"a": "x.safetensors", "b": "y.safetensors"})
NOT_OPENED = ("consolidated.safetensors.index.json", "adapter_model.safetensors.index.json")
NUMBERED = [f"model-0000{number}-of-00003" for number in (1, 2, 3)]


def named(**files: bytes) -> dict[str, bytes]:
    return {f"{name}.safetensors": content for name, content in files.items()}


@pytest.mark.parametrize(
    ("files", "chosen", "layout"),
    [
        (named(model=A), ["model"], "single file"),
        (named(foo=A), ["foo"], "single file"),
        ({**named(model=A), INDEX: index_of({"b": "b.safetensors"})}, ["model"], "single file"),
        ({**named(x=A, y=B, z=C), INDEX: XY, "other.safetensors.index.json": b"no"}, ["x", "y"], "indexed"),
        (
            {**named(x=A, consolidated=B), "odd.safetensors.index.json": X, **dict.fromkeys(NOT_OPENED, b"no")},
            ["x"],
            "indexed",
        ),
        (named(**dict(zip(NUMBERED, (A, B, C), strict=True))), NUMBERED, "several files without an index"),
        (named(foo=A, adapter_model=A, consolidated=A), ["foo"], "single file"),
        (named(consolidated=A, adapter_model=A), ["consolidated"], "single file"),
        (named(foo=A, **{"sub/model": A}), ["foo"], "single file"),
        ({**named(**{"sub/x": A}), INDEX: index_of({"a": "sub/x.safetensors"})}, ["sub/x"], "indexed"),
    ],
)
def test_the_files_that_count(files: dict[str, bytes], chosen: list[str], layout: str) -> None:
    index = opened(files)
    assert index.files == {f"{name}.safetensors": len(files[f"{name}.safetensors"]) for name in chosen}
    assert list(index.files) == [f"{name}.safetensors" for name in chosen]
    assert (index.layout, index.root) == (layout, "<memory>")


def test_weights_name_comes_first() -> None:
    files = {
        "model.safetensors": A,
        "ema.safetensors": B,
        "sub/ema.safetensors": C,
        "ema.safetensors.index.json": index_of({"a": "model.safetensors", "b": "ema.safetensors"}),
    }
    assert set(opened(files).entries) == {"a"}
    assert set(opened(files, weights_name="ema.safetensors").entries) == {"b"}
    assert set(opened(files, weights_name="sub/ema.safetensors").entries) == {"c"}
    assert set(opened(files, weights_name="ema.safetensors.index.json").entries) == {"a", "b"}


def test_files_of_a_named_index_are_relative_to_the_folder_as_in_transformers() -> None:
    files = {"x.safetensors": A, "sub/my.safetensors.index.json": index_of({"a": "x.safetensors"})}
    assert list(opened(files, weights_name="sub/my.safetensors.index.json").files) == ["x.safetensors"]


@pytest.mark.parametrize("name", ["ema.safetensors", "ema.safetensors.index.json"])
def test_weights_name_that_is_not_there(name: str) -> None:
    assert f"{name} in <memory>: no such file" in refusal({"model.safetensors": A}, weights_name=name)


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors.index", "config.json"])
def test_weights_name_of_another_kind(name: str) -> None:
    message = refusal({"model.safetensors": A, name: b""}, weights_name=name)
    assert f"{name} in <memory>: this layout is not supported for loading" in message


def test_weights_name_that_is_no_text() -> None:
    told = refusal({"model.safetensors": A}, weights_name=5)
    assert "<memory>: transformers_weights is 5, not the name of a file" in told


def test_weights_name_that_climbs_out(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(A)
    (tmp_path / "sub").mkdir()
    with pytest.raises(CheckpointError, match="refused as a file name"):
        open_checkpoint(tmp_path / "sub", weights_name="../model.safetensors")


def test_extra_files_are_read_where_they_are() -> None:
    files = {"model.safetensors": A, "mtp.safetensors": B}
    index = opened(files, extra_files=["mtp.safetensors", "absent.safetensors", "model.safetensors"])
    assert list(index.files) == ["model.safetensors", "mtp.safetensors"]
    assert set(index.entries) == {"a", "b"}
    assert set(opened(files).entries) == {"a"}


def test_several_other_indexes_cannot_be_decided() -> None:
    message = refusal({"x.safetensors.index.json": b"", "y.safetensors.index.json": b"", "a.safetensors": A})
    assert "x.safetensors.index.json, y.safetensors.index.json" in message
    assert message.endswith("Pass the path of one of them")


def test_a_path_to_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(A)
    (tmp_path / "y.safetensors").write_bytes(B)
    (tmp_path / "my.safetensors.index.json").write_bytes(index_of({"b": "y.safetensors"}))
    index = open_checkpoint(tmp_path / "x.safetensors")
    assert (index.root, list(index.files)) == (str(tmp_path), ["x.safetensors"])
    assert set(open_checkpoint(tmp_path / "my.safetensors.index.json").entries) == {"b"}
    with pytest.raises(FormatError, match=r"x\.safetensors: is a file, and weights_name"):
        open_checkpoint(tmp_path / "x.safetensors", weights_name="y.safetensors")


# What is in them


def test_entries_are_in_file_order_with_their_places() -> None:
    header = {"y": tensor("F32", [2], 4, 12), "x": tensor("BF16", [2], 0, 4)}
    files = named(b=file_of(header, bytes(range(12))), a=file_with("z", nbytes=3))
    places = {"x": "b.safetensors", "y": "b.safetensors", "z": "a.safetensors"}
    index = opened({**files, INDEX: index_of(places)})
    assert list(index.entries) == ["z", "x", "y"]
    assert index.nbytes == 15
    entry = index.entries["y"]
    assert (entry.key, entry.file, entry.dtype, entry.shape) == ("y", "b.safetensors", DType.F32, (2,))
    assert files["b.safetensors"][entry.start : entry.stop] == bytes(range(4, 12))


def test_a_key_that_the_index_leaves_out_is_included() -> None:
    assert set(opened({"x.safetensors": file_with("a", "left.out"), INDEX: X}).entries) == {"a", "left.out"}


def test_metadata_of_headers_and_index_is_text() -> None:
    first, second = {"format": "pt", "who": "x", "total_size": "header"}, {"who": "y", "only": "y"}
    of_index = {"total_size": 8, "nested": {"a": [1]}, "text": "as it is"}
    weight_map = {"k": "x.safetensors", "l": "y.safetensors"}
    files = {
        "x.safetensors": file_of({"__metadata__": first, "k": tensor("U8", [0], 0, 0)}),
        "y.safetensors": file_of({"__metadata__": second, "l": tensor("U8", [0], 0, 0)}),
        INDEX: json.dumps({"metadata": of_index, "weight_map": weight_map}).encode(),
    }
    wanted = {"format": "pt", "who": "x", "only": "y"}  # the first file's
    assert opened(files).metadata == {**wanted, "total_size": "8", "nested": '{"a": [1]}', "text": "as it is"}


@pytest.mark.parametrize("metadata", [None, [], "text", 3])
def test_an_index_without_metadata_is_fine(metadata: object) -> None:
    index_file = json.dumps({"metadata": metadata, "weight_map": {"a": "x.safetensors"}}).encode()
    index = opened({"x.safetensors": A, "model.safetensors.index.json": index_file})
    assert set(index.entries) == {"a"}
    assert index.metadata == {}


def test_the_reader_that_is_passed_stays_open() -> None:
    reader = MemoryReader({"model.safetensors": A})
    open_checkpoint(reader)
    assert reader.size("model.safetensors") == len(A)


def test_a_remote_storage_is_asked_for_items_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads' pool holds a future for each item that it has: of millions of chunks, not for all at once."""
    portions: list[int] = []
    original = ThreadPoolExecutor.map

    def recorded(pool: ThreadPoolExecutor, function: Callable[[int], int], items: Iterable[int]) -> Iterator[int]:
        portions.append(len(listed := list(items)))
        return original(pool, function, listed)

    monkeypatch.setattr(ThreadPoolExecutor, "map", recorded)
    reader = MemoryReader({}, policy=replace(MEMORY, concurrency=2, is_remote=True))
    assert each(reader, abs, range(10_000)) == list(range(10_000))
    assert sum(portions) == 10_000
    assert max(portions) < 5_000


# Nothing there


def test_a_folder_without_weights_names_expected_and_present_files() -> None:
    message = refusal({"config.json": b"", "README.md": b""})
    assert "<memory>: no weights found" in message
    assert "model.safetensors, model.safetensors.index.json" in message
    assert "README.md, config.json" in message
    assert "not supported" not in message
    assert "adapter" not in message


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="files there: none"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.gguf"], "model.gguf: this layout is not supported for loading"),
        (["weights.pt", "optimizer.bin"], "optimizer.bin, weights.pt: if one of them holds the model, pass its"),
        (["pytorch_model_fsdp_0_rank1.bin"], "load_accelerate_model and accelerate load them on the same number"),
        (
            ["model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"],
            "optim_world_size_2_rank_0.pt: contain the shards of one rank each. Merge them, and pass the result (v",
        ),
        (["latest", "zero_to_fp32.py"], "zero_to_fp32.py: DeepSpeed's, whose files hold shards of ranks. Run"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "that has it (python zero_to_fp32.py . OUT"),
        (["mp_rank_00_model_states.pt"], "mp_rank_00_model_states.pt: if one of them holds the model"),
        (["latest_checkpointed_iteration.txt"], "(Megatron: Megatron Bridge. verl: python -m verl.model_merger"),
        (["__0_0.distcp", "__1_0.distcp"], "there are 2 .distcp files, but no .metadata"),
        (["adapter_model.safetensors"], "There is an adapter without its base model"),
        (["adapter_model.bin"], "There is an adapter without its base model"),
    ],
)
def test_nothing_there_but_something_else(names: list[str], words: str) -> None:
    assert words in refusal(dict.fromkeys(names, b""))


def test_folders_with_tensors_are_named_and_links_that_lead_nowhere(tmp_path: Path) -> None:
    for name in ("checkpoint-5/model.safetensors", "checkpoint-9/pytorch_model_fsdp_0/.metadata", "runs/events"):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.touch()
    (tmp_path / "model.safetensors").symlink_to("../../blobs/0123")
    with pytest.raises(FormatError) as raised:
        open_checkpoint(tmp_path)
    message = str(raised.value)
    assert "folders there: checkpoint-5, checkpoint-9: if one of them holds the model, pass its path" in message
    assert "model.safetensors: a link to ../../blobs/0123, which is not there. Copy it by cp -L" in message


def test_a_folder_of_thousands_of_files_is_listed_in_part() -> None:
    message = refusal({f"{number:04}.txt": b"" for number in range(1000)})
    assert "0019.txt, ... and 980 more" in message
    assert "0020.txt" not in message


# Index files that lie


@pytest.mark.parametrize(
    ("index_file", "words"),
    [
        (b"", "not valid JSON"),
        (b"[]", "a JSON list, not an object"),
        (b"{}", "no object named weight_map"),
        (b'{"weight_map": ["x.safetensors"]}', "no object named weight_map"),
        (b'{"weight_map": {}}', "weight_map is empty"),
        (b'{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', "the key a occurs twice"),
        (b'{"weight_map": {"a": "x.safetensors"}, "weight_map": {}}', "the key weight_map occurs twice"),
        (b'{"weight_map": ' + b"[" * 100_000, "not valid JSON"),
        (b'{"weight_map": {"\xff": "x.safetensors"}}', "can't decode byte 0xff in position 17"),
        (b'{"weight_map": {"a": 1}}', "a: 1, not a string"),
        (index_of({"a": "/etc/x.safetensors"}), "/etc/x.safetensors: it is absolute"),
        (index_of({"a": "../x.safetensors"}), "../x.safetensors: it climbs out"),
        (index_of({"a": "..\\x.safetensors"}), "it contains a backslash"),
        (index_of({"a": ""}), "it does not end in .safetensors"),
        (index_of({"a": "pytorch_model.bin"}), "pytorch_model.bin: it does not end in .safetensors"),
        (index_of({"a": "\ud800.safetensors"}), "\\ud800"),
        (index_of({"a": "absent.safetensors"}), "absent.safetensors in <memory>: no such file"),
        (index_of({"b": "x.safetensors"}), "b: not in x.safetensors"),
    ],
)
def test_an_index_that_lies(index_file: bytes, words: str) -> None:
    message = refusal({"x.safetensors": A, "model.safetensors.index.json": index_file})
    assert words in message
    assert "safetensors" in message
    assert "<memory>" in message


def test_a_huge_index_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join_entries, "MAX_INDEX_BYTES", 50)
    reader = MemoryReader({"x.safetensors": A, "model.safetensors.index.json": b" " * 51})
    with pytest.raises(FormatError, match="has 51 bytes, 50 is the limit"):
        open_checkpoint(reader)
    assert reader.reads == 0


# Files that do not fit together


def test_a_key_in_two_files_names_both() -> None:
    message = refusal({"x.safetensors": file_with("a", "b"), "y.safetensors": file_with("b", "c")})
    assert "keys held by two files: 1" in message
    assert "b: in x.safetensors and in y.safetensors" in message


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["m-00001-of-00003", "m-00003-of-00003"], "2 of 3 exist, missing are the numbers 2"),
        (["m-00001-of-00003", "m-00002-of-00003"], "2 of 3 exist, missing are the numbers 3"),
        (["m-00002-of-00003", "m-00003-of-00003"], "2 of 3 exist, missing are the numbers 1"),
        (["m-00000-of-00003", "m-00002-of-00003"], "2 of 3 exist, missing are the numbers 1"),
        (["m-00001-of-999999999"], "1 of 999999999 exist, missing are the numbers 2, 3"),
    ],
)
def test_a_numbered_file_that_is_missing_where_no_index_would_tell(names: list[str], words: str) -> None:
    message = refusal({f"{name}.safetensors": file_with(name) for name in names})
    assert "incomplete sets of numbered files: 1" in message
    assert words in message


def test_all_faults_are_reported_at_once() -> None:
    weight_map = {name: f"{name}.safetensors" for name in ("x", "absent", "damaged", "../out", "y")}
    files = named(x=file_with("x"), y=file_with("y", "x"), damaged=file_with("damaged")[:-1])
    message = refusal({**files, INDEX: index_of({**weight_map, "gone": "x.safetensors", "e": 5})})
    for words in (
        "gone: not in x.safetensors",
        "absent.safetensors in <memory>: no such file",
        "damaged.safetensors: tensor damaged reaches to byte",
        "../out.safetensors: it climbs out",
        "e: 5, not a string",
        "x: in x.safetensors and in y.safetensors",
    ):
        assert words in message
    # A damaged file's keys are not reported again as missing from it.
    assert "damaged: not in damaged" not in message


def test_at_most_twenty_of_each_kind_are_listed() -> None:
    many = index_of({f"k{n:03}": "x.safetensors" for n in range(100)})
    message = refusal({"x.safetensors": A, INDEX: many})
    assert "keys not in the file the index names: 100" in message
    assert "k019: not in" in message
    assert "k020: not in" not in message
    assert "... and 80 more" in message


def test_bytes_that_cannot_be_read_are_no_fault_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in {"x.safetensors": A, "y.safetensors": B}.items():
        (tmp_path / name).write_bytes(content)
    real_open = os.open

    def denied(path: str, *arguments: int) -> int:
        if path.endswith("y.safetensors"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, *arguments)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StorageError, match=r"files that could not be read: 1\n.*y\.safetensors .*permission"):
        open_checkpoint(tmp_path)
    # With a fault besides, everything is in one FormatError.
    (tmp_path / "x.safetensors").write_bytes(A[:-1])
    with pytest.raises(FormatError, match=r"(?s)x\.safetensors: tensor a .*y\.safetensors .*permission"):
        open_checkpoint(tmp_path)


# At a URL


INDEXED = {
    "m/x.safetensors": A,
    "m/y.safetensors": B,
    "m/model.safetensors.index.json": index_of({"a": "x.safetensors", "b": "y.safetensors"}),
}


@pytest.mark.parametrize(
    ("files", "path", "chosen"),
    [
        ({"m/model.safetensors": A}, "m", ["model.safetensors"]),
        ({"m/model.safetensors": A}, "m/", ["model.safetensors"]),
        ({"m/foo.safetensors": A}, "m/foo.safetensors", ["foo.safetensors"]),
        (INDEXED, "m", ["x.safetensors", "y.safetensors"]),
        (INDEXED, "m/model.safetensors.index.json?sig=1", ["x.safetensors", "y.safetensors"]),
        ({**INDEXED, "m/model.safetensors": C}, "m", ["model.safetensors"]),
    ],
)
def test_a_checkpoint_at_a_url(files: dict[str, bytes], path: str, chosen: list[str]) -> None:
    with HttpStore(files) as store:
        index = open_checkpoint(f"{store.url}/{path}")
        assert index.root == f"{store.url}/m"
    assert list(index.files) == chosen


def test_a_file_named_beside_the_url() -> None:
    with HttpStore({"m/foo.safetensors": A, "m/model.safetensors": B}) as store:
        extra_files = ["absent.safetensors"]
        index = open_checkpoint(f"{store.url}/m", weights_name="foo.safetensors", extra_files=extra_files)
        assert list(index.files) == ["foo.safetensors"]
        with pytest.raises(FormatError, match=r"foo\.safetensors: is a file, and weights_name"):
            open_checkpoint(f"{store.url}/m/foo.safetensors", weights_name="model.safetensors")


def test_a_server_without_the_usual_files_names_the_missing_argument() -> None:
    with HttpStore({"m/foo.safetensors": A}) as store, pytest.raises(FormatError) as caught:
        open_checkpoint(f"{store.url}/m")
    assert "looked for: model.safetensors, model.safetensors.index.json" in str(caught.value)
    assert "the URL of the *.safetensors, *.bin, *.pt or *.index.json file itself" in str(caught.value)


def test_an_object_store_that_refuses_what_it_does_not_have() -> None:
    with HttpStore(INDEXED) as store:
        store.inject(Status(403), file="m/model.safetensors")
        assert sorted(open_checkpoint(f"{store.url}/m").entries) == ["a", "b"]
        store.inject(Status(403))
        with pytest.raises(StorageError, match=r"model\.safetensors in .*access is refused"):
            open_checkpoint(f"{store.url}/m")


def test_a_bucket_that_refuses_to_be_listed() -> None:
    with HttpStore({f"bucket/{name}": content for name, content in INDEXED.items()}) as store:
        store.inject(Status(403), file="bucket")
        store.inject(Status(403), file="bucket/m/model.safetensors")
        options = {"endpoint": store.url, "skip_signature": True, "client_options": {"allow_http": True}}
        with RemoteReader("s3://bucket/m", storage_options=options) as reader:
            assert sorted(open_checkpoint(reader).entries) == ["a", "b"]
            with pytest.raises(StorageError, match="listing the files is refused. Pass the URL of the file"):
                reader.list()


def test_an_object_store_that_refuses_a_file_that_need_not_be_there() -> None:
    with HttpStore(INDEXED) as store:
        store.inject(Status(403), file="m/head.safetensors")
        index = open_checkpoint(f"{store.url}/m", extra_files=["head.safetensors"])
        assert list(index.files) == ["x.safetensors", "y.safetensors"]


def test_an_object_store_that_refuses_a_config_that_need_not_be_there() -> None:
    with HttpStore({"m/model.safetensors": A}) as store:  # of dtype U8, so a config is looked for
        store.inject(Status(403), file="m/config.json")
        store.inject(Status(403), file="m/hf_quant_config.json")
        assert [*open_checkpoint(f"{store.url}/m/model.safetensors").entries] == ["a"]


def test_a_file_that_the_index_names_and_the_server_lacks() -> None:
    with HttpStore({**INDEXED}) as store:
        store.replace("m/y.safetensors", None)
        with pytest.raises(FormatError, match=r"missing files: 1\n.*y\.safetensors in .*no such file"):
            open_checkpoint(f"{store.url}/m")


def test_a_storage_that_lists_its_files_is_searched() -> None:
    objects._memory().put("checkpoint-at-url/only.safetensors", A)
    assert list(open_checkpoint("memory://checkpoint-at-url").files) == ["only.safetensors"]
