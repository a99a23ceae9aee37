"""Ways to bring a checkpoint up as a model sharded by FSDP2. Each is called on every rank. Collective: yes.

[Note: Loaders] Each is written as a careful user writes it, in the form that costs it least. If rank 0 alone loads,
the others have their model on meta from the start and open no file; with accelerate's environment alone,
transformers' ``from_pretrained`` would have them read everything. ``fsdp2_prepare_model`` is called as
``Accelerator.prepare`` calls it: ``Accelerator`` itself matched FSDP on accelerators only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.harness.meter import timestamp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Request:
    """A folder or URL with a checkpoint, "auto" or a dtype, and whether PEFT's adapter is on all linear layers."""

    folder: str
    dtype: str = "auto"
    lora: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model, what its loader reports, and when it began to shard what it had loaded; 0 if both are one."""

    model: Any
    facts: Mapping[str, Any] = field(default_factory=dict)
    wrapped_from: float = 0.0


def own_device() -> torch.device:
    """The accelerator that this rank's process group works on, or the CPU."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or not dist.is_initialized():
        return torch.device("cpu")
    if dist.get_default_backend_for_device(kind) not in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def synchronize() -> None:
    """Wait until the device of this rank has done all its work."""
    if own_device().type != "cpu":
        torch.accelerator.synchronize()


def with_shardwise(request: Request) -> Loaded:
    """shardwise, with default options."""
    import shardwise

    keywords: dict[str, Any] = {"tuning": shardwise.Lora(adapter_config())} if request.lora else {}
    model, report = shardwise.from_pretrained(
        request.folder, dtype=request.dtype, output_loading_info=True, **keywords
    )
    facts = {
        "phases": dict(report.seconds),
        "read_bytes": report.read_bytes,
        "checkpoint_bytes": report.checkpoint_bytes,
    }
    return Loaded(model, facts)


def with_transformers(request: Request) -> Loaded:
    """transformers' own FSDP2. An adapter is added after it, whole on every rank, with the same seed on all."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(request.folder, dtype=request.dtype, distributed_config=config)
    torch.manual_seed(0)
    return Loaded(_add_adapter(model, request))


def with_fully_shard(request: Request) -> Loaded:
    """torch: every rank loads all, then ``fully_shard``."""
    model = _add_adapter(_load_whole(request), request)
    start = timestamp()
    return Loaded(_wrap(model), wrapped_from=start)


def with_set_model_state_dict(request: Request) -> Loaded:
    """torch: rank 0 loads, ``set_model_state_dict`` broadcasts."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = _add_adapter(_build_on_meta(request), request)
    fqns = _fqn_by_key(model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    state_dict: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        for path in sorted(Path(request.folder).glob("*.safetensors")):
            state_dict |= {fqns.get(key, key): tensor for key, tensor in load_file(path).items()}
        for name, tensor in state_dict.items():
            state_dict[name] = tensor.to(dtypes.get(name, tensor.dtype))
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                state_dict[name] = _initialize(name, torch.empty(parameter.shape, dtype=parameter.dtype))
    start = timestamp()
    model = _wrap(model)
    # Not strict: a tied head is not stored, and is the embedding's parameter.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, state_dict, options=options)
    _base(model).tie_weights()
    return Loaded(model, wrapped_from=start)


def with_accelerate(request: Request) -> Loaded:
    """accelerate's FSDP2 without ``cpu_ram_efficient_loading``: every rank loads all."""
    model = _add_adapter(_load_whole(request), request)
    start = timestamp()
    return Loaded(_prepare(model, is_efficient=False), wrapped_from=start)


def with_efficient_accelerate(request: Request) -> Loaded:
    """accelerate's FSDP2 with ``cpu_ram_efficient_loading``: rank 0 loads, each tensor is broadcast to all."""
    model = _build_on_meta(request) if dist.get_rank() else _load_whole(request)
    model = _add_adapter(model, request)
    start = timestamp()
    return Loaded(_prepare(model, is_efficient=True), wrapped_from=start)


def with_dcp(request: Request) -> Loaded:
    """torch: distributed checkpoint, with its reader of Hugging Face's layout."""
    import torch.distributed.checkpoint as dcp

    model = _add_adapter(_build_on_meta(request), request)
    keys = {fqn: key for key, fqn in _fqn_by_key(model).items()}
    model = _wrap(model)
    parameters = dict(model.named_parameters())  # tied ones once
    targets = {
        keys[fqn]: torch.empty_like(parameter, device=own_device())
        for fqn, parameter in parameters.items()
        if fqn in keys
    }
    dcp.load(targets, storage_reader=dcp.HuggingFaceStorageReader(request.folder))
    state_dict = {fqn: targets[keys[fqn]] for fqn in parameters if fqn in keys}
    torch.manual_seed(0)
    for fqn, parameter in parameters.items():
        if fqn not in keys:
            state_dict[fqn] = _initialize(fqn, torch.empty_like(parameter, device="cpu"))
    model.load_state_dict(state_dict, strict=False, assign=True)
    _base(model).tie_weights()
    return Loaded(model)


def adapter_config() -> Any:
    """A LoRA of r=16 on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def _load_whole(request: Request) -> Any:
    return AutoModelForCausalLM.from_pretrained(request.folder, dtype=request.dtype)


def _build_on_meta(request: Request) -> Any:
    """The model on meta, but for the rotary embedding's buffers, which no checkpoint has."""
    config = AutoConfig.from_pretrained(request.folder)
    dtype = config.dtype if request.dtype == "auto" else getattr(torch, request.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()


def _add_adapter(model: Any, request: Request) -> Any:
    """With PEFT's adapter if asked for, in the dtype of the base: FSDP2 requires one dtype in a group."""
    if not request.lora:
        return model
    from peft import get_peft_model

    is_on_meta = next(model.parameters()).is_meta
    return get_peft_model(model, adapter_config(), autocast_adapter_dtype=False, low_cpu_mem_usage=is_on_meta)


def _initialize(fqn: str, matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of an adapter as PEFT initializes it."""
    with torch.no_grad():
        return nn.init.kaiming_uniform_(matrix, a=5**0.5) if ".lora_A." in fqn else nn.init.zeros_(matrix)


def _fqn_by_key(model: Any) -> dict[str, str]:
    """Names in the model by stored keys, of all parameters that a checkpoint has."""
    return {
        fqn.removeprefix("base_model.model.").replace(".base_layer.", "."): fqn
        for fqn, _ in model.named_parameters()
        if ".lora_" not in fqn
    }


def _base(model: Any) -> Any:
    """The model of transformers within PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _wrap(model: Any) -> Any:
    mesh = init_device_mesh(own_device().type, (dist.get_world_size(),))
    for layer in _base(model).model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _prepare(model: Any, *, is_efficient: bool) -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=is_efficient,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
    )
    accelerator: Any = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=own_device(),
    )
    return fsdp2_prepare_model(accelerator, model)


LOADERS: dict[str, Callable[[Request], Loaded]] = {
    "shardwise": with_shardwise,
    "transformers": with_transformers,
    "fully_shard": with_fully_shard,
    "set_model_state_dict": with_set_model_state_dict,
    "accelerate": with_accelerate,
    "accelerate-efficient": with_efficient_accelerate,
    "dcp": with_dcp,
}
