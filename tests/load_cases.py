"""Ways in which a checkpoint comes into a model: meshes of several axes, placements, storages."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests import truth, zoo
from tests.support.memory_storage import MemoryReader
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from shardwise.core.reports import LoadReport
from shardwise.files import objects
from shardwise.files.storage import StorageReader
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.policies import group_parameters
from shardwise.loading.prepare import SharedReads
from shardwise.ranks.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class Way:
    """How a case is brought up.

    Attributes:
        mesh: one of ``MESHES``.
        storage: local, memory, http or bucket.
        url: of the folder of all cases, for http.
        shared_reads: as of a load.
    """

    mesh: str = "flat"
    storage: str = "local"
    url: str = ""
    shared_reads: SharedReads = "auto"

    def __str__(self) -> str:
        return f"{self.mesh} {self.storage} {self.shared_reads}"


class NotApplicable(Exception):
    """A mesh has nothing to do with an architecture: it has no experts, say."""


# The meshes. `load` gets a model that somebody else has sharded, on meta.


@functools.cache
def _mesh(kind: str, sizes: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """One mesh of each kind for the life of a rank: every new one brings process groups, with threads that spin."""
    return init_device_mesh(kind, sizes, mesh_dim_names=mesh_dim_names)


def shard(model: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Shard | None]) -> None:
    """``fully_shard`` of the usual blocks."""
    grouping = group_parameters(model, "auto")
    modules = dict(model.named_modules())
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": set(grouping.whole),
        "shard_placement_fn": placement_of,
    }
    for group in grouping.blocks:
        members = [modules[name] for name in group.modules]
        fully_shard(members if len(members) > 1 else members[0], **options)
    fully_shard(model, **options)


def by_rows(parameter: nn.Parameter) -> Shard | None:
    return None


def by_columns(size: int) -> Callable[[nn.Parameter], Shard | None]:
    """The second dimension, where it is even: FSDP2 takes no uneven split but of the first."""
    return lambda parameter: Shard(1) if parameter.ndim > 1 and parameter.shape[1] % size == 0 else None


def distribute(model: nn.Module, mesh: DeviceMesh, dim_of: Callable[[str, torch.Tensor], int | None]) -> None:
    """Parameters on meta as DTensors that are sharded along an axis, before ``fully_shard``."""
    found = False
    for item in collect_tensors(model):
        dim = dim_of(item.fqn, item.tensor)
        if dim is None or item.tensor.shape[dim] % mesh.size():
            continue
        found = True
        sharded = distribute_tensor(item.tensor.detach(), mesh, [Shard(dim)], src_data_rank=None)
        item.install(nn.Parameter(sharded, requires_grad=item.tensor.requires_grad))
    if not found:
        raise NotApplicable


COLUMNWISE = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "query", "key", "value", "wi"}
ROWWISE = {"o_proj", "out_proj", "down_proj", "fc2", "wo"}


def tensor_parallel_dim(fqn: str, tensor: torch.Tensor) -> int | None:
    """As tensor parallelism deals attention and MLP: heads and hidden units, whose outputs are then summed."""
    *_, layer, kind = ["", "", *fqn.split(".")]
    if layer in COLUMNWISE and tensor.ndim in (1, 2):
        return 0
    return 1 if layer in ROWWISE and kind == "weight" and tensor.ndim == 2 else None


def expert_parallel_dim(fqn: str, tensor: torch.Tensor) -> int | None:
    """Stacked experts are dealt whole."""
    return 0 if ".experts." in fqn and tensor.ndim == 3 else None


def shard_by_rows_of(axis: str, dim_of: Callable[[str, torch.Tensor], int | None]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        mesh = _mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", axis))
        distribute(model, mesh[axis], dim_of)
        shard(model, mesh["dp"], by_rows)

    return apply


def shard_flat(model: nn.Module) -> None:
    shard(model, _mesh("cpu", (dist.get_world_size(),)), by_rows)


def shard_by_columns(model: nn.Module) -> None:
    shard(model, _mesh("cpu", (dist.get_world_size(),)), by_columns(dist.get_world_size()))


def shard_hybrid(model: nn.Module) -> None:
    shard(model, hybrid_mesh(), by_rows)


def hybrid_mesh() -> DeviceMesh:
    return _mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


MESHES: dict[str, Callable[[nn.Module], None]] = {
    "flat": shard_flat,
    "hsdp": shard_hybrid,
    "tp": shard_by_rows_of("tp", tensor_parallel_dim),
    "ep": shard_by_rows_of("ep", expert_parallel_dim),
    "shard1": shard_by_columns,
}
WORLDS = {"flat": 3, "hsdp": 4, "tp": 4, "ep": 4, "shard1": 2}
"""How many ranks a mesh is tried on, if nothing is said."""


# Bringing a case up


def require_no_faults(
    cases: Iterable[truth.Case], compare: Callable[[truth.Case], list[list[str] | None]], least: int = 0
) -> None:
    """By rank, ``compare`` finds no faults of any case, and applies to at least so many."""
    found = {str(case): compare(case) for case in cases}
    assert {case: faults for case, faults in found.items() if any(faults)} == {}
    assert sum(None not in faults for faults in found.values()) >= least


def load_and_compare(case: truth.Case, way: Way) -> list[str] | None:
    """Run on every rank: the faults found; None where the mesh does not apply."""
    # torch, on gathering what is sharded twice on one dimension: that it takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    applies: list[bool] = []

    def attempt() -> tuple[nn.Module, LoadReport]:
        try:
            return bring_up(case, way)
        except NotApplicable:
            applies.append(False)
            raise

    faults = truth.faults_of(case, attempt)
    return faults if all(applies) else None


def bring_up(case: truth.Case, way: Way) -> tuple[nn.Module, LoadReport]:
    source = source_of(case, way)
    options = shardwise.options.LoadOptions(
        shared_reads=way.shared_reads,
        budget_bytes=1 << 20,
        timeouts=Timeouts(heartbeat_timeout_s=120),  # a sweep may share its machine
    )
    if way.mesh in ("flat", "hsdp") and not isinstance(source, StorageReader):
        return shardwise.from_pretrained(
            source,
            model_class=zoo.model_class(case.specimen),
            dtype=truth.DTYPES[case.dtype],
            sharding=shardwise.Sharding(mesh=hybrid_mesh() if way.mesh == "hsdp" else None),
            options=options,
            output_loading_info=True,
        )
    model = outlined(case)
    MESHES[way.mesh](model)
    return model, shardwise.load(model, source, options=options)


def source_of(case: truth.Case, way: Way) -> str | MemoryReader:
    folder = Path(case.directory)
    match way.storage:
        case "local":
            return str(folder)
        case "memory":
            return MemoryReader({file.name: file.read_bytes() for file in folder.iterdir()})
        case "http":
            return f"{way.url}/{folder.parent.name}/{folder.name}"
        case "bucket":
            from obstore.store import LocalStore

            objects._bucket = lambda url, options: LocalStore(prefix=folder)
            return "s3://case"
        case _:
            raise AssertionError(way.storage)


def outlined(case: truth.Case) -> nn.Module:
    """The case's model on meta, with the dtypes and ties that it has when transformers has loaded it."""
    expected = torch.load(case.truth, weights_only=True)
    kind = zoo.model_class(case.specimen)
    config = kind.config_class.from_pretrained(case.directory)
    model = zoo.meta_model(case.specimen, dtype=truth.DTYPES[case.dtype], config=config)
    for item in collect_tensors(model):
        dtype = expected["values"][item.fqn].dtype
        if item.tensor.dtype != dtype:
            changed = item.tensor.detach().to(dtype)
            is_parameter = isinstance(item.tensor, nn.Parameter)
            item.install(
                nn.Parameter(changed, requires_grad=item.tensor.requires_grad) if is_parameter else changed
            )
    slots = {slot.fqn: (slot, item) for item in collect_tensors(model) for slot in item.slots}
    for names in expected["ties"]:
        first, item = slots[names[0]]
        shared = getattr(first.module, first.name)
        if set(item.names) - set(names):
            shared = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
        for name in names:
            if getattr(slots[name][0].module, slots[name][0].name) is not shared:
                setattr(slots[name][0].module, slots[name][0].name, shared)
    return model


def placements(case: truth.Case, way: Way) -> set[str]:
    """The kinds of placement that the parameters of a case have in a way."""
    model = outlined(case)
    MESHES[way.mesh](model)
    kept = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return {" ".join(type(item).__name__ for item in parameter.placements) for parameter in kept}
