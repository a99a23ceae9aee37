"""What the ranks of a test world do. Importable, so that spawned processes find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from tests import truth
from tests.tuning import reference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise


def attempt(function: Any, *args: Any) -> tuple[str, str]:
    """(kind, text) of the error a call raises; ("", "") when it raises none."""
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def place() -> tuple[int, int]:
    """This rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def bring_up(directory: str, keywords: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> nn.Module:
    """The model, on a mesh with these axes."""
    torch.set_num_threads(1)
    settings = dict(keywords)
    if mesh is not None:
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        settings["sharding"] = shardwise.Sharding(mesh=made)
    model: nn.Module = shardwise.from_pretrained(directory, **settings)
    return model


def error_of(directory: str, keywords: dict[str, Any]) -> tuple[str, str]:
    return attempt(lambda: bring_up(directory, keywords))


def report_of(directory: str, keywords: dict[str, Any]) -> dict[str, Any]:
    _, report = shardwise.from_pretrained(directory, output_loading_info=True, **keywords)
    return {**report.to_dict(), "text": str(report)}


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: truth.whole(parameter.detach()).clone() for name, parameter in named}


def values_after_load(
    directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None = None
) -> dict[str, torch.Tensor]:
    return whole_values(bring_up(directory, keywords, mesh))


def set_values(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Whole values into a model that may be sharded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in values:
                value = values[name].to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def logits(directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None = None) -> torch.Tensor:
    """What the model answers once its adapter has other values than at first."""
    model = bring_up(directory, keywords, mesh)
    set_values(model, reference.unsettle(whole_values(model)))
    with torch.no_grad():
        answer: torch.Tensor = model(input_ids=reference.batch(2, seed=5), use_cache=False).logits
    return answer


def train(
    directory: str, keywords: dict[str, Any], mesh: dict[str, int] | None, steps: int, rows: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of this rank's rows, and all parameters at the end."""
    model = bring_up(directory, keywords, mesh)
    set_values(model, reference.unsettle(whole_values(model)))
    losses = reference.train(model, steps, rows, *place())
    return losses, whole_values(model)


def what_is_sharded(directory: str, keywords: dict[str, Any]) -> dict[str, str]:
    """Placement of each parameter, and the shape that this rank holds."""
    model = bring_up(directory, keywords)
    return {
        name: f"{parameter.placements} {tuple(parameter.to_local().shape)}"
        if isinstance(parameter, DTensor)
        else f"whole {tuple(parameter.shape)}"
        for name, parameter in model.named_parameters()
    }


def save_adapter(
    directory: str, keywords: dict[str, Any], adapter: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Save an adapter whose elements all matter; what the live model answers, and its values."""
    model = bring_up(directory, keywords)
    values = whole_values(model)
    set_values(model, reference.unsettle(values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_" not in name:
                parameter.mul_(1.5)
    name = keywords["tuning"].adapter
    report = shardwise.save_adapter(model, adapter, adapter=name, verify=shardwise.CompareWithMemory())
    assert report.is_verified
    with torch.no_grad():
        answer = model(input_ids=reference.batch(2, seed=5), use_cache=False).logits
    return answer, whole_values(model)


def save_adapter_of_ranks(directory: str, keywords: dict[str, Any], adapter: str) -> dict[str, int]:
    """Save an adapter that every rank has filled with its own number; the rows that this rank held, by key."""
    model = bring_up(directory, keywords)
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor)
            local = parameter.detach().to_local()
            local.fill_(dist.get_rank() + 1.0)
            rows[name.replace(".default", "")] = local.shape[0]
    shardwise.save_adapter(model, adapter)
    return {
        key.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): count for key, count in rows.items()
    }


def save_wrapped(directory: str, keywords: dict[str, Any], adapter: str) -> None:
    """Save the adapter of a model with checkpointed blocks, compiled."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    model = bring_up(directory, keywords)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Qwen3DecoderLayer))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    shardwise.save_adapter(torch.compile(model), adapter)  # type: ignore[arg-type]


def held_in_training(directory: str, keywords: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """What this rank holds after a step of AdamW, in bytes, and the report of the load."""
    from torch.distributed.fsdp import FSDPModule

    from shardwise.models import _torch_private

    torch.set_num_threads(1)
    model, report = shardwise.from_pretrained(directory, output_loading_info=True, **keywords)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)
    tokens = reference.batch(1, seed=dist.get_rank())
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    optimizer.step()
    assert len(optimizer.state) == len(trained)

    def nbytes(tensors: Any) -> int:
        return sum(truth_local(tensor).nbytes for tensor in tensors)

    managers = _torch_private.fsdp_params(model)
    padded = {p: _torch_private.padded_numel(m) * p.element_size() for p, m in managers.items()}
    groups = [
        sum(padded[p] * place()[1] for p in found)
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for found in _torch_private_groups(module)
    ]
    held = {
        "weights": nbytes(model.parameters()),
        "padding": sum(padded[p] - truth_local(p).nbytes for p in padded),
        "gradients": nbytes(p.grad for p in trained),
        "moments": nbytes(s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")),
        "largest": max(groups),
    }
    return held, report.to_dict()


def truth_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _torch_private_groups(module: nn.Module) -> list[list[nn.Parameter]]:
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [[item.sharded_param for item in group.fsdp_params] for group in groups]
