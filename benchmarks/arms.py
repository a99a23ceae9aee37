"""The ways of bringing a checkpoint up as a model sharded by FSDP2. Each is called on every rank.

Every arm returns a model whose parameters hold their values and whose buffers are computed. Where an arm leaves
something to its user (buffers on meta, ties), the arm does what a careful user would, in the cheapest way.
"""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.place import own_device
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass(frozen=True)
class Request:
    """A folder with a checkpoint; "auto" or the name of a dtype; ranks that hold the same shards.

    With ``lora``, the model has PEFT's adapter on all its linear layers.
    """

    folder: Path
    dtype: str = "auto"
    replicas: int = 1
    lora: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model, and what its loader says about the load."""

    model: nn.Module
    facts: Mapping[str, Any] = field(default_factory=dict)


def with_shardwise(request: Request, **keywords: Any) -> Loaded:
    """shardwise, options left at their defaults."""
    import shardwise

    if request.replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        sizes = (request.replicas, dist.get_world_size() // request.replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        keywords["sharding"] = shardwise.Sharding(mesh=mesh)
        keywords["options"] = shardwise.options.LoadOptions(shared_reads="always")
    if request.lora:
        keywords["tuning"] = shardwise.Lora(adapter_config())
    model, report = shardwise.from_pretrained(
        request.folder, dtype=request.dtype, output_loading_info=True, **keywords
    )
    facts = {
        "seconds": dict(report.seconds),
        "read_bytes": report.read_bytes,
        "reads": report.reads,
        "checkpoint_bytes": report.checkpoint_bytes,
    }
    return Loaded(model, facts)


def with_transformers(request: Request) -> Loaded:
    """transformers' own way to FSDP2. An adapter comes after it, whole on every rank, with the same seed on all."""
    from transformers.distributed import DistributedConfig

    shards = dist.get_world_size() // request.replicas
    config = DistributedConfig(fsdp_size=shards, dp_replicate_size=request.replicas)
    model = AutoModelForCausalLM.from_pretrained(request.folder, dtype=request.dtype, distributed_config=config)
    torch.manual_seed(0)
    return Loaded(adapted(model, request))


def with_accelerate(request: Request) -> Loaded:
    """accelerate's FSDP2 with ``cpu_ram_efficient_loading``: rank 0 loads, then each tensor is sent to all.

    ``fsdp2_prepare_model`` is called as ``Accelerator.prepare`` calls it; ``Accelerator`` itself matched FSDP on
    accelerators only. Ranks other than the first start from a model on meta and read nothing. (transformers makes
    them read too; that is not held against accelerate.)
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(request.folder, dtype=request.dtype)
    else:
        model = _on_meta(request)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
    )
    return Loaded(fsdp2_prepare_model(accelerator, adapted(model, request)))


def with_set_model_state_dict(request: Request) -> Loaded:
    """torch: rank 0 reads with safetensors, ``set_model_state_dict`` broadcasts."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = adapted(_on_meta(request), request)
    names = in_model(model)
    model = _wrapped(model)
    whole: dict[str, torch.Tensor] = {}
    if dist.get_rank() == 0:
        for path in sorted(request.folder.glob("*.safetensors")):
            whole |= {names.get(key, key): tensor for key, tensor in load_file(path).items()}
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                whole[name] = begun(name, torch.empty(parameter.shape, dtype=parameter.dtype))
    # Not strict: a tied head is not stored, and is the embedding's own parameter in the model.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(model, whole, options=options)
    _base(model).tie_weights()
    return Loaded(model)


def with_dcp(request: Request) -> Loaded:
    """torch: distributed checkpoint, with its reader of Hugging Face's layout."""
    import torch.distributed.checkpoint as dcp

    model = adapted(_on_meta(request), request)
    stored = {name: key for key, name in in_model(model).items()}
    model = _wrapped(model)
    parameters = dict(model.named_parameters())  # tied ones once
    wanted = {
        stored[name]: torch.empty_like(parameter, device=own_device())
        for name, parameter in parameters.items()
        if name in stored
    }
    dcp.load(wanted, storage_reader=dcp.HuggingFaceStorageReader(str(request.folder)))
    loaded = {name: wanted[stored[name]] for name in parameters if name in stored}
    torch.manual_seed(0)
    for name, parameter in parameters.items():
        if name not in stored:
            loaded[name] = begun(name, torch.empty_like(parameter, device="cpu"))
    model.load_state_dict(loaded, strict=False, assign=True)
    _base(model).tie_weights()
    return Loaded(model)


def with_runai(request: Request) -> Loaded:
    """Run:ai's streamer, given shardwise's row plan: each rank asks for its own rows, and copies what comes.

    By itself it reads whole tensors, on every rank. For dense models, sharded on rows, under their own names.
    """
    from runai_model_streamer.file_streamer import FileChunks, FileStreamer

    model = adapted(_on_meta(request), request)
    stored = {name: key for key, name in in_model(model).items()}
    model = _wrapped(model)
    model.to_empty(device="cpu")
    _base(model).tie_weights()
    rotary = _base(model).model.rotary_emb
    _base(model).model.rotary_emb = type(rotary)(config=_base(model).config)
    chunks, targets = _rows_wanted(request.folder, dict(model.named_parameters()), stored)
    files = [FileChunks(n, path, *map(list, zip(*ranges, strict=True))) for n, (path, ranges) in enumerate(chunks)]
    with FileStreamer() as streamer, torch.no_grad():
        streamer.stream_files(files)
        for file, number, found in streamer.get_chunks():
            local, dtype = targets[file][number]
            local.view(-1).copy_(found.view(-1).view(dtype))
    return Loaded(model.eval())


def _rows_wanted(
    folder: Path, parameters: Mapping[str, Any], stored: Mapping[str, str]
) -> tuple[list[tuple[str, list[tuple[int, int]]]], list[list[tuple[torch.Tensor, torch.dtype]]]]:
    """Of each file the (offset, size) of this rank's rows, and where each goes, with its dtype in the file."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    wanted = {stored[name]: parameter for name, parameter in parameters.items() if name in stored}
    chunks: list[tuple[str, list[tuple[int, int]]]] = []
    targets: list[list[tuple[torch.Tensor, torch.dtype]]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(nbytes))
        ranges: list[tuple[int, int]] = []
        places: list[tuple[torch.Tensor, torch.dtype]] = []
        for key, entry in header.items():
            if key not in wanted:
                continue
            parameter = wanted[key].detach()
            local = parameter.to_local()
            _, offsets = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            first, last = entry["data_offsets"]
            row = (last - first) // parameter.shape[0]
            if local.numel():
                ranges.append((8 + nbytes + first + offsets[0] * row, local.shape[0] * row))
                places.append((local, {"BF16": torch.bfloat16, "F32": torch.float32}[entry["dtype"]]))
        if ranges:
            chunks.append((str(path), ranges))
            targets.append(places)
    return chunks, targets


def why_no_runai() -> str:
    """Why Run:ai's streamer cannot be measured here; empty when it can."""
    if importlib.util.find_spec("runai_model_streamer") is None:
        return "runai-model-streamer is not installed (pip install runai-model-streamer)"
    return ""


def _on_meta(request: Request) -> Any:
    """The model on meta, but for the rotary embedding's buffers, which no checkpoint holds."""
    config = AutoConfig.from_pretrained(request.folder)
    dtype = config.dtype if request.dtype == "auto" else getattr(torch, request.dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()


def adapter_config() -> Any:
    """A LoRA of r=16 on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def adapted(model: Any, request: Request) -> Any:
    """With PEFT's adapter, where one is asked for, in the dtype of the base: FSDP2 wants one dtype in a group."""
    if not request.lora:
        return model
    from peft import get_peft_model

    is_on_meta = next(model.parameters()).is_meta
    return get_peft_model(model, adapter_config(), autocast_adapter_dtype=False, low_cpu_mem_usage=is_on_meta)


def in_model(model: Any) -> dict[str, str]:
    """Names as stored to those in the model, of all parameters that a checkpoint holds."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): name
        for name, _ in model.named_parameters()
        if ".lora_" not in name
    }


def begun(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """A matrix of an adapter as PEFT begins it."""
    with torch.no_grad():
        return nn.init.kaiming_uniform_(matrix, a=5**0.5) if ".lora_A." in name else nn.init.zeros_(matrix)


def _base(model: Any) -> Any:
    """The model of transformers, where PEFT's is around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _wrapped(model: Any) -> Any:
    for layer in _base(model).model.layers:
        fully_shard(layer)
    return fully_shard(model)


ARMS: dict[str, Callable[[Request], Loaded]] = {
    "shardwise": with_shardwise,
    "transformers": with_transformers,
    "accelerate": with_accelerate,
    "set_model_state_dict": with_set_model_state_dict,
    "dcp": with_dcp,
    "runai": with_runai,
}
