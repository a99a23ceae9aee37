"""Functions with which ranks save by torch, and load what it saved."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests import truth
from tests.support.world import attempt
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise
from shardwise.fsdp.wrap import Sharding


def save_sharded(source: str, folder: str, mesh_kind: str, levels: tuple[str, ...]) -> None:
    """Bring a model up on all ranks, and save its state dict, in dicts of these names."""
    size = dist.get_world_size()
    sizes, names = ((2, size // 2), ("replicate", "shard")) if mesh_kind == "hsdp" else ((size,), ("fsdp",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = shardwise.from_pretrained(source, sharding=Sharding(mesh=mesh))
    content: dict[str, Any] = get_model_state_dict(model)
    for level in reversed(levels):
        content = {level: content}
    dcp.save(content, checkpoint_id=folder)


def save_safetensors(source: str, folder: str) -> None:
    """Each rank a safetensors file of its own chunks, as transformers' distributed checkpoints are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shardwise.from_pretrained(source, sharding=Sharding(mesh=mesh))
    writer = HuggingFaceStorageWriter(path=folder, save_distributed=True, enable_consolidation=False)
    dcp.save(get_model_state_dict(model), storage_writer=writer)


def save_like_accelerate(source: str, folder: str) -> None:
    """The folders of ``accelerator.save_state``: a model and an optimizer that has stepped."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = shardwise.from_pretrained(source, sharding=Sharding(mesh=mesh))
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/optimizer_0")


def save_hub_tensors(source: str, folder: str) -> None:
    """Every stored tensor under its stored name, rows or columns on each rank in turn."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    content: dict[str, Any] = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        for number, (key, tensor) in enumerate(sorted(load_file(file).items())):
            dim = number % tensor.ndim if tensor.ndim else None
            content[key] = tensor if dim is None else distribute_tensor(tensor, mesh, [Shard(dim)])
    dcp.save(content, checkpoint_id=folder)


def save_grid(folder: str) -> None:
    """A matrix on a mesh of two dimensions: rows on one, columns on the other, both uneven."""
    mesh = init_device_mesh("cpu", (2, 2))
    grid = distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(0), Shard(1)])
    dcp.save({"weight": grid}, checkpoint_id=folder)


def loaded(folder: str, config_from: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """Bring a model up from what was saved; its whole values, and what was read."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(config_from)
    model, report = shardwise.from_pretrained(folder, config=config, output_loading_info=True, **keywords)
    return {**truth.snapshot(model), "read_bytes": report.read_bytes, "wrapper": report.wrapper}


def error_of(folder: str, config_from: str) -> tuple[str, str]:
    return attempt(loaded, folder, config_from, {})
