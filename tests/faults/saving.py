"""Saves that something befalls, and what a folder holds afterwards."""

import itertools
import json
from pathlib import Path

import torch
from safetensors import safe_open
from tests.faults.fault_injection import Seat
from tests.faults.on_ranks import Blow, lay
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise
from shardwise.ranks.timeouts import Timeouts

ONE_FILE, SEVERAL_FILES = "1GB", "2KB"


class Blocks(nn.Module):
    """A few matrices, of which three ranks hold uneven parts, and some hold none of the smallest."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(16, 20) for _ in range(4))
        self.norm = nn.Parameter(torch.empty(2))
        self.register_buffer("steps", torch.tensor(seed))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def sharded(seed: int) -> Blocks:
    """On all ranks of the world."""
    model = Blocks(seed)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save(
    seat: Seat, folder: str, seed: int, size: str, timeouts: Timeouts, blow: Blow | None = None
) -> tuple[str, ...]:
    """Save what :func:`sharded` makes while the blow falls; the files."""
    model = sharded(seed)
    if blow is not None:
        lay(blow, seat)
    options = shardwise.options.SaveOptions(budget_bytes=4096, timeouts=timeouts, progress=False)
    return shardwise.save(model, folder, max_shard_size=size, verify=True, options=options).files


def save_apart(seat: Seat, folder: str, timeouts: Timeouts) -> None:
    """Every rank to a folder of its own."""
    options = shardwise.options.SaveOptions(timeouts=timeouts, progress=False)
    shardwise.save(sharded(1), f"{folder}/{seat.rank}", options=options)


def save_one_after_another(
    seat: Seat, folder: str, seeds: tuple[int, ...], sizes: tuple[str, ...], timeouts: Timeouts
) -> None:
    """Save forever, and tell before each save: to be killed at any moment."""
    options = shardwise.options.SaveOptions(timeouts=timeouts, progress=False)
    models = [sharded(seed) for seed in seeds]
    while True:
        for model, size in itertools.product(models, sizes):
            seat.tell()
            shardwise.save(model, folder, max_shard_size=size, options=options)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors as a reader of the hub's layout finds them, by the safetensors library alone."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        with safe_open(single, "pt") as file:
            return {key: file.get_tensor(key) for key in list(file.keys())}
    tensors = {}
    for key, name in json.loads(index.read_text())["weight_map"].items():
        with safe_open(folder / name, "pt") as file:
            tensors[key] = file.get_tensor(key)
    return tensors


def is_model(folder: Path, seed: int) -> bool:
    """Whether the folder holds this model, bit for bit."""
    wanted, found = Blocks(seed).state_dict(), stored(folder)
    return wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)


def litter(folder: Path) -> set[str]:
    """Files that belong neither to the weights that count nor beside them."""
    index = folder / "model.safetensors.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) | {index.name} if index.exists() else set()
    kept = {"model.safetensors", "model.fingerprints.json"} | named
    return {path.name for path in folder.iterdir()} - kept
