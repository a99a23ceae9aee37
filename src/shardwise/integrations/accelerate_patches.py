"""The switch under which accelerate accepts models that are sharded already, and saves their states.

[Note: Patches] accelerate has no interface for models that are sharded already. So a handful of its functions is
replaced while the switch is on, and never by an import. Each replacement delegates all other calls, so accelerate's
DDP, DeepSpeed and FSDP1 are unaffected. When the switch is turned off, the functions are restored. A replacement
that other code has wrapped meanwhile stays, and delegates all calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.core.errors import ConfigError, ShardingError, find_private, lacks
from shardwise.fsdp import torch_private
from shardwise.fsdp.gradients import average_replicated_gradients, clip_gradients, require_synchronized
from shardwise.fsdp.named_tensors import collect_tensors, is_sharded, unwrap
from shardwise.fsdp.rebind import bind_optimizers, plain_optimizer
from shardwise.fsdp.wrap import is_recomputed
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations import accelerate_writing as writing
from shardwise.integrations import pending
from shardwise.integrations.accelerate_reading import load_accelerate_model, load_accelerate_optimizer
from shardwise.integrations.accelerate_state import load_state, save_state
from shardwise.integrations.accelerate_writing import TemporaryFolder
from shardwise.integrations.context_parallel import SplitSequences, require_split
from shardwise.models.build import ALLOCATING_FUNCTION, LOADING_FUNCTION
from shardwise.models.lora.peft_private import moving_functions
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.ranks.world import World
from shardwise.state.model_states import get_model_state_dict
from shardwise.state.state_values import StateOptions
from shardwise.transfer.matching import FileForm

_log = logging.getLogger(__name__)


def accelerate() -> AccelerateSwitch:
    """Return the switch: a context manager, or ``accelerate().install()`` once for a whole script.

    While it is on, in this process:

    - ``Accelerator.prepare`` leaves models unchanged that ``fully_shard`` has sharded, and the parameters of their
      optimizers. This includes models inside of PEFT's, and CPUs, where accelerate would use DDP.
    - models that accelerate will shard by FSDP2 with ``cpu_ram_efficient_loading`` are left on meta by
      ``from_pretrained`` on every rank, and filled by ``prepare`` from the files, each rank reading its own bytes.
    - ``save_state`` and ``load_state`` write and read in parallel, commit in one step, and resume on any number of
      ranks. ``get_state_dict`` and ``clip_grad_norm_`` support unsharded parameters.

    Raises:
        ConfigError: accelerate is not installed, or lacks a function that is replaced here.
    """
    return AccelerateSwitch()


class AccelerateSwitch:
    """Replaces functions of accelerate. Switches may be nested: the functions stay until the last one is off."""

    _count = 0
    _restoring = ExitStack()

    def __init__(self) -> None:
        self._is_on = False

    def install(self) -> None:
        """Turn it on, until :meth:`remove`. Repeated calls do nothing."""
        if self._is_on:
            return
        if AccelerateSwitch._count == 0:
            # If a function is missing, this block restores those before it.
            with ExitStack() as stack:
                for path, replacement in _replacements().items():
                    owner, name = find_private(path)
                    if name not in vars(owner):  # but in a parent
                        raise lacks(path)
                    stack.callback(_restore, owner, name, vars(owner)[name], _replace(owner, name, replacement))
                AccelerateSwitch._restoring = stack.pop_all()
        self._is_on = True
        AccelerateSwitch._count += 1

    def remove(self) -> None:
        """Turn it off. accelerate is restored unless another switch is on."""
        if not self._is_on:
            return
        self._is_on = False
        AccelerateSwitch._count -= 1
        if AccelerateSwitch._count == 0:
            AccelerateSwitch._restoring.close()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _replacements() -> dict[str, Callable[..., Any]]:
    """Return the replacements of functions, whose first argument is the function."""
    return {
        "accelerate.state:AcceleratorState.__init__": begin_state,
        "accelerate:Accelerator.prepare": prepare_objects,
        "accelerate:Accelerator._prepare_cp": prepare_context_parallel,
        "accelerate:Accelerator._prepare_fsdp2": pending.prepare_fsdp2,
        "accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict": pending.load_full_state_dict,
        "accelerate:Accelerator.get_state_dict": get_state_dict,
        "accelerate:Accelerator.clip_grad_norm_": clip_grad_norm,
        "accelerate:Accelerator.save_state": save_state,
        "accelerate:Accelerator.load_state": load_state,
        # In the module that calls them, which has imported them by name.
        "accelerate.accelerator:save_fsdp_model": save_model,
        "accelerate.accelerator:load_fsdp_model": load_model,
        "accelerate.accelerator:save_fsdp_optimizer": save_optimizer,
        "accelerate.accelerator:load_fsdp_optimizer": load_optimizer,
        LOADING_FUNCTION: pending.defer_load,
        ALLOCATING_FUNCTION: pending.place_missing,
        **dict.fromkeys(moving_functions(), pending.keep_adapter),
    }


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> Any:
    """Replace a function of a class or module. Return its new attribute."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        if AccelerateSwitch._count == 0:
            return original(*args, **keywords)
        return replacement(original, *args, **keywords)

    attribute = staticmethod(wrapper) if isinstance(vars(owner)[name], staticmethod) else wrapper
    setattr(owner, name, attribute)
    return attribute


def _restore(owner: Any, name: str, before: Any, attribute: Any) -> None:
    """Restore a function unless it has been replaced again."""
    if vars(owner).get(name) is attribute:
        setattr(owner, name, before)


_PREPARE_FIRST = "prepare the optimizer before its first step"


def prepare_objects(
    original: compat.Original, accelerator: Any, *objects: Any, device_placement: list[bool] | None = None
) -> Any:
    """Replace ``Accelerator.prepare``: models that are sharded already stay as they are."""
    models = [item for item in objects if isinstance(item, nn.Module)]
    compat.require_parallelism(accelerator)
    # With tensor parallelism, parameters may be DTensors though fully_shard has not been applied. accelerate
    # prepares such a model. Its modules tell which case it is.
    by_fsdp = any(isinstance(module, FSDPModule) for model in models for module in model.modules())
    if not models or (compat.tensor_parallel_size(accelerator) > 1 and not by_fsdp):
        return original(accelerator, *objects, device_placement=device_placement)
    with World.current(call="prepare") as world:
        if _are_sharded(world, models):
            return _prepare_sharded(world, accelerator, objects, models, device_placement)
    return original(accelerator, *objects, device_placement=device_placement)


def prepare_context_parallel(original: compat.Original, accelerator: Any, *objects: Any) -> Any:
    """Replace accelerate's preparation for context parallelism: its own, and checks of models and their inputs."""
    # Each call of the original sets a new context. The first one stays, because models have hooks of it.
    split = compat.get_context(accelerator)
    result = original(accelerator, *objects)
    if not isinstance(split, SplitSequences):
        split = SplitSequences(compat.get_context(accelerator))
    compat.set_context(accelerator, split)
    for item in objects:
        if isinstance(item, nn.Module):
            require_split(item, split)
    return result


def begin_state(original: compat.Original, state: Any, *args: Any, **keywords: Any) -> None:
    """Replace the initializer of accelerate's state, to support FSDP2 on CPUs."""
    plugin = keywords.get("fsdp_plugin")
    is_fsdp2 = plugin is not None and plugin.fsdp_version == 2
    ranks = pending.count_launched_ranks()
    if is_fsdp2 and ranks and not compat.has_state() and not torch.accelerator.is_available():
        keywords["cpu"] = True  # else accelerate takes each rank for a single process
    original(state, *args, **keywords)
    # On CPUs accelerate does not use the plugin, and would wrap models in DDP.
    if is_fsdp2 and state.distributed_type == compat.DistributedType.MULTI_CPU:
        compat.become_fsdp2(state, plugin)
    if is_fsdp2 and state.distributed_type == compat.DistributedType.NO and ranks > 1:
        raise ConfigError(
            f"accelerate takes each of the {ranks} ranks for a single process, and would train that many models. "
            "Make its first object, Accelerator or PartialState, with cpu=True"
        )


def _is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` has sharded a model, or the one inside of PEFT's.

    Raises:
        ShardingError: only a part of the model is sharded, or it is under DDP or FSDP1.
    """
    plain = unwrap(model)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ShardingError(
                "the model is wrapped in DistributedDataParallel. Pass the model inside of it, sharded by "
                "shardwise.shard, or by fully_shard"
            )
    return is_sharded(plain, collect_tensors(plain))


def _are_sharded(world: World, models: Sequence[nn.Module]) -> bool:
    """Return whether all models are sharded already (True), or none is. Collective: yes."""
    with world.collective("look for sharded models"):
        flags = list(map(_is_sharded, models))
    # Before they go different ways, in which they would wait for each other.
    world.require_equal(flags, "the state of the model (sharded already, or not)")
    if any(flags) and not all(flags):
        raise ShardingError("prepare: some models are sharded already and some are not. Prepare them separately")
    return any(flags)


def _require_supported(
    accelerator: Any, objects: Sequence[Any], models: Sequence[nn.Module], device_placement: Sequence[bool] | None
) -> None:
    """Check a call of ``prepare`` with a model that is sharded already.

    Raises:
        ConfigError, ShardingError: the call is not supported.
    """
    if len(models) > 1:
        raise ConfigError(f"{len(models)} models in one call. Prepare one FSDP2 model at a time")
    if device_placement is not None and len(device_placement) != len(objects):
        raise ConfigError(
            f"device_placement has {len(device_placement)} values, and there are {len(objects)} objects"
        )
    plugin = compat.get_plugin(accelerator)
    if plugin is not None and plugin.fsdp_version != 2:
        raise ConfigError(
            "the accelerator's plugin is of FSDP1 (fsdp_version=1), and the model is sharded by FSDP2. Pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2), or set fsdp_version: 2 in its configuration"
        )
    tensors = collect_tensors(unwrap(models[0]))
    if on_meta := [item.fqn for item in tensors if item.tensor.is_meta]:
        raise ShardingError(
            f"{on_meta[0]} and {len(on_meta) - 1} more tensors are on meta. Call shardwise.load before prepare"
        )
    # For its errors only, before anything is changed.
    bind_optimizers([item for item in objects if isinstance(item, Optimizer)], tensors, _PREPARE_FIRST)


def _list_unapplied(accelerator: Any, model: nn.Module) -> list[str]:
    """Return what accelerate would have done to a model that is sharded already and lacks it, each with a cure."""
    plain, plugin = unwrap(model), compat.get_plugin(accelerator)
    modules, policies = list(plain.modules()), torch_private.fsdp_policies(plain)
    lacking: list[str] = []
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    if dtype is not None:
        computed = {policy.param_dtype for policy, _ in policies} | {each.dtype for each in plain.parameters()}
        trained = {each.dtype for each in plain.parameters() if each.requires_grad}
        if dtype not in computed or trained & {torch.bfloat16, torch.float16}:
            lacking.append(
                f"mixed_precision={accelerator.mixed_precision}, float32 weights that compute in {dtype}: "
                f'pass dtype="float32" and Sharding(mp_policy=MixedPrecisionPolicy(param_dtype={dtype}))'
            )
    if isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy) and not any(
        isinstance(policy, CPUOffloadPolicy) for _, policy in policies
    ):
        lacking.append("offload to the CPU: pass Sharding(offload_policy=CPUOffloadPolicy())")
    # Of shardwise, of transformers, or of torch.
    is_checkpointed = any(
        is_recomputed(module)
        or getattr(module, "gradient_checkpointing", False)
        or hasattr(module, "_checkpoint_wrapped_module")
        for module in modules
    )
    if getattr(plugin, "activation_checkpointing", False) and not is_checkpointed:
        lacking.append("activation_checkpointing: pass Sharding(activation_checkpointing=True)")
    is_compiled = plain is not model or any(map(torch_private.is_compiled_in_place, modules))
    if accelerator.state.dynamo_plugin.backend.value != "NO" and not is_compiled:
        lacking.append("dynamo_backend: pass Sharding(compile=True)")
    return lacking


def _prepare_sharded(
    world: World,
    accelerator: Any,
    objects: Sequence[Any],
    models: Sequence[nn.Module],
    device_placement: Sequence[bool] | None,
) -> Any:
    """Prepare everything except the model, and register the model. Collective: yes.

    Raises:
        ConfigError, ShardingError: the call is not supported, or accelerate counts other ranks.
    """
    with world.collective("check the arguments"):
        compat.require_ranks(accelerator.num_processes, world.size)
        _require_supported(accelerator, objects, models, device_placement)
        lacking = _list_unapplied(accelerator, models[0])
    if world.rank == 0 and lacking:
        _log.warning(
            "prepare: the model is sharded already, and settings of the accelerator do not apply to it:\n  %s",
            "\n  ".join(lacking),
        )
    # First: accelerate prepares optimizers and data loaders by the distributed type.
    if not accelerator.is_fsdp2:
        compat.become_fsdp2(accelerator.state, compat.get_plugin(accelerator) or compat.fsdp2_plugin())
    placement = list(device_placement) if device_placement is not None else [None] * len(objects)
    result = compat.prepare_without_wrapping(accelerator, objects, placement)
    # Hooks first: they average the gradients that FSDP2 does not reduce, and the check finds those without.
    model = unwrap(models[0])
    mesh = next((parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
    if mesh is not None:
        average_replicated_gradients(model, mesh)
    # Ranks of one tensor parallel group have the same rows, and equal gradients of parameters it does not split.
    with world.collective("check gradient synchronization"):
        require_synchronized(model, world.size // compat.tensor_parallel_size(accelerator))
    if compat.is_context_parallel(accelerator):
        accelerator._prepare_cp(model)
    return result if len(result) > 1 else result[0]


T = TypeVar("T")


def _only_for_fsdp2(replacement: Callable[..., T]) -> Callable[..., T]:
    """Delegate to accelerate's own function if the plugin is of FSDP1."""

    @wraps(replacement)
    def wrapper(original: Callable[..., T], fsdp_plugin: Any, accelerator: Any, *others: Any, **keywords: Any) -> T:
        if fsdp_plugin.fsdp_version != 2:
            return original(fsdp_plugin, accelerator, *others, **keywords)
        return replacement(fsdp_plugin, *others, **keywords)

    return wrapper


@_only_for_fsdp2
def save_model(
    fsdp_plugin: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,  # noqa: FBT001, FBT002 - accelerate's own
    **others: Any,
) -> Any:
    """Replace ``save_fsdp_model``: the same files, written by all ranks at once."""
    only = _select(model, adapter_only=adapter_only)
    place = _files_place(fsdp_plugin, output_dir, model_index, others)
    return writing.save_model(model, place, only, StateOptions())


@_only_for_fsdp2
def load_model(
    _fsdp_plugin: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,  # noqa: FBT001, FBT002
    **_others: Any,
) -> Any:
    """Replace ``load_fsdp_model``: any of its forms, on any number of ranks."""
    only = _select(model, adapter_only=adapter_only)
    return load_accelerate_model(model, _input_folder(input_dir), number=model_index, only=only)


@_only_for_fsdp2
def save_optimizer(
    fsdp_plugin: Any, optimizer: Any, model: nn.Module, output_dir: str, optimizer_index: int = 0, **others: Any
) -> Any:
    """Replace ``save_fsdp_optimizer``."""
    place = _files_place(fsdp_plugin, output_dir, optimizer_index, others)
    return writing.save_optimizer(model, plain_optimizer(optimizer), place, StateOptions())


@_only_for_fsdp2
def load_optimizer(
    _fsdp_plugin: Any, optimizer: Any, model: nn.Module, input_dir: str, optimizer_index: int = 0, *_others: Any
) -> Any:
    """Replace ``load_fsdp_optimizer``."""
    return load_accelerate_optimizer(
        model, plain_optimizer(optimizer), _input_folder(input_dir), number=optimizer_index
    )


def get_state_dict(
    original: compat.Original,
    accelerator: Any,
    model: nn.Module,
    unwrap: bool = True,  # noqa: FBT001, FBT002
) -> Mapping[str, torch.Tensor]:
    """Replace ``Accelerator.get_state_dict``: whole tensors on the first rank."""
    if not accelerator.is_fsdp2:
        state_dict: Mapping[str, torch.Tensor] = original(accelerator, model, unwrap)
        return state_dict
    return get_model_state_dict(model, "full")


def clip_grad_norm(
    original: compat.Original,
    accelerator: Any,
    parameters: Iterable[nn.Parameter] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Replace ``Accelerator.clip_grad_norm_``: one norm of sharded and unsharded parameters."""
    if not accelerator.is_fsdp2 or float(norm_type) != 2.0:
        return original(accelerator, parameters, max_norm, norm_type)
    # First, as in accelerate: max_norm is for the gradients without the scaler's factor.
    accelerator.unscale_gradients()
    items: Any = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = clip_gradients(items, float(max_norm))
    return torch.tensor(norm, device=accelerator.device)


def _input_folder(input_dir: str) -> Path:
    """Return the folder that accelerate loads from, the same on all ranks."""
    return input_dir.folder if isinstance(input_dir, TemporaryFolder) else Path(input_dir)


def _files_place(plugin: Any, output_dir: str, number: int, others: Mapping[str, Any]) -> writing.FilesPlace:
    """Return the place of a model or an optimizer: in the state that is being saved, or by itself."""
    form: FileForm = "sharded" if others.get("use_dcp", True) else "local"
    if plugin.state_dict_type.name == "FULL_STATE_DICT":
        form = "full"
    if isinstance(output_dir, TemporaryFolder):
        return writing.FilesPlace(output_dir.folder, number, form, output_dir)
    return writing.FilesPlace(Path(os.path.expanduser(output_dir)), number, form)


def _select(model: nn.Module, *, adapter_only: bool) -> Selection:
    return AdapterOnly() if adapter_only and has_adapters(model) else None
