"""A node that computes, added in one file (tests/conversion/scaled.py), goes through every verb unchanged."""

from pathlib import Path

import pytest
import torch
from tests import zoo
from tests.merging.adapters import save_adapter, tensors_of
from tests.verbs import scaling
from tests.verbs.conftest import small_qwen3

from shardwise.engines.merging_adapter import merge_adapter
from shardwise.interchange.merging_weights import merge_weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint as it is, and with scales."""
    model = small_qwen3(intermediate_size=57)
    plain, scaled = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("scaled")
    for folder in (plain, scaled):
        zoo.save_original(model, folder, max_shard_size="30KB")
    scaling.store_scaled(scaled)
    return plain, scaled


@pytest.mark.parametrize("budget", [1 << 14, 1 << 18])
def test_one_process(folders, tmp_path, budget):
    plain, scaled = folders
    assert scaling.go_through(str(scaled), str(plain), "flat", budget, str(tmp_path)) == []


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "size"), [("flat", 3), ("shard1", 2)])
def test_ranks(worlds, folders, tmp_path, mesh, size):
    plain, scaled = folders
    found = worlds(size).run(scaling.go_through, str(scaled), str(plain), mesh, 1 << 16, str(tmp_path))
    assert found == [[]] * size


def test_merging_an_adapter_into_it(folders, tmp_path):
    plain, scaled = folders
    adapter = save_adapter(plain, tmp_path / "adapter", r=4, target_modules=["q_proj", "down_proj"])
    merge_adapter(plain, adapter, tmp_path / "wanted")
    with scaling.understood():
        merge_adapter(scaled, adapter, tmp_path / "found")
    wanted, found = tensors_of(tmp_path / "wanted"), tensors_of(tmp_path / "found")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_merging_its_files(folders, tmp_path):
    plain, scaled = folders
    with scaling.understood():
        merge_weights(scaled, tmp_path / "out")
    wanted, found = tensors_of(plain), tensors_of(tmp_path / "out")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
