"""Functions that ranks run on accelerate's files."""

import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin, fsdp_utils
from tests import zoo
from tests.state.optimizing import MAKERS, differences, in_order, sharded, trained
from torch import nn
from torch.optim import Optimizer

import shardwise
from shardwise.saving.commit_plan import Renames, temporary_name

SMALL = shardwise.options.StateOptions(budget_bytes=4096)

FORMS = {"full": "full", "sharded": "sharded", "ranks": "local"}

_THEY_HAVE_RANK_FILES = "use_dcp" in inspect.signature(fsdp_utils.save_fsdp_model).parameters
"""Which came with accelerate 1.14."""

THEIR_FORMS = tuple(form for form in FORMS if form != "ranks" or _THEY_HAVE_RANK_FILES)

THEIR_ADAPTER_FORMS = tuple(form for form in THEIR_FORMS if form != "full" or _THEY_HAVE_RANK_FILES)
"""Before that, accelerate's file of a whole adapter held the first rank's DTensors, which nobody can load."""


class Theirs:
    """accelerate's own functions, as its ``Accelerator`` calls them under FSDP2."""

    def __init__(self, form: str, number: int = 0) -> None:
        kind = "FULL_STATE_DICT" if form == "full" else "SHARDED_STATE_DICT"
        self.number = number
        self._keywords = {"use_dcp": form != "ranks"} if _THEY_HAVE_RANK_FILES else {}
        self.plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        rank = dist.get_rank()
        self.accelerator = SimpleNamespace(
            process_index=rank,
            num_processes=dist.get_world_size(),
            is_fsdp2=True,
            is_main_process=rank == 0,
            wait_for_everyone=dist.barrier,
        )

    def _call(self, function: Any, *args: Any, **keywords: Any) -> Any:
        # Its own logger asks for the state of an Accelerator, which on the CPU never knows of FSDP.
        quiet = mock.patch.object(fsdp_utils, "logger", logging.getLogger("accelerate"))
        with quiet, zoo.silenced():
            return function(self.plugin, self.accelerator, *args, self.number, **self._keywords, **keywords)

    def save_model(self, model: nn.Module, folder: str, **keywords: Any) -> None:
        self._call(fsdp_utils.save_fsdp_model, model, folder, **keywords)
        dist.barrier()

    def load_model(self, model: nn.Module, folder: str, **keywords: Any) -> Any:
        return self._call(fsdp_utils.load_fsdp_model, model, folder, **keywords)

    def save_optimizer(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self._call(fsdp_utils.save_fsdp_optimizer, optimizer, model, folder)
        dist.barrier()

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, folder: str) -> None:
        self._call(fsdp_utils.load_fsdp_optimizer, optimizer, model, folder)


def whole_model(model: nn.Module) -> dict[str, torch.Tensor]:
    return shardwise.get_model_state_dict(model, "full_on_all_ranks")


def whole_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    state = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")
    for group in state["param_groups"]:
        if "betas" in group:  # of which torch makes lists
            group["betas"] = tuple(group["betas"])
    return in_order(state)


def saved(folder: str, form: str, number: int = 0) -> tuple[nn.Module, Optimizer]:
    """By us."""
    model = sharded("", 1)
    (optimizer,) = trained(model, "adamw", 2)
    shardwise.save_accelerate_model(model, folder, FORMS[form], number=number, options=SMALL)
    shardwise.save_accelerate_optimizer(model, optimizer, folder, FORMS[form], number=number, options=SMALL)
    return model, optimizer


def ours_to_theirs(folder: str, form: str, number: int) -> list[str]:
    """What we write, accelerate loads."""
    model, optimizer = saved(folder, form, number)
    target = sharded("", 2)
    (temporary_name,) = trained(target, "adamw", 3)  # torch loads only what it has a state of already
    theirs = Theirs(form, number)
    theirs.load_model(target, folder)
    theirs.load_optimizer(target, temporary_name, folder)
    faults = differences(whole_model(target), whole_model(model), "model")
    return faults + differences(
        whole_optimizer(target, temporary_name), whole_optimizer(model, optimizer), "optimizer"
    )


def saved_by_them(folder: str, form: str, number: int = 0) -> tuple[nn.Module, Optimizer]:
    model = sharded("", 1)
    (optimizer,) = trained(model, "adamw", 2)
    theirs = Theirs(form, number)
    theirs.save_model(model, folder)
    theirs.save_optimizer(model, optimizer, folder)
    return model, optimizer


def theirs_to_ours(folder: str, form: str, number: int, child: bool) -> list[str]:
    """What accelerate writes, we load."""
    model, optimizer = saved_by_them(folder, form, number)
    ways = [Path(folder)] * 2
    if child:
        names = {"full": ".bin" if number == 0 else f"_{number}.bin", "sharded": f"_{number}", "ranks": ""}
        tail = names[form] or f"_{number}_rank0.bin"
        ways = [Path(folder, f"{stem}{tail}") for stem in ("pytorch_model_fsdp", "optimizer")]
    return loaded_like(model, optimizer, *ways, number)


def loaded_like(model: nn.Module, optimizer: Optimizer, weights: Path, moments: Path, number: int) -> list[str]:
    target = sharded("", 2)
    (temporary_name,) = MAKERS["adamw"](target, 0.5)
    report = shardwise.load_accelerate_model(target, weights, number=number, options=SMALL)
    told = shardwise.load_accelerate_optimizer(target, temporary_name, moments, number=number, options=SMALL)
    faults = differences(whole_model(target), whole_model(model), "model")
    faults += differences(whole_optimizer(target, temporary_name), whole_optimizer(model, optimizer), "optimizer")
    for item in (report, told):
        if item.missing or item.unexpected or item.mismatched or item.cast:
            faults.append(str(item))
    return faults


def save(folder: str, form: str, writer: str = "shardwise") -> None:
    (saved_by_them if writer == "accelerate" else saved)(folder, form)


def resume(folder: str) -> list[str]:
    """On whatever number of ranks these are."""
    model = sharded("", 1)
    (optimizer,) = trained(model, "adamw", 2)
    return loaded_like(model, optimizer, Path(folder), Path(folder), 0)


def of_an_interrupted_save(folder: str, form: str) -> tuple[list[str], list[str]]:
    """What ranks read where files have not got their names yet; and what has changed in the folder."""
    model, optimizer = saved(folder, form)
    names = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    dist.barrier()
    if dist.get_rank() == 0:
        given = [name for name in names if not name.endswith(".distcp")]
        for name in given[1:]:
            Path(folder, name).rename(Path(folder, temporary_name(name, "0123abcd")))
        listed = Renames("0123abcd", tuple(given))
        Path(folder, listed.file).write_bytes(listed.to_bytes())
    dist.barrier()
    before = sorted(map(str, Path(folder).rglob("*")))
    faults = loaded_like(model, optimizer, Path(folder), Path(folder), 0)
    dist.barrier()
    return faults, sorted({*before} ^ {*map(str, Path(folder).rglob("*"))})
