"""Optimizers that keep moments in blocks, and Adafactor: what ranks do in their tests, called by ``on_peers``."""

from __future__ import annotations

import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.quiet import quieten
from tests.training import stepped, stepping
from tests.training.on_peers import TRAINED
from tests.verbs.on_ranks import attempt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

import shardwise
from shardwise import Checkpointer, Sharding, TrainState
from shardwise.execution.ranks.world import World
from shardwise.models.view import local_tensor, raw_bytes
from shardwise.options import EveryRank, FullState, Ignore, WholeModel
from shardwise.training.checkpoints import Checkpoints, KeptInFolders, SettingsAsked
from shardwise.training.loop import train
from shardwise.training.optimizing.optimizer_memory import StateBytes
from shardwise.training.optimizing.optimizers import SHORT_NAMES, class_named, optimizers_of
from shardwise.training.optimizing.shard_steps import step_shards
from shardwise.training.options import NamedOptimizer
from shardwise.training.stopping import StopRequest

NAMES = (
    "AdamW8bit",
    "Lion8bit",
    "pagedadamw32bit",
    "torchao.optim.AdamW8bit",
    "AdamW4bit",
    "AdamWFp8",
    "Adafactor",
)


EVERYWHERE = FullState(on=EveryRank())


class Shapes(nn.Module):
    """In blocks on two ranks, or on one only; one that a second rank has nothing of, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.square = nn.Linear(64, 256)
        self.odd = nn.Linear(256, 33)
        self.line = nn.Linear(8192, 1)
        self.norm = nn.LayerNorm(256)


def ready() -> None:
    quieten()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sharded(mesh: tuple[int, ...] = ()) -> nn.Module:
    model = Shapes()
    if size() > 1:
        chosen = Sharding(wrap=WholeModel())
        if mesh:
            names = ("replicate", "shard")
            chosen = Sharding(mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names), wrap=WholeModel())
        shardwise.shard(model, chosen)
    return model


def made(name: str, model: nn.Module, **settings: Any) -> Optimizer:
    kind: Any = class_named(NamedOptimizer(name))
    optimizer: Optimizer = step_shards(kind(model.parameters(), lr=1e-2, **settings))
    return optimizer


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=draw).to(parameter.device)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient
    optimizer.step()


def bits(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """All that an optimizer holds on this rank, as bytes."""
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state[parameter].items():
            local = local_tensor(value) if isinstance(value, torch.Tensor) else value
            parts = {"": local} if not hasattr(local, "codes") else {".codes": local.codes, ".scale": local.scale}
            for part, each in parts.items():
                is_tensor = isinstance(each, torch.Tensor)
                found[f"{name}: {entry}{part}"] = raw_bytes(each).cpu().tolist() if is_tensor else each
    return found


def numbers(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Moments as numbers, whole, on every rank: torchao's by its own code, bitsandbytes' by its formula."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        for entry, value in state.items():
            if not isinstance(value, torch.Tensor) or entry.startswith(("qmap", "absmax", "step")):
                continue
            local: Any = local_tensor(value)
            if hasattr(local, "codes"):
                local = local.dequantize()
            elif local.dtype is torch.uint8:
                number = entry[-1]
                flat = state[f"qmap{number}"][local.flatten().int()]
                scale = state[f"absmax{number}"].repeat_interleave(256)[: flat.numel()]
                local = (flat * scale).view(local.shape)
            if isinstance(value, DTensor):
                found[f"{name}: {entry}"] = _whole(local, value)
            else:
                found[f"{name}: {entry}"] = _whole(local, parameter.detach())
    return found


def _whole(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return local.clone()
    return (
        DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        .full_tensor()
        .clone()
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: stepping.whole(value) for name, value in model.named_parameters()}


def save_each(folder: str) -> dict[str, Any]:
    """Two steps of each, saved; what comes back on as many ranks, and from the state that verbs hand out."""
    ready()
    told: dict[str, Any] = {}
    for name in NAMES:
        model = sharded()
        optimizer = made(name, model)
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        own = Path(folder, name)
        Checkpointer(own).save(2, TrainState(model, optimizer))
        before, kept = bits(optimizer, model), numbers(model, optimizer)
        state = shardwise.optimizer_state(model, optimizer)
        fresh = sharded()
        other = made(name, fresh)
        Checkpointer(own).restore(TrainState(fresh, other))
        restored = bits(other, fresh) == before
        step(fresh, other, 5)  # what is there already takes values as well
        Checkpointer(own).restore(TrainState(fresh, other))
        again = bits(other, fresh) == before
        with torch.device("meta"):
            hollow = sharded()
        later = made(name, hollow)
        Checkpointer(own).restore(TrainState(hollow, later))
        brought_up = bits(later, hollow) == before
        third = made(name, fresh)
        shardwise.set_optimizer_state(fresh, third, state)
        handed = bits(third, fresh) == before
        step(model, optimizer, 2)
        step(fresh, third, 2)
        same = all(torch.equal(a, b) for a, b in zip(weights(model).values(), weights(fresh).values(), strict=True))
        if World.current().rank == 0:
            torch.save({"numbers": kept, "weights": weights(model)}, f"{folder}/{name}.pt")
        else:
            weights(model)
        told[name] = {
            "restored": restored,
            "brought up": brought_up,
            "again": again,
            "handed": handed,
            "goes on": same,
            "bits": len(before),
        }
    return told


def restore_each(folder: str, mesh: tuple[int, ...] = ()) -> dict[str, float]:
    """On other ranks, or another mesh: how far moments are off, of the largest; and weights after a step."""
    ready()
    told: dict[str, float] = {}
    for name in NAMES:
        model = sharded(mesh)
        optimizer = made(name, model)
        Checkpointer(Path(folder, name)).restore(TrainState(model, optimizer))
        found = numbers(model, optimizer)
        expected = torch.load(f"{folder}/{name}.pt", weights_only=True)
        told[name] = max(
            float((found[key] - value).abs().max() / value.abs().max().clip(1e-12))
            for key, value in expected["numbers"].items()
        )
        step(model, optimizer, 2)
        after = weights(model)
        off = {key: float((after[key] - value).abs().max()) for key, value in expected["weights"].items()}
        told[f"{name}, weights"] = max(off.values())
        told[f"{name}, in blocks on both"] = max(value for key, value in off.items() if "embed" not in key)
    return told


def refused(folder: str) -> dict[str, Any]:
    """What does not go together."""
    ready()
    told: dict[str, Any] = {}
    saved = Path(folder, "torchao.optim.AdamW8bit")
    model = sharded()
    told["into adamw"] = attempt(
        Checkpointer(saved).restore, TrainState(model, torch.optim.AdamW(model.parameters()))
    )
    other = made("AdamW8bit", model)
    told["of another library"] = attempt(Checkpointer(saved).restore, TrainState(model, other))
    smaller = made("torchao.optim.AdamW8bit", model, block_size=128)
    told["smaller blocks"] = attempt(Checkpointer(saved).restore, TrainState(model, smaller))
    ours = torch.optim.AdamW(model.parameters())
    step(model, ours, 0)
    Checkpointer(Path(folder, "plain")).save(1, TrainState(model, ours))
    eight = made("torchao.optim.AdamW8bit", model)
    told["of adamw"] = attempt(Checkpointer(Path(folder, "plain")).restore, TrainState(model, eight))
    told["left out"] = (
        Checkpointer(Path(folder, "plain"))
        .restore(TrainState(model, eight), on_mismatched=Ignore(only=("optimizers",)))
        .mismatched
    )
    told["untouched"] = len(eight.state)
    step(model, eight, 0)
    state = shardwise.optimizer_state(model, eight, EVERYWHERE)
    told["handed to adamw"] = attempt(
        shardwise.set_optimizer_state, model, torch.optim.AdamW(model.parameters()), state
    )
    entry = state["state"]["square.weight"]
    entry["exp_avg.scale"] = entry["exp_avg.scale"].flatten()[:7]
    entry["exp_avg.blocks"] = entry["exp_avg.blocks"].partition(";")[0] + "; shards 0/9"
    told["damaged"] = attempt(shardwise.set_optimizer_state, model, eight, state)
    alone: Any = class_named(NamedOptimizer("torchao.optim.AdamW8bit"))(nn.ModuleList([model]).parameters())
    uneven = nn.Sequential(nn.Linear(64, 143, bias=False))
    if size() > 1:
        shardwise.shard(uneven, Sharding(wrap=WholeModel()))
    alone = type(alone)(uneven.parameters(), lr=1e-2)
    step(uneven, alone, 0)
    entry["exp_avg.blocks"] = shardwise.optimizer_state(model, eight, EVERYWHERE)["state"]["square.weight"][
        "exp_avg.blocks"
    ]
    told["scales cut off"] = attempt(shardwise.set_optimizer_state, model, eight, state)
    del entry["exp_avg.scale"]
    told["without scales"] = attempt(shardwise.set_optimizer_state, model, eight, state)
    del entry["exp_avg.blocks"]
    told["codes alone"] = attempt(shardwise.set_optimizer_state, model, eight, state)
    whole = shardwise.optimizer_state(model, eight, EVERYWHERE)
    whole["state"]["square.weight"]["exp_avg"] = torch.zeros(256, 64)
    told["numbers for codes"] = attempt(shardwise.set_optimizer_state, model, eight, whole)
    del whole["state"]["square.weight"]["exp_avg"]
    told["without codes"] = attempt(shardwise.set_optimizer_state, model, eight, whole)
    files = Path(folder, "files")
    told["in accelerate's files"] = attempt(shardwise.save_accelerate_optimizer, model, eight, files)
    told["compiled for DTensors"] = dtensors_that_torchao_steps(model)
    both = made("bitsandbytes.optim.AdEMAMix8bit", model)
    step(model, both, 0)
    told["two moments in one"] = attempt(shardwise.optimizer_state, model, both)
    told["each for itself"] = attempt(shardwise.optimizer_state, uneven, alone)
    return told


def dtensors_that_torchao_steps(model: nn.Module) -> int:
    """What is compiled for one of them takes shards of all ranks to be as large."""
    from torchao.optim import adam

    seen: list[bool] = []
    stepped_by = adam.single_param_adam

    def watch(*args: Any) -> None:
        seen.extend(isinstance(each, DTensor) for each in args)
        stepped_by(*args)

    optimizer = made("torchao.optim.AdamW8bit", model)
    with mock.patch.object(adam, "single_param_adam", watch):
        step(model, optimizer, 0)
    return sum(seen) if seen else -1


def saved_and_restored_on_a_gpu(folder: str, name: str) -> dict[str, Any]:
    """Of one process. The matrix is large enough to be paged."""
    ready()
    model, fresh = (nn.Linear(512, 512, device="cuda") for _ in range(2))
    fresh.load_state_dict(model.state_dict())
    optimizer, other = made(name, model), made(name, fresh)
    step(model, optimizer, 0)
    Checkpointer(folder).save(1, TrainState(model, optimizer))
    Checkpointer(folder).restore(TrainState(fresh, other))
    restored = bits(optimizer, model) == bits(other, fresh)
    step(model, optimizer, 1)
    step(fresh, other, 1)
    return {
        "bits": len(bits(optimizer, model)),
        "restored": restored,
        "goes on": all(map(torch.equal, weights(model).values(), weights(fresh).values())),
        "paged": [
            bool(getattr(each.state[of.weight]["state1"], "is_paged", False))
            for each, of in ((optimizer, model), (other, fresh))
        ],
    }


def wide() -> nn.Module:
    """Some of its matrices are in blocks on two ranks."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, bos_token_id=None, tie_word_embeddings=True))


def trained(file: str, name: str, **more: Any) -> list[float]:
    chosen = stepped.options(name)
    losses: list[float] = train(stepping.sharded(wide()), stepped.steps_of(file, chosen), chosen, **more).losses
    return losses


def begun(file: str, folder: str, name: str) -> list[float]:
    """A training that is stopped in its first step."""
    stop = StopRequest()
    stop.number = signal.SIGTERM
    keeper = KeptInFolders(Checkpointer(Path(folder, name)), None)
    return trained(file, name, checkpoints=Checkpoints(keeper), stop=stop)


def the_rest(file: str, folder: str, name: str) -> list[float]:
    source = Checkpointer(Path(folder, name))
    return trained(file, name, checkpoints=Checkpoints(KeptInFolders(source, source)))


def going_on_otherwise(file: str, folder: str, name: str) -> list[Any]:
    """With another rate, and more steps: the rates of the last step, and what is said of it."""
    source = Checkpointer(Path(folder, name))
    chosen = replace(stepped.options(name, 6), learning_rate=4e-3)
    told: list[Any] = []
    report = train(
        stepping.sharded(wide()),
        stepped.steps_of(file, chosen),
        chosen,
        lambda facts: told.append(getattr(facts, "learning_rate", None)),
        checkpoints=Checkpoints(KeptInFolders(source, source), settings=SettingsAsked()),
    )
    return [report.last_step, [rate for rate in told if rate is not None][-1], list(report.remarks)]


def train_each(file: str, folder: str) -> dict[str, Any]:
    ready()
    of_libraries = [name for name, path in SHORT_NAMES.items() if path.startswith(("bitsandbytes", "torchao"))]
    names = [*of_libraries, "PagedAdamW8bit", "adamw_bnb_8bit", "torchao.optim.AdamW8bit"]
    return {
        "said": {name: stepped.said(name) for name in names} if size() > 1 else {},
        "losses": {name: trained(file, name) for name in (*TRAINED, "adamw")},
        "begun": {name: begun(file, f"{folder}/{size()}", name) for name in (*TRAINED, "adamw")},
        "otherwise": {name: going_on_otherwise(file, f"{folder}/{size()}", name) for name in (*TRAINED, "adamw")},
        "rest": {name: the_rest(file, f"{folder}/{size()}", name) for name in TRAINED},
        "bytes": {name: state_bytes(name) for name in (*TRAINED, "AdamW4bit", "Adafactor", "adamw")},
    }


def rest_of(file: str, folder: str) -> dict[str, list[float]]:
    """The rest of the trainings that two ranks have begun."""
    ready()
    return {name: the_rest(file, f"{folder}/2", name) for name in TRAINED}


def state_bytes(name: str) -> tuple[int, int]:
    """Foreseen, and there after a step."""
    model = sharded()
    [recipe] = optimizers_of(stepped.options(name)).values()
    optimizer = recipe.of(dict(model.named_parameters()))
    step(model, optimizer, 0)
    constants = ("step", "qmap")
    there = sum(
        len(value)
        for key, value in bits(optimizer, model).items()
        if not key.partition(": ")[2].startswith(constants)
    )
    return StateBytes(recipe).of(model.parameters()), there
