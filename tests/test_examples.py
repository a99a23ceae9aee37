"""Every example runs, on two ranks, as torchrun starts it."""

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.integrations.requirements import require_patched_names
from tests.support.local_ranks import LocalRanks

FOLDER = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"trl": "trl", "accelerate": "accelerate"}
SLOW = ("trl_dpo.py", "trl_sft_lora.py")

pytestmark = pytest.mark.distributed


def run(file: str, *arguments: str) -> None:
    """An example on this rank, which has a process group already, of a file and no port."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", CI="1")
    dist.init_process_group = lambda *given, **others: None
    dist.destroy_process_group = lambda *given: None
    sys.argv = [file, *arguments]
    runpy.run_path(file, run_name="__main__")


def marked(name: str) -> object:
    return pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize(
    "name", [marked(path.name) for path in sorted(FOLDER.glob("*.py")) if not path.name.startswith("demo")]
)
def test_example(name: str, tmp_path: Path) -> None:
    kind = name.partition("_")[0]
    pytest.importorskip(NEEDS.get(kind, "torch"))
    if kind in ("trainer", "trl"):
        require_patched_names()
    with LocalRanks(2, is_forked=True) as ranks:
        ranks.run(run, str(FOLDER / name), "--output", str(tmp_path), "--steps", "4")
    assert any(tmp_path.rglob("*.safetensors"))
