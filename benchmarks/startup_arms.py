"""Ways to load a model that are compared, each as it runs on one rank.

[Note: Arms] Each is written as a careful user writes it, in the form that costs it least. If rank 0 alone loads,
the others have their model on meta from the start and open no file. With accelerate's environment alone,
transformers' ``from_pretrained`` would have them read everything. ``fsdp2_prepare_model`` is called as
``Accelerator.prepare`` calls it: ``Accelerator`` itself matched FSDP on accelerators only.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engines.load_plan import LoadOptions
from shardwise.engines.observe import observe
from shardwise.engines.pretrained_loading import from_pretrained
from shardwise.execution.processes import this_device
from shardwise.execution.staging import as_memoryview
from shardwise.models.view import local_tensor, raw_bytes
from shardwise.observing import phase
from shardwise.planning.fingerprints import fingerprint

OURS = "shardwise"


PHASES = LOAD, WRAP, OPTIMIZER = "load", "wrap", "optimizer"


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to load: a description, a function of (model_dir, dtype), and ranks that hold the full model."""

    does: str
    load: Callable[[str, str], Any]
    holders: str = ""


@dataclass(frozen=True)
class ArmOnRank:
    """Final bytes of a rank, the budget of a shardwise load, and fingerprints of whole tensors."""

    host_bytes: int
    budget_bytes: int
    values: Mapping[str, str]


_SAMPLES_PER_SECOND = 100.0


_PAGE_BYTES = 4096


def load_by_arm(arm: str, model_dir: str, dtype: str, run_dir: str) -> ArmOnRank:
    """Bring up a model and an optimizer by this arm, observed into ``run_dir``. Collective: yes.

    Every page of every shard is written to in the phase of the optimizer, as its first step will: until then a
    loader may have left values in a mapped file.
    """
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    _on_meta(model_dir, dtype)  # imports what this model needs
    gc.collect()
    dist.barrier()
    with observe(run_dir, samples_per_second=_SAMPLES_PER_SECOND):
        model = ARMS[arm].load(model_dir, dtype)
        with phase(OPTIMIZER):
            torch.optim.AdamW(model.parameters(), lr=1e-5)
            _write_to_pages(model)
    host_bytes = sum(tensor.nbytes for tensor in _local_tensors(model) if tensor.device.type == "cpu")
    return ArmOnRank(host_bytes, LoadOptions().budget_bytes, _fingerprints(model))


def _write_to_pages(model: nn.Module) -> None:
    """Write to one byte of each page of this rank's tensors on the host, without changing it."""
    for tensor in _local_tensors(model):
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            flat = raw_bytes(tensor)
            flat[::_PAGE_BYTES].bitwise_xor_(0)
            flat[-1:].bitwise_xor_(0)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from [*model.named_parameters(), *model.named_buffers()]


def _local_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's parameters and buffers, each once, without empty ones."""
    local = [local_tensor(tensor) for _, tensor in _named_tensors(model)]
    return list({tensor.data_ptr(): tensor for tensor in local if tensor.numel()}.values())


def _fingerprints(model: nn.Module) -> dict[str, str]:
    """Return fingerprints of whole tensors: of sharded ones on rank 0. Collective: yes."""
    found = {}
    for name, tensor in _named_tensors(model):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if dist.get_rank() == 0 or not isinstance(tensor, DTensor):
            data = raw_bytes(whole.detach().contiguous().cpu())
            found[name] = f"{fingerprint(as_memoryview(data), 0):016x}"
    return found


def _shardwise(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = from_pretrained(model_dir, dtype=dtype)
    with phase(WRAP):  # loading has sharded it
        return model


def _native(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _load_full(model_dir, dtype)
    with phase(WRAP):
        return _wrap(model)


def _native_efficient(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _on_meta(model_dir, dtype)
        values: dict[str, Any] = {}
        buffers: dict[str, torch.Tensor] = {}
        if dist.get_rank() == 0:
            whole = _load_full(model_dir, dtype)
            buffers = dict(whole.named_buffers())
            names = {*dict(whole.named_parameters()), *buffers}  # a tied parameter once
            values = {name: tensor for name, tensor in whole.state_dict().items() if name in names}
            del whole
    with phase(WRAP):
        _wrap(model)
        # Not strict: a tied head is the embedding's parameter.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(model, values, options=options)
        model.tie_weights()
        _broadcast_buffers(model, buffers)
        return model


def _accelerate(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _load_full(model_dir, dtype)
    with phase(WRAP):
        return _prepare(model, is_efficient=False)


def _accelerate_efficient(model_dir: str, dtype: str) -> Any:
    with phase(LOAD):
        model = _on_meta(model_dir, dtype) if dist.get_rank() else _load_full(model_dir, dtype)
        _broadcast_buffers(model, {} if dist.get_rank() else dict(model.named_buffers()))
    with phase(WRAP):
        return _prepare(model, is_efficient=True)


def _transformers(model_dir: str, dtype: str) -> Any:
    from transformers import DistributedConfig

    with phase(LOAD):
        config = DistributedConfig(fsdp_size=dist.get_world_size())
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, distributed_config=config)
    with phase(WRAP):
        return model


def _on_meta(model_dir: str, dtype: str) -> Any:
    """Return the model without values, in the requested dtype."""
    config = AutoConfig.from_pretrained(model_dir)
    wanted = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=wanted).eval()


def _load_full(model_dir: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)


def _wrap(model: Any) -> Any:
    """Shard the blocks that the model's class names, and the rest."""
    blocks = set(model._no_split_modules or ())
    mesh = init_device_mesh(this_device().type, (dist.get_world_size(),))
    for module in [*model.modules()]:
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _broadcast_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give buffers that are on meta on some rank, which are in no state dict, the values of rank 0."""
    device = this_device()
    on_meta: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(on_meta, [name for name, buffer in model.named_buffers() if buffer.is_meta])
    wanted = {name for names in on_meta for name in names}
    for name, buffer in [*model.named_buffers()]:
        if name in wanted:
            owner, _, attribute = name.rpartition(".")
            value = values[name].to(device) if name in values else torch.empty_like(buffer, device=device)
            dist.broadcast(value, src=0)
            model.get_submodule(owner)._buffers[attribute] = value


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
        device=this_device(),
    )
    return fsdp2_prepare_model(accelerator, model)


ARMS: Mapping[str, Arm] = {
    OURS: Arm("each rank reads its own bytes", _shardwise),
    "native": Arm("every rank loads all, then fully_shard", _native, "every rank"),
    "native-efficient": Arm("rank 0 loads, set_model_state_dict broadcasts", _native_efficient, "rank 0"),
    "accelerate": Arm("every rank loads all, then FSDP2 by accelerate", _accelerate, "every rank"),
    "accelerate-efficient": Arm(
        "rank 0 loads, accelerate broadcasts (cpu_ram_efficient_loading)", _accelerate_efficient, "rank 0"
    ),
    "transformers": Arm("from_pretrained(distributed_config=...)", _transformers),
}
