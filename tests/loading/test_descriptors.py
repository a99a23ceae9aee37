"""Refused loads leave no file open."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from tests import zoo
from tests.small_checkpoints import small_qwen3
from torch import nn

import shardwise

if TYPE_CHECKING:
    from tests.conftest import Worlds

TIMES = 50


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model of transformers, a checkpoint in each format."""
    root = tmp_path_factory.mktemp("sound")
    model = small_qwen3()
    model.save_pretrained(root / "whole")
    model.save_pretrained(root / "indexed", max_shard_size="30KB")
    (root / "torch").mkdir()
    torch.save(model.state_dict(), root / "torch" / "pytorch_model.bin")
    with zoo.silenced():  # that there is one process
        dcp.save(model.state_dict(), checkpoint_id=root / "distributed", no_dist=True)
    for name in ("torch", "distributed"):
        shutil.copy(root / "whole" / "config.json", root / name)
    return root


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def overwritten(path: Path, at: int = 12) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)


def _another_shape(path: Path) -> None:
    """A sound file whose tensors do not fit the model."""
    save_file({name: tensor[:1].clone() for name, tensor in load_file(path).items()}, path)


DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a header": ("whole", "model.safetensors", overwritten),
    "a file cut short": ("whole", "model.safetensors", cut),
    "shapes": ("whole", "model.safetensors", _another_shape),
    "a header of several": ("indexed", "model-00002-of-*.safetensors", overwritten),
    "all headers": ("indexed", "*.safetensors", overwritten),
    "an index": ("indexed", "model.safetensors.index.json", overwritten),
    "a torch file": ("torch", "pytorch_model.bin", cut),
    "metadata": ("distributed", ".metadata", cut),
    "chunks": ("distributed", "*.distcp", cut),
}


def _opened() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith("/proc/"):  # the thread that tells other ranks of this one reads them at any time
            found[int(name)] = target
    return found


def refused(call: Callable[[], object], times: int) -> list[str]:
    """What is open after so many refusals, and was not before. The first may open what stays, as an import does."""
    with pytest.raises(shardwise.CheckpointError):
        call()
    before = _opened()
    for _ in range(times):
        with pytest.raises(shardwise.CheckpointError):
            call()
    return sorted(set(_opened().values()) - set(before.values())) or ["more"] * (len(_opened()) - len(before))


def _model(folder: Path) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("damage", DAMAGES)
def test_refusals_leave_no_file_open(saved: Path, tmp_path: Path, damage: str) -> None:
    kind, files, spoil = DAMAGES[damage]
    folder = tmp_path / "damaged"
    shutil.copytree(saved / kind, folder)
    for path in folder.glob(files):
        spoil(path)
    model = _model(folder)
    assert refused(lambda: shardwise.load(model, folder), TIMES) == []
    assert refused(lambda: shardwise.from_pretrained(folder), 3) == []
    assert refused(lambda: shardwise.plan(folder, ranks=2), 3) == []
    if damage != "shapes":  # a merge takes the shapes that it finds
        assert refused(lambda: shardwise.merge_weights(folder, tmp_path / "out"), 3) == []


def _on_ranks(damaged: Path) -> list[str]:
    model = _model(damaged)
    return refused(lambda: shardwise.load(model, damaged), 5)


def test_refusals_leave_no_file_open_on_any_rank(saved: Path, tmp_path: Path, worlds: Worlds) -> None:
    shutil.copytree(saved / "distributed", tmp_path / "damaged")
    for path in (tmp_path / "damaged").glob("*.distcp"):
        cut(path)
    assert worlds(2).run(_on_ranks, tmp_path / "damaged") == [[], []]
