"""One file of whole tensors: what cannot be told apart in it is refused."""

import io
from unittest import mock

import pytest
import torch

from shardwise.core.errors import ShardingError
from shardwise.ranks.world import World
from shardwise.saving.commit import commit_written
from shardwise.saving.rename_journal import lock_and_clean_up
from shardwise.saving.torch_saves import load_value, write_whole_file


def write(folder, tensors, objects):
    world, device = World(0, 1), torch.device("cpu")
    with lock_and_clean_up(world, folder) as saving:
        nbytes, written = write_whole_file(
            world, saving, "file.bin", tensors, objects, budget_bytes=4096, device=device
        )
        commit_written(saving.locked, written, [])
    return nbytes


def test_names_that_differ_in_their_dots_only_are_refused(tmp_path):
    tensors = {("state", "a.b", "c"): torch.zeros(2), ("state", "a", "b.c"): torch.ones(2)}
    with pytest.raises(ShardingError, match=r"state\.a\.b\.c: two tensors have this name"):
        write(tmp_path, tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_under_several_names_is_written_once(tmp_path):
    tied = torch.arange(1000.0)
    nbytes = write(tmp_path, {("a",): tied, ("b",): tied}, {("c",): 3})
    assert nbytes == tied.nbytes
    found = torch.load(tmp_path / "file.bin", weights_only=True)
    assert found["c"] == 3
    assert torch.equal(found["a"], tied)
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_a_value_that_was_saved_from_another_device_is_read_into_host_memory():
    buffer = io.BytesIO()
    with mock.patch("torch.serialization.location_tag", return_value="cuda:5"):
        torch.save({"epochs": torch.ones(2)}, buffer)
    assert load_value(buffer.getvalue(), "state")["epochs"].tolist() == [1, 1]
