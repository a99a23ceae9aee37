"""Files that one rank each writes: whole, in order, within the budget; and what ends it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests import zoo
from tests.execution import owning


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("expected")
    specimen = next(item for item in zoo.causal_lm_specimens() if item.name == "qwen3_moe")
    zoo.save_original(zoo.build(specimen), folder)
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def require_saved(folder: Path, ends, expected) -> None:
    found = owning.saved_in(folder)
    assert found.keys() == expected.keys()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    sums = {key: value for _, own in ends for key, value in own.items()}
    assert sums == owning.fingerprints_of(expected)


def test_one_rank_writes_all(tmp_path, expected):
    ends = [owning.write("qwen3_moe", str(tmp_path), "flat", 100_000, 20_000)]
    assert len(ends[0][0]) == 4
    require_saved(tmp_path, ends, expected)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mesh", "size", "max_shard_bytes", "owners"),
    [("flat", 3, 100_000, 3), ("hsdp", 4, 200_000, 2), ("tp", 4, 1 << 30, 1)],
)
def test_every_file_has_one_writer(worlds, tmp_path, expected, mesh, size, max_shard_bytes, owners):
    ends = worlds(size).run(owning.write, "qwen3_moe", str(tmp_path), mesh, max_shard_bytes, 40_000)
    written = [name for files, _ in ends for name in files]
    assert len(written) == len(set(written))
    assert sum(bool(files) for files, _ in ends) == owners
    require_saved(tmp_path, ends, expected)


@pytest.mark.distributed
def test_all_ranks_raise_when_one_cannot_write(worlds, tmp_path):
    ends = worlds(3).run(owning.write, "qwen3_moe", str(tmp_path), "flat", 100_000, 40_000, 1)
    kinds = {tuple(files) for files, _ in ends}
    assert len(kinds) == 1
    kind, text = kinds.pop()
    assert kind == "StorageError"
    assert text.startswith("rank 1: ")
    assert text.endswith("the disk is full")
