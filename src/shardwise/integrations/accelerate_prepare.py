"""``prepare``: an accelerator takes a model as ``fully_shard`` has left it, and its optimizers as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.errors import ConfigError, PlacementError
from shardwise.execution.ranks.world import World
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations import ram_efficient
from shardwise.models import torch_words
from shardwise.models.optimizers.rebind import look_at
from shardwise.models.placement import is_sharded
from shardwise.models.replicated import average_replicated_gradients
from shardwise.models.torch_words import modules_in
from shardwise.models.view import look_inside, without_compile

_BEFORE = "prepare the optimizer before its first step"


def prepare(accelerator: Any, *objects: Any, device_placement: list[bool] | None = None) -> Any:
    """``accelerator.prepare`` for a model that is sharded already, by shardwise or by ``fully_shard``.

    The model is left alone: nothing is wrapped, moved or cast, whatever the accelerator's plugin says of sharding
    (what differs is told in a warning). Optimizers keep their very parameters. All else is prepared as ever. The
    accelerator is one of FSDP2 from then on, on CPUs too.

    ``save_state`` and its kin are accelerate's own then, unless the switch is on: see
    :func:`~shardwise.integrations.accelerate_switch.accelerate`.

    Collective: yes, over all ranks.

    Args:
        accelerator: of ``accelerate.Accelerator``.
        objects: one sharded model, alone or with optimizers, data loaders and schedulers.
        device_placement: as of accelerate.

    Returns:
        The objects in their order, as accelerate does: one alone, several in a tuple.

    Raises:
        ConfigError: accelerate is too old or too new; its plugin is of FSDP1.
        PlacementError: the model is not sharded, is sharded in part or by other means, or an optimizer holds what
            are no parameters of it.
        DisagreementError: it is sharded on some ranks only.

    Every error is the same on every rank.
    """
    compat.check_doors()
    models = [item for item in objects if isinstance(item, nn.Module)]
    with World.current(call="prepare") as world:
        if _agree_on_sharded(world, models):
            return _leave_alone(world, accelerator, objects, models, device_placement)
        world.together(lambda: _refuse_unsharded(accelerator, models))
    return accelerator.prepare(*objects, device_placement=device_placement)


def prepare_objects(
    original: Callable[..., Any], accelerator: Any, *objects: Any, device_placement: list[bool] | None = None
) -> Any:
    """What takes the place of ``Accelerator.prepare``: models that are sharded are left alone, others passed on."""
    models = [item for item in objects if isinstance(item, nn.Module)]
    config = getattr(accelerator, "parallelism_config", None)
    if not models or (config is not None and config.tp_enabled):
        return original(accelerator, *objects, device_placement=device_placement)
    with World.current(call="prepare") as world:
        if _agree_on_sharded(world, models):
            return _leave_alone(world, accelerator, objects, models, device_placement)
    return original(accelerator, *objects, device_placement=device_placement)


def begin_state(original: Callable[..., Any], state: Any, *args: Any, **keywords: Any) -> None:
    """What takes the place of the initialiser of accelerate's state: FSDP2 is known on CPUs, too."""
    plugin = keywords.get("fsdp_plugin")
    wanted = plugin is not None and plugin.fsdp_version == 2
    if wanted and ram_efficient.launched_ranks() and not compat.is_begun() and not torch.accelerator.is_available():
        keywords["cpu"] = True  # else accelerate takes each of the ranks for a process alone
    original(state, *args, **keywords)
    if wanted and compat.is_on_cpus(state):
        compat.become_fsdp2(state, plugin)
    ranks = ram_efficient.launched_ranks()
    if wanted and compat.is_one_process(state) and ranks > 1:
        raise ConfigError(
            f"accelerate takes each of the {ranks} ranks for a process alone, and would train as many models; make "
            "its first object, Accelerator or PartialState, with cpu=True"
        )


def is_left_alone(model: nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded a model, or the one inside of PEFT's; what it leaves whole may be there.

    Raises:
        PlacementError: it has sharded a part of it; or somebody else has sharded it.
    """
    plain = without_compile(model)
    for module in modules_in(plain):
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise PlacementError(
                f"the model is wrapped in {type(module).__name__}; pass the model inside of it, sharded by "
                "shardwise.shard, or by fully_shard"
            )
    return is_sharded(plain, look_inside(plain))


def _agree_on_sharded(world: World, models: Sequence[nn.Module]) -> bool:
    """Whether all models are sharded already (True), or none is. Collective: yes."""
    found = world.together(lambda: [is_left_alone(model) for model in models])
    world.require_equal(found, "the state of the model (sharded already, or not)")
    if any(found) and not all(found):
        raise PlacementError("of the models, some are sharded already and some are not; prepare them apart")
    return any(found)


def _refuse_unsharded(accelerator: Any, models: Sequence[nn.Module]) -> None:
    if models and not compat.is_fsdp2(accelerator) and not compat.is_one_process(accelerator):
        raise PlacementError(
            f"{type(without_compile(models[0])).__name__} is not sharded, and accelerate would wrap it in DDP; "
            "load it by shardwise.from_pretrained, or call shardwise.shard(model, optimizers=...) first; or make "
            "the Accelerator with fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) while "
            "shardwise.integrations.accelerate() is on"
        )


def _leave_alone(
    world: World,
    accelerator: Any,
    objects: Sequence[Any],
    models: Sequence[nn.Module],
    device_placement: Sequence[bool] | None,
) -> Any:
    """Prepare all but the model, and note that. Collective: yes."""

    def check() -> list[str]:
        if len(models) > 1:
            raise ConfigError(f"{len(models)} models in one call; accelerate knows one of FSDP2 at a time")
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigError(
                f"device_placement has {len(device_placement)} values, and there are {len(objects)} objects"
            )
        plugin = compat.plugin_of(accelerator)
        if plugin is not None and plugin.fsdp_version != 2:
            raise ConfigError(
                "the accelerator's plugin is of FSDP1 (fsdp_version=1), and the model is sharded by FSDP2; pass "
                "FullyShardedDataParallelPlugin(fsdp_version=2), or set fsdp_version: 2 in its configuration"
            )
        held = look_inside(without_compile(models[0]))
        if on_meta := [item.fqn for item in held if item.tensor.is_meta]:
            raise PlacementError(
                f"{on_meta[0]} and {len(on_meta) - 1} more tensors are on meta; call shardwise.load before prepare"
            )
        look_at([compat.bare(item) for item in objects if isinstance(item, Optimizer)], held, _BEFORE)
        return _untaken(accelerator, plugin, without_compile(models[0]))

    told = world.together(check)
    if told and world.rank == 0:
        warnings.warn(
            "the model is sharded already, so that this does not apply to it: " + "; ".join(told), stacklevel=4
        )
    if not compat.is_fsdp2(accelerator):
        compat.become_fsdp2(accelerator.state, compat.plugin_of(accelerator) or compat.fsdp2_plugin())
    placement = list(device_placement) if device_placement is not None else [None] * len(objects)
    result = compat.left_as_they_are(accelerator, objects, placement)
    mesh = _mesh_of(without_compile(models[0]))
    if mesh is not None:
        average_replicated_gradients(without_compile(models[0]), mesh)
    return result if len(result) > 1 else result[0]


def _mesh_of(model: nn.Module) -> Any:
    """The mesh that a model's parameters are sharded on; None where none of them is."""
    found = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in found if mesh is not None), None)


def _untaken(accelerator: Any, plugin: Any, model: nn.Module) -> list[str]:
    """What an accelerator is set to that the model is not, in words."""
    told: list[str] = []
    managers = torch_words.fsdp_params(model)
    computes_in = torch_words.computing_dtypes(model)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    if wanted is not None and computes_in and wanted not in computes_in:
        shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in computes_in))
        told.append(
            f"mixed_precision={accelerator.mixed_precision!r} (it computes in {shown}; pass "
            f"Sharding(mp_policy=MixedPrecisionPolicy(param_dtype={wanted})))"
        )
    if plugin is None:
        return told
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not any(
        torch_words.is_offloaded(manager) for manager in managers.values()
    ):
        told.append("cpu_offload (pass Sharding(offload_policy=CPUOffloadPolicy()))")
    if plugin.activation_checkpointing and not _recomputes(model):
        told.append("activation_checkpointing (pass Sharding(activation_checkpointing=PerBlock()))")
    return told


def _recomputes(model: nn.Module) -> bool:
    return any(
        getattr(module, "gradient_checkpointing", False)
        or hasattr(module, "_checkpoint_wrapped_module")
        or type(vars(module).get("forward")).__name__ == "Recomputed"
        for module in modules_in(model)
    )
