"""Unexported names of accelerate, and the functions that are replaced in it. No other module uses them.

Checked with accelerate 1.13 and 1.15. Each name is looked up when it is used, those of replaced functions when the
switch is turned on. ``tests/canary`` asserts arguments and meanings.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.core.errors import ConfigError, private, require_version

require_version("accelerate", "1.13")
try:
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.utils import patch_environment as patch_environment
except ImportError as _absent:
    raise ConfigError("accelerate is not installed. Run pip install 'shardwise[accelerate]'") from _absent

__all__ = ["DistributedType"]

Original: TypeAlias = Callable[..., Any]
"""A function of accelerate that is replaced."""


def get_plugin(accelerator: Any) -> Any:
    """Return an accelerator's FSDP plugin, or None."""
    return getattr(accelerator.state, "fsdp_plugin", None)


def become_fsdp2(state: Any, plugin: Any) -> None:
    """Change the state that all accelerators of this process share to FSDP2 with this plugin."""
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    # AcceleratorState has copied the type from PartialState, so both are set.
    state.distributed_type = DistributedType.FSDP
    private("accelerate.state:PartialState._shared_state")["distributed_type"] = DistributedType.FSDP


def fsdp2_plugin() -> Any:
    """Return a plugin for a model that is already sharded. Its sharding settings are not used."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=False
    )


def has_state() -> bool:
    """Return whether an accelerator exists in this process, which determines the distributed type."""
    return bool(private("accelerate.state:PartialState._shared_state"))


def prepare_without_wrapping(
    accelerator: Any, objects: Sequence[Any], device_placement: Sequence[bool | None]
) -> tuple[Any, ...]:
    """Prepare objects as accelerate does, but only register models, and do not move optimizers to a device."""
    prepare = private("accelerate:Accelerator._prepare_one", accelerator)
    registered, optimizers = get_prepared(accelerator)
    # accelerate's states pair models and optimizers by number: models without an optimizer come after the others.
    has_optimizer = any(isinstance(item, torch.optim.Optimizer) for item in objects)
    number = len(optimizers) if has_optimizer else len(registered)
    first: list[Any] = []
    for item, placement in zip(objects, device_placement, strict=True):
        if isinstance(item, torch.optim.Optimizer):
            placement = False
        if not isinstance(item, nn.Module):
            item = prepare(item, first_pass=True, device_placement=placement)
        first.append(item)
    # The second pass wraps schedulers, which need the optimizers of the first.
    result = [item if isinstance(item, nn.Module) else prepare(item) for item in first]
    for item in result:
        if isinstance(item, nn.Module):
            if not any(item is model for model in registered):
                registered.insert(number, item)
            item._is_accelerate_prepared = True  # type: ignore[assignment]
    return tuple(result)


def tensor_parallel_size(accelerator: Any) -> int:
    """Return the number of ranks that share each row of a batch by tensor parallelism."""
    config = accelerator.parallelism_config
    return 1 if config is None else int(config.tp_size)


def require_parallelism(accelerator: Any) -> None:
    """Check that ranks will train on the rows that the configuration promises.

    Raises:
        ConfigError: Ulysses sequence parallelism without DeepSpeed.
    """
    config = accelerator.parallelism_config
    if config is not None and config.sp_size > 1 and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            f"ParallelismConfig(sp_size={config.sp_size}): only DeepSpeed splits sequences so, and without it "
            "every rank would train on whole sequences. Use cp_size, which FSDP2 supports"
        )


def require_ranks(processes: int, ranks: int) -> None:
    """Check that accelerate, which gives each process rows of its own, counts all ranks.

    Args:
        processes: number of processes that accelerate counts.
        ranks: number of ranks of the model's process group.

    Raises:
        ConfigError: the numbers differ.
    """
    if processes != ranks:
        raise ConfigError(
            f"accelerate counts {processes} processes, and the model's process group has {ranks} ranks, so that "
            "all ranks would train on the same rows. Launch by torchrun or accelerate launch, and on CPUs pass "
            "Accelerator(cpu=True), or use_cpu=True to the Trainer's arguments"
        )


def is_context_parallel(accelerator: Any) -> bool:
    """Return whether ``maybe_context_parallel`` splits sequences."""
    config = accelerator.parallelism_config
    return config is not None and bool(config.cp_size > 1)


def get_context(accelerator: Any) -> Any:
    """Return the context of ``maybe_context_parallel``, or None before the first ``prepare``."""
    return getattr(accelerator, "_cp_context", None)


def set_context(accelerator: Any, context: Any) -> None:
    """Replace the context of ``maybe_context_parallel``."""
    accelerator._cp_context = context


def split_sequences(accelerator: Any, config: Any, model: nn.Module) -> None:
    """Have the accelerator of a Trainer split sequences as a ``ParallelismConfig`` says.

    accelerate takes such a configuration with a plugin of FSDP2 only, by which the Trainer would shard the model.
    """
    accelerator.state.parallelism_config = config
    accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
    private("accelerate:Accelerator._prepare_cp", accelerator)(model)


def get_prepared(accelerator: Any) -> tuple[list[nn.Module], list[Any]]:
    """Return the lists of models and of optimizers that an accelerator has prepared."""
    models = private("accelerate:Accelerator._models", accelerator)
    return models, private("accelerate:Accelerator._optimizers", accelerator)
