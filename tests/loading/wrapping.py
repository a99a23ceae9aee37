"""A model whose layers are wrapped for activation checkpointing and compiled, on its way in and out."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.small_checkpoints import small_qwen3
from tests.support.world import attempt
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise


class Compiled(nn.Module):
    """What ``torch.compile`` makes of a module, as far as names go; importing the compiler takes seconds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return self._orig_mod(*args, **keywords)


def wrapped() -> nn.Module:
    model = small_qwen3()
    for number, layer in enumerate(model.model.layers):
        layer.mlp = checkpoint_wrapper(layer.mlp)
        model.model.layers[number] = checkpoint_wrapper(Compiled(layer))
    model.lm_head = Compiled(model.lm_head)
    return model


def shown(checkpoint: str, folder: str) -> dict[str, str]:
    """All that reports, states and errors say, and what is in the files, by what was done."""
    root = Path(folder)
    said: dict[str, object] = {}
    for policy in (shardwise.options.Classes(("Qwen3DecoderLayer",)), shardwise.options.MinSize(1000), "auto"):
        model = wrapped()
        said[f"shard, {policy}"] = shardwise.shard(model, shardwise.Sharding(wrap=policy))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    options = shardwise.options.SaveOptions(progress=False)
    said["save"] = shardwise.save(model, root / "saved", dtype="bfloat16", options=options)
    said["files of save"] = [path.read_bytes() for path in sorted((root / "saved").iterdir())]
    said["stream"] = [key for key, _ in shardwise.iter_hf_tensors(model)]
    state = shardwise.get_model_state_dict(model, "full_on_all_ranks")
    said["state"] = list(state)
    said["set state"] = shardwise.set_model_state_dict(model, {name: value.half() for name, value in state.items()})
    moments = shardwise.get_optimizer_state_dict(model, optimizer, "full_on_all_ranks")
    said["optimizer"] = [moments["param_groups"], list(moments["state"])]
    said["set optimizer"] = shardwise.set_optimizer_state_dict(model, optimizer, moments)
    said["load"] = shardwise.load(model, checkpoint)
    with shardwise.Checkpointer(root / "checkpoints") as checkpointer:
        said["checkpoint"] = checkpointer.save(1, shardwise.TrainState(model, optimizer))
        said["restore"] = checkpointer.restore(shardwise.TrainState(model, optimizer))
    said["accelerate"] = [
        shardwise.save_accelerate_model(model, root),
        shardwise.load_accelerate_model(model, root),
        shardwise.save_accelerate_optimizer(model, optimizer, root),
        shardwise.load_accelerate_optimizer(model, optimizer, root),
    ]

    without = {name: value for name, value in state.items() if "layers.1" not in name}
    said["missing"] = attempt(shardwise.set_model_state_dict, model, without)
    torch.manual_seed(dist.get_rank())
    model.model.added = checkpoint_wrapper(nn.Linear(2, 2))
    said["differing"] = attempt(shardwise.save, model, root / "refused")
    return {
        what: f"{thing} {thing.to_dict()}" if hasattr(thing, "to_dict") else str(thing)
        for what, thing in said.items()
    }
