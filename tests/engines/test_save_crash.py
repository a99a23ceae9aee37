"""Whenever the machine dies while a model is saved, the folder holds the older save or the new one, whole."""

from unittest import mock

import pytest
import torch
from tests.support import EffectLog, RecordingWriter, assert_old_or_new
from tests.support.memory_storage import MemoryReader
from tests.torture.actors import files_in

import shardwise
import shardwise.engines.saving
from shardwise.formats.opening import open_checkpoint
from shardwise.storage.writing import open_writer

SIZES = {"one file": "1GB", "several files": "40KB"}


def save(rank: int, checkpoint: str, folder: str, max_shard_size: str, log: str | None, factor: float) -> None:
    model = shardwise.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    if log is None:
        shardwise.save(model, folder, max_shard_size=max_shard_size)
        return
    effects = EffectLog(log)
    opened = lambda target: RecordingWriter(open_writer(target), effects, writer=rank)  # noqa: E731
    with mock.patch.object(shardwise.engines.saving, "open_writer", opened):
        shardwise.save(model, folder, max_shard_size=max_shard_size)


def look(reader) -> dict[str, bytes] | None:
    """Every tensor, as whoever opens the folder finds it; None where there is no save."""
    names = reader.list()
    if "model.safetensors" not in names and "model.safetensors.index.json" not in names:
        return None
    index = open_checkpoint(reader)
    return {key: reader.read(entry.file, entry.start, entry.stop) for key, entry in index.entries.items()}


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", ["nothing", *SIZES])
def test_a_crash_leaves_one_save_or_the_other(worlds, qwen3, tmp_path, old, new):
    folder, log = tmp_path / "out", tmp_path / "log"
    ranks = worlds(2)
    if old != "nothing":
        ranks.run(on_rank, str(qwen3), str(folder), SIZES[old], None, 0.5)
    before = files_in(folder)
    ranks.run(on_rank, str(qwen3), str(folder), SIZES[new], str(log), 2.0)
    after = files_in(folder)
    older, newer = (look(MemoryReader(files)) for files in (before, after))
    assert newer is not None
    assert older != newer
    effects = EffectLog(log).effects()
    looked_at = assert_old_or_new(before, effects, look, old=older, new=newer, samples=4)
    assert looked_at > 2 * len(effects)
    weights = {name for name in after if name.endswith(".safetensors")}
    assert weights == set(open_checkpoint(folder).files)  # nothing of the older save is left
    assert not [name for name in after if "incomplete" in name or name == "shardwise.saving"]


def on_rank(*arguments) -> None:
    import torch.distributed as dist

    save(dist.get_rank(), *arguments)
