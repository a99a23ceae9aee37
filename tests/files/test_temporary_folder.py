"""Temporary files of libraries, on a disk that is full."""

import resource
import tempfile
from collections.abc import Iterator

import pytest
import torch

from shardwise.core.errors import StorageError
from shardwise.files.folders import temporary_folder
from shardwise.transfer.distributed_chunks import envelope

SAID = "temporary files cannot be written, {}. Free space there, or set TMPDIR"


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process may become larger than it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_folder_is_named(full_disk: None) -> None:
    with pytest.raises(StorageError) as raised, temporary_folder() as folder:
        (folder / "config.json").write_text("{}")
    assert str(raised.value) == f"{tempfile.gettempdir()}: {SAID.format('File too large')}"


def test_torch_does_not_say_why(full_disk: None) -> None:
    with pytest.raises(StorageError) as raised:
        envelope((3, 1, 7, 1), torch.float64)
    assert str(raised.value) == f"{tempfile.gettempdir()}: {SAID.format('no space left')}"


@pytest.mark.parametrize("error", [RuntimeError("odd"), PermissionError(13, "denied")])
def test_other_errors_are_not_changed(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, temporary_folder():
        raise error
    assert raised.value is error
