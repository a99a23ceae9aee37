"""Whenever the machine dies while a model is saved, the folder holds the older save or the new one, whole."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tests.support.crashes import (
    BEFORE,
    Called,
    CrashState,
    EffectLog,
    Returned,
    assert_nothing_is_lost,
    model_in,
    recorded,
)
from tests.support.files import contents

import shardwise
from shardwise.files.open_checkpoint import open_checkpoint

SIZES = {"one file": "1GB", "several files": "40KB"}


def save(checkpoint: str, folder: str, max_shard_size: str, log: str | None, factor: float) -> None:
    model = shardwise.from_pretrained(checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    with nullcontext() if log is None else recorded(EffectLog(log), folder, writer=dist.get_rank()):
        shardwise.save(model, folder, max_shard_size=max_shard_size)


@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("old", ["nothing", *SIZES])
def test_a_crash_leaves_one_save_or_the_other(worlds, qwen3, tmp_path, old, new):
    folder, log = tmp_path / "out", tmp_path / "log"
    ranks = worlds(2)
    if old != "nothing":
        ranks.run(save, str(qwen3), str(folder), SIZES[old], None, 0.5)
    before = contents(folder)
    ranks.run(save, str(qwen3), str(folder), SIZES[new], str(log), 2.0)
    after = contents(folder)
    older, newer = (model_in(CrashState(files, 0, "")) for files in (before, after))
    assert newer is not None
    assert older != newer
    effects = EffectLog(log).effects()
    entries = [Called("new"), *effects, Returned("new")]
    looked_at = assert_nothing_is_lost(before, entries, model_in, {BEFORE: older, "new": newer}, samples=4)
    assert looked_at > 2 * len(effects)
    weights = {name for name in after if name.endswith(".safetensors")}
    assert weights == set(open_checkpoint(folder).files)  # nothing of the older save is left
    assert not [name for name in after if "incomplete" in name or name == "shardwise.saving"]
