"""Files of ``torch.save``: every tensor is found at the bytes where torch put it."""

import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from tests.files.building import file_with, refusal_of
from tests.files.torch_building import archive, same, saved, tensor, torch_file, values_of
from tests.support.http_store import HttpStore
from tests.support.memory_storage import MemoryReader
from torch import nn

from shardwise.core.errors import FormatError
from shardwise.files.checkpoint_index import CheckpointIndex
from shardwise.files.local_reader import LocalReader
from shardwise.files.objects import RemoteReader
from shardwise.files.open_checkpoint import open_checkpoint


def opened(value: object) -> tuple[CheckpointIndex, MemoryReader]:
    content = value if isinstance(value, bytes) else saved(value)
    reader = MemoryReader({"pytorch_model.bin": content})
    return open_checkpoint(reader), reader


def refusal(content: bytes) -> str:
    return refusal_of(MemoryReader({"pytorch_model.bin": content}))


def every_kind() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    grid, line = torch.randn(6, 8), torch.randn(100)
    return {
        "plain": grid,
        "tied": grid,
        "rows": grid[2:4],
        "transposed": grid.t(),
        "columns": grid[:, 2:5],
        "steps": grid[::2, 1::3],
        "permuted": torch.randn(2, 3, 4, 1).permute(2, 0, 3, 1),
        "last row cut short": torch.as_strided(line, (3, 4), (33, 8), 1),
        "nested": torch.as_strided(line, (3, 4, 2), (20, 5, 1), 7),
        "0-d": torch.tensor(3.5),
        "0-d of many": line[17],
        "empty": torch.empty(0, 5),
        "empty view": grid[3:3].t(),
        "parameter": nn.Parameter(torch.randn(3)),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(5),
        "uint16": torch.arange(5).to(torch.uint16),
        "bfloat16": torch.randn(3, 2, dtype=torch.bfloat16),
        "float8": torch.randn(6).to(torch.float8_e4m3fn),
        "float8 transposed": torch.randn(2, 3).to(torch.float8_e5m2).t(),
        "complex": torch.randn(2, dtype=torch.complex64),
    }


def test_every_kind_of_tensor_is_found() -> None:
    wanted = every_kind()
    index, reader = opened(wanted)
    found = values_of(index, reader)
    assert list(wanted) == sorted(found, key=list(wanted).index)
    assert [key for key in wanted if not same(found[key], wanted[key])] == []
    assert (index.layout, index.wrapper, index.ignored) == ("torch file", "", ())
    facts = {item.key: (item.shape, item.nbytes) for item in index.tensors()}
    assert facts == {key: (tuple(value.shape), value.nbytes) for key, value in wanted.items()}


def test_bytes_that_tensors_share_count_once() -> None:
    grid = torch.randn(6, 8)
    index, _ = opened({"one": grid, "two": grid, "rows": grid[1:3], "turned": grid.t()})
    assert index.nbytes == grid.nbytes
    assert index.entries["one"].range == index.entries["two"].range
    assert index.entries["rows"].nbytes == 2 * 8 * 4


def test_only_the_directory_and_the_pickle_are_read() -> None:
    reader = MemoryReader({"pytorch_model.bin": saved({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)})})
    open_checkpoint(reader)
    assert reader.bytes_read < 20_000


def test_a_parameter_with_attributes() -> None:
    parameter = nn.Parameter(torch.randn(3))
    parameter.note = "mine"
    plain = torch.randn(2)
    plain.note = {"of": "any kind"}
    index, reader = opened({"a": parameter, "b": plain})
    found = values_of(index, reader)
    assert same(found["a"], parameter)
    assert same(found["b"], plain)


@pytest.mark.parametrize("levels", [["model"], ["state_dict"], ["app", "model"]])
def test_a_model_in_a_nest_of_dicts(levels: list[str]) -> None:
    content: object = OrderedDict({"model.a": torch.ones(2), "lm_head": torch.zeros(3)})
    for level in reversed(levels):
        content = {level: content, "epoch": 3, "args": {"lr": 0.1, "betas": (0.9, 0.95), "tags": {"x"}}}
    index, reader = opened(content)
    assert set(values_of(index, reader)) == {"model.a", "lm_head"}
    assert index.wrapper == ".".join(levels)
    assert {"epoch (int)", "args.lr (float)", "args.betas (tuple)", "args.tags (set)"} <= set(index.ignored)


def test_an_optimizer_beside_the_model_is_left() -> None:
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    index, _ = opened({"model": {"a": torch.ones(2)}, "optimizer": state, "device": torch.device("cpu")})
    assert set(index.entries) == {"a"}
    assert index.ignored == ("optimizer (an optimizer's state)", "device (device)")


def test_other_values_are_reported_and_not_loaded() -> None:
    index, _ = opened({"a": torch.ones(1), "note": "x", "step": 7, "blob": b"xyz", "none": None, "list": [1, 2]})
    assert index.ignored == ("note (str)", "step (int)", "blob (bytes)", "none (NoneType)", "list (list)")


def test_an_optimizer_alone_is_refused() -> None:
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    assert "holds the state of an optimizer, not a model" in refusal(saved(state))
    assert "holds the state of an optimizer" in refusal(saved({"optimizer": state, "epoch": 1}))


def test_files_that_are_not_state_dicts() -> None:
    assert "one tensor without a name" in refusal(saved(torch.ones(2)))
    assert "it holds a list, not a state dict" in refusal(saved([torch.ones(2)]))
    assert "torch.nn.modules.linear.Linear, which does not belong" in refusal(saved(nn.Linear(1, 1)))


def test_the_format_before_torch_1_6_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    words = r"before 1\.6.*torch\.save\(torch\.load\(file, weights_only=True\), file\)"
    with pytest.raises(FormatError, match=words):
        open_checkpoint(tmp_path)
    torch.save(torch.load(file, weights_only=True), file)
    with LocalReader(tmp_path) as reader:
        assert same(values_of(open_checkpoint(reader), reader)["a"], torch.ones(2))


def test_other_archives_are_distinguished() -> None:
    assert "TorchScript" in refusal(archive({"data.pkl": b"", "constants.pkl": b"", "code/x.py": b""}))
    assert "not one of torch.save" in refusal(archive({"readme": b""}))
    assert "git lfs pull" in refusal(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "does not end in the directory of a zip archive" in refusal(b"\x80\x02}." * 100)


def test_a_big_endian_file_is_refused() -> None:
    content = torch_file({"a": tensor()}).replace(b"little", b"bigbig")
    assert "not little-endian" in refusal(content)


def test_dtypes_that_cannot_be_held_are_refused_by_name() -> None:
    assert "ComplexDoubleStorage" in refusal(saved({"a": torch.zeros(2, dtype=torch.complex128)}))
    expanded = torch.randn(3).expand(4, 3)
    words = "a: its elements share memory, as after expand(). Save a contiguous copy"
    assert words in refusal(saved({"a": expanded}))
    assert "which does not belong" in refusal(saved({"a": torch.ones(2, 2).to_sparse()}))
    assert "conjugated or negated" in refusal(saved({"a": torch.ones(2, dtype=torch.complex64).conj()}))


# Over a network


def test_files_at_a_url() -> None:
    wanted = every_kind()
    with HttpStore({"m/pytorch_model.bin": saved(wanted), "n/x.pt": saved({"model": wanted})}) as store:
        for url in (f"{store.url}/m", f"{store.url}/n/x.pt"):
            index = open_checkpoint(url)
            with RemoteReader(index.root) as reader:
                found = values_of(index, reader)
            assert [key for key in wanted if not same(found[key], wanted[key])] == []


# Which files


def numbered(tmp_path: Path, **changes: str) -> dict[str, torch.Tensor]:
    parts = [{"a": torch.randn(3), "t": torch.randn(2, 5).t()}, {"b": torch.randn(4)}]
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        name = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": {**weight_map, **changes}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return {**parts[0], **parts[1]}


def test_several_files_with_an_index(tmp_path: Path) -> None:
    wanted = numbered(tmp_path)
    for place in (tmp_path, tmp_path / "pytorch_model.bin.index.json"):
        index = open_checkpoint(place)
        with LocalReader(tmp_path) as reader:
            found = values_of(index, reader)
        assert all(same(found[key], value) for key, value in wanted.items())
        assert index.layout == "indexed torch files"
        assert list(index.files) == [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        assert index.metadata == {"total_size": "1"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"z": "pytorch_model-00001-of-00002.bin"}, "keys not in the file the index names: 1\n.*z: not in"),
        ({"z": "../other.bin"}, "it climbs out"),
        ({"z": "model.safetensors"}, "model.safetensors: it does not end in .bin"),
        ({"z": "absent.bin"}, "missing files: 1"),
    ],
)
def test_an_index_that_lies(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    numbered(tmp_path, **changes)
    with pytest.raises(FormatError, match=words):
        open_checkpoint(tmp_path)


def test_the_order_is_that_of_transformers() -> None:
    a, b = file_with("a"), saved({"b": torch.ones(1)})
    for names, chosen in (
        (["pytorch_model.bin", "model.safetensors"], "model.safetensors"),
        (["pytorch_model.bin", "other.safetensors", "training_args.bin"], "pytorch_model.bin"),
        (["optimizer.bin", "other.safetensors"], "other.safetensors"),
    ):
        files = {name: a if name.endswith("safetensors") else b for name in names}
        assert list(open_checkpoint(MemoryReader(files)).files) == [chosen]


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "checkpoint.pt", "model.pth"])
def test_a_file_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(saved({"b": torch.ones(1)}))
    assert list(open_checkpoint(tmp_path / name).files) == [name]
    with pytest.raises(FormatError, match=f"{name}: if one of them holds the model, pass its path"):
        open_checkpoint(tmp_path)


def test_one_key_in_two_files_is_refused(tmp_path: Path) -> None:
    numbered(tmp_path)
    torch.save({"a": torch.ones(3), "b": torch.ones(4)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    with pytest.raises(FormatError, match="keys held twice: 1\n *a: "):
        open_checkpoint(tmp_path)


def test_a_tensor_stored_in_parts_is_not_stored_again() -> None:
    turned = torch.arange(16.0).reshape(4, 4).t()
    files = {"pytorch_model.bin": saved({"w": turned}), "extra.safetensors": save({"w": torch.zeros(4, 4)})}
    with pytest.raises(FormatError, match=r"w: in extra\.safetensors, and elsewhere in parts"):
        open_checkpoint(MemoryReader(files), extra_files=["extra.safetensors"])
