"""Functions that ranks run on damaged files of accelerate."""

import contextlib
import copy
import os
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.integrations.trading import FORMS, SMALL, save, whole_model, whole_optimizer
from tests.loading.on_ranks import attempt
from tests.state.optimizing import MAKERS, differences, sharded, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from shardwise import KeyMismatchError, Sharding, StorageError
from shardwise.options import Ignore


class Runs:
    """A pickle of it makes a folder when it is read by Python's own machine."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def is_first() -> bool:
    return dist.get_rank() == 0


def model_refused(folder: str, path: str = "") -> tuple[str, str]:
    """The error, when nothing has been changed."""
    model = sharded("", 1)
    before = whole_model(model)
    found = attempt(lambda: shardwise.load_accelerate_model(model, Path(folder, path)))
    return ("the model was changed", found[1]) if differences(whole_model(model), before) else found


def optimizer_refused(folder: str) -> tuple[str, str]:
    model = sharded("", 1)
    (optimizer,) = MAKERS["adamw"](model, 1)
    return attempt(lambda: shardwise.load_accelerate_optimizer(model, optimizer, folder))


def write_rank_file_without(folder: str, rank: int) -> None:
    """What ranks hold, but a tensor of one of them."""
    state = shardwise.get_model_state_dict(sharded("", 1), "sharded")
    if dist.get_rank() == rank:
        del state["blocks.1.0.weight"]
    torch.save(state, Path(folder, f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin"))
    dist.barrier()


def write_odd_shard(folder: str) -> None:
    """A DTensor on one rank whose local tensor is larger than its placement says."""
    state = shardwise.get_model_state_dict(sharded("", 1), "sharded")
    if dist.get_rank() == 1:
        weight = state["blocks.1.0.weight"]
        assert isinstance(weight, DTensor)
        state["blocks.1.0.weight"] = DTensor.from_local(
            torch.zeros(5, 5), weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
            stride=weight.stride(),
        )  # fmt: skip
    torch.save(state, Path(folder, f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin"))
    dist.barrier()


def write_flat(folder: str) -> None:
    """As LOCAL_STATE_DICT of FSDP1."""
    flat = {"_fsdp_wrapped_module._flat_param": torch.zeros(7), "head.weight": torch.zeros(2)}
    torch.save(flat, Path(folder, f"pytorch_model_fsdp_rank{dist.get_rank()}.bin"))
    dist.barrier()


def write_pickle(folder: str, name: str, marker: str) -> None:
    path = Path(folder, name)
    if is_first():
        path.parent.mkdir(exist_ok=True)
        if path.name == ".metadata":
            path.write_bytes(pickle.dumps(Runs(marker)))
        else:
            torch.save({"embed.weight": Runs(marker)}, path)
    dist.barrier()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


def stepped(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def from_fsdp1(folder: str, form: str) -> list[str]:
    """A model and an optimizer saved as accelerate does it under FSDP of version 1, and loaded under version 2."""
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")  # torch deprecates it at every step
    torch.manual_seed(1)
    plain = Small()
    model = FullyShardedDataParallel(copy.deepcopy(plain), use_orig_params=True, device_id=torch.device("cpu"))
    alike, optimizer = stepped(plain), stepped(model)
    kind = StateDictType.FULL_STATE_DICT if form == "full" else StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if form == "full":
        if is_first():
            torch.save(state, Path(folder, "pytorch_model_fsdp.bin"))
            torch.save(moments, Path(folder, "optimizer.bin"))
    else:
        for name, key, value in (("pytorch_model_fsdp_0", "model", state), ("optimizer_0", "optimizer", moments)):
            dcp.save({key: value}, storage_writer=dcp.FileSystemWriter(Path(folder, name)))
    dist.barrier()
    torch.manual_seed(2)
    target = Small()
    shardwise.shard(target, Sharding(wrap="whole_model"))
    fresh = torch.optim.AdamW(target.parameters())
    shardwise.load_accelerate_model(target, folder)
    shardwise.load_accelerate_optimizer(target, fresh, folder)
    found, taken = whole_model(target), whole_optimizer(target, fresh)["state"]
    faults = [name for name, value in plain.state_dict().items() if not torch.allclose(found[name], value)]
    wanted = {name: alike.state[parameter] for name, parameter in plain.named_parameters()}
    if form == "full":  # whose means of gradients torch mixes up on the CPU: what is in the file is what counts
        wanted = torch.load(Path(folder, "optimizer.bin"), weights_only=True)["state"]
    faults += [
        f"{name}: {entry}"
        for name, entries in wanted.items()
        for entry, value in entries.items()
        if not torch.allclose(taken[name][entry], value)
    ]
    return faults + ["another learning rate"] * (fresh.param_groups[0]["lr"] != 0.3)


def dtypes(folder: str) -> tuple[dict[str, tuple[str, str]], list[tuple[str, str]]]:
    """A model of bfloat16 takes float32, and neither integers nor float8; what was cast, and the errors."""
    target = Small()
    target.register_buffer("codes", torch.zeros(3, dtype=torch.int64))
    state = {name: torch.ones_like(tensor) for name, tensor in target.state_dict().items()}
    others = [
        {"two.weight": state["two.weight"].to(torch.float8_e4m3fn)},
        {"two.weight": state["two.weight"].to(torch.int8)},
        {"codes": torch.zeros(3, dtype=torch.int32)},
        {"codes": torch.zeros(3)},
    ]
    target.bfloat16()
    shardwise.shard(target, Sharding(wrap="whole_model"))
    path = Path(folder, "pytorch_model_fsdp.bin")
    errors = []
    for other in [{}, *others]:
        if is_first():
            torch.save(state | other, path)
        dist.barrier()
        if not other:
            cast = dict(shardwise.load_accelerate_model(target, path).cast)
        else:
            errors.append(attempt(lambda: shardwise.load_accelerate_model(target, path)))
        dist.barrier()
    return cast, errors


def onto_strides(folder: str) -> list[str]:
    """Onto parameters whose own memory is not in rows, and from files that are not either."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(48.0).reshape(6, 8)
    names = ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin")
    if is_first():
        for name, tensor in zip(names, (whole, whole.t().contiguous().t()), strict=True):
            torch.save({"weight": tensor}, Path(folder, name))
    dist.barrier()
    faults = []
    for number in range(2):
        model = nn.Module()
        model.weight = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)]).t())
        mine = model.weight.to_local()
        if dist.get_world_size() > 1 and mine.is_contiguous():
            faults.append("the destination is in rows")
        shardwise.load_accelerate_model(model, folder, number=number)
        faults += [f"number {number}"] * (not torch.equal(model.weight.full_tensor(), whole))
    return faults


def several_optimizers(folder: str, form: str) -> list[str]:
    """Each by its number, of which the parameters of the other know nothing."""
    model, target = sharded("", 1), sharded("", 1)
    given, fresh = trained(model, "two", 2), MAKERS["two"](target, 1)
    for number, optimizer in enumerate(given):
        shardwise.save_accelerate_optimizer(model, optimizer, folder, FORMS[form], number=number, options=SMALL)
    wrong = attempt(lambda: shardwise.load_accelerate_optimizer(target, fresh[0], folder, number=1))
    faults = [f"another's was taken: {wrong}"] * (wrong[0] != KeyMismatchError.__name__)
    for number, optimizer in enumerate(fresh):
        shardwise.load_accelerate_optimizer(target, optimizer, folder, number=number, options=SMALL)
        faults += differences(whole_optimizer(target, optimizer), whole_optimizer(model, given[number]))
    return faults


def ignoring(folder: str) -> dict[str, Any]:
    """A state that lacks a name and has another."""
    state = shardwise.get_model_state_dict(sharded("", 1), "full_on_all_ranks")
    state["extra"] = state.pop("gain")
    if is_first():
        torch.save(state, Path(folder, "pytorch_model_fsdp.bin"))
    dist.barrier()
    target = sharded("", 2)
    report = shardwise.load_accelerate_model(target, folder, on_missing=Ignore(), on_unexpected=Ignore())
    return report.to_dict()


def fails_to_write(folder: str, form: str, failing: int) -> tuple[tuple[str, str], list[str]]:
    """A save that one rank cannot carry out; the error, and what is then in the folder."""
    save(folder, form)
    before = sorted(path.name for path in Path(folder).rglob("*"))
    standing, target = sharded("", 3), sharded("", 4)
    shardwise.load_accelerate_model(standing, folder)
    dist.barrier()

    def broken(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is gone")

    what = {
        "full": "shardwise.saving.torch_saves.torch.save",
        "sharded": "shardwise.saving.torch_saves.ChunkWriter",
        "ranks": "shardwise.saving.torch_saves.torch.save",
    }[form]
    with mock.patch(what, broken) if dist.get_rank() == failing else contextlib.nullcontext():
        model = sharded("", 2)
        found = attempt(lambda: shardwise.save_accelerate_model(model, folder, FORMS[form], options=SMALL))
    dist.barrier()
    after = sorted(path.name for path in Path(folder).rglob("*"))
    shardwise.load_accelerate_model(target, folder)
    faults = differences(whole_model(target), whole_model(standing))
    return found, faults + [f"{before} became {after}"] * (before != after)


def unlike_arguments(folder: str) -> tuple[str, str]:
    model = sharded("", 1)
    return attempt(lambda: shardwise.save_accelerate_model(model, folder, number=dist.get_rank()))
