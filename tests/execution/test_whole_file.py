"""One file of whole tensors: what cannot be told apart in it is refused."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import PlacementError
from shardwise.execution.ranks.world import World
from shardwise.execution.writing.whole_file import write_whole_file


def test_names_that_differ_in_their_dots_only_are_refused(tmp_path):
    tensors = {("state", "a.b", "c"): torch.zeros(2), ("state", "a", "b.c"): torch.ones(2)}
    with pytest.raises(PlacementError, match=r"state\.a\.b\.c: two tensors have this name"):
        write_whole_file(
            World(0, 1), tmp_path / "file.bin", tensors, {}, budget_bytes=4096, device=torch.device("cpu")
        )
    assert list(tmp_path.iterdir()) == []


def test_one_tensor_under_several_names_is_written_once(tmp_path):
    tied = torch.arange(1000.0)
    file = tmp_path / "file.bin"
    nbytes = write_whole_file(
        World(0, 1), file, {("a",): tied, ("b",): tied}, {("c",): 3}, budget_bytes=4096, device=torch.device("cpu")
    )
    assert nbytes == tied.nbytes
    found = torch.load(file, weights_only=True)
    assert found["c"] == 3
    assert torch.equal(found["a"], tied)
    assert found["a"].data_ptr() == found["b"].data_ptr()
