"""A checkpoint whose matrices are stored with scales in a file of their own, and verbs that read it."""

import contextlib
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests import ways
from tests.conversion.scaled import scaled, scales_of
from tests.merging.adapters import tensors_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise
from shardwise.conversion.expression import Expression
from shardwise.formats.contract import CheckpointIndex
from shardwise.planning.load_memory import stored_tensors

SCALES = "scales.safetensors"


def store_scaled(folder: Path) -> None:
    """Rewrite a checkpoint in place: every matrix divided by powers of two, which stand in another file."""
    generator = torch.Generator().manual_seed(0)
    scales: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            where[key] = file.name
            if tensor.ndim == 2:
                shape = scales_of(tensor.shape)
                scale = 2.0 ** torch.randint(-2, 3, shape, generator=generator)
                wide = scale.repeat_interleave(2, 0).repeat_interleave(2, 1)[: tensor.shape[0], : tensor.shape[1]]
                tensors[key] = tensor / wide
                scales[f"{key}.scale"] = scale
        save_file(tensors, file, metadata={"format": "pt"})
    save_file(scales, folder / SCALES, metadata={"format": "pt"})
    where |= dict.fromkeys(scales, SCALES)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def with_scales(index: CheckpointIndex) -> dict[str, Expression]:
    """What the tensors of such a checkpoint are made of."""
    found = stored_tensors(index)
    return {
        key: scaled(item, found[f"{key}.scale"]) if f"{key}.scale" in found else item
        for key, item in found.items()
        if not key.endswith(".scale")
    }


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Every verb reads tensors with their scales."""
    # A module that is first imported meanwhile would keep what is put in place of the function.
    for _, name, _ in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
        if name.split(".")[1] in ("checkpoints", "engines", "execution", "interchange"):
            importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("shardwise.") and getattr(module, "stored_tensors", None) is stored_tensors:
                stack.enter_context(patch.object(module, "stored_tensors", with_scales))
        yield


def go_through(folder: str, plain: str, mesh: str, budget_bytes: int, out: str) -> list[str]:
    """Load, save and stream on these ranks; what is not as in the plain checkpoint, or not as foreseen."""
    config = AutoConfig.from_pretrained(plain)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if dist.is_initialized():
        ways.MESHES[mesh](model)
    options = shardwise.options.LoadOptions(budget_bytes=budget_bytes, progress=False)
    with understood():
        report = shardwise.load(model, folder, options=options)
    wanted = tensors_of(Path(plain))
    matrices = {name for name, tensor in wanted.items() if tensor.ndim == 2}
    faults = [f"{name} is not computed" for name in matrices - set(report.computed)]
    estimate = report.estimate
    assert estimate is not None
    # An estimate counts no gaps between columns, which are read too.
    if (
        not estimate.read_bytes
        <= report.read_bytes
        <= max(1.02 * estimate.read_bytes, report.checkpoint_bytes) + 4096
    ):
        faults.append(f"read {report.read_bytes}, foreseen {estimate.read_bytes}")
    for key, tensor in shardwise.iter_hf_tensors(model):
        if not torch.equal(tensor, wanted[key]):
            faults.append(f"{key} has other values")
    shardwise.save(model, out)
    saved = tensors_of(Path(out))
    faults += [f"{key} is saved otherwise" for key in wanted if not torch.equal(saved[key], wanted[key])]
    return faults
