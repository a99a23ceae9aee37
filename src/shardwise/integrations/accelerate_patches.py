"""The switch under which accelerate treats sharded models as they are, and saves their states.

[Note: Doors] accelerate has no interface for models that are sharded already. So a handful of its functions is
replaced while the switch is on, and never by an import. Each replacement delegates all other calls, so accelerate's
DDP, DeepSpeed and FSDP1 are unaffected. When the switch is turned off, the functions are restored. One that
somebody else has wrapped meanwhile stays, and delegates everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.engines.model_states import get_model_state_dict
from shardwise.errors import ConfigError, ShardingError
from shardwise.execution.state_values import StateOptions
from shardwise.execution.world import World
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations import pending
from shardwise.integrations.accelerate_state import load_state, save_state
from shardwise.integrations.context_parallel import SplitSequences, require_split
from shardwise.interchange import accelerate_writing as writing
from shardwise.interchange.accelerate_reading import load_accelerate_model, load_accelerate_optimizer
from shardwise.interchange.accelerate_writing import LinkedFolder, WorkFolder
from shardwise.models.build import loading_door, placing_door
from shardwise.models.gradients import average_replicated_gradients, clip_gradients, require_synchronized
from shardwise.models.rebind import bind_optimizers, plain_optimizer
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.models.view import collect_tensors, is_sharded, without_compile
from shardwise.planning.matching import FileForm
from shardwise.tuning.peft_compat import adapter_doors


def accelerate() -> AccelerateSwitch:
    """The switch: a context, or ``accelerate().install()`` once for a whole script.

    While it is on, in this process:

    - ``Accelerator.prepare`` leaves models unchanged that ``fully_shard`` has sharded, and the parameters of their
      optimizers. This includes models inside of PEFT's, and CPUs, where accelerate would use DDP.
    - models that accelerate will shard by FSDP2 with ``cpu_ram_efficient_loading`` are left on meta by
      ``from_pretrained`` on every rank, and filled by ``prepare`` from the files, each rank reading its own bytes.
    - ``save_state`` and ``load_state`` write and read in parallel, commit in one step, and resume on any number of
      ranks. ``get_state_dict`` and ``clip_grad_norm_`` support unsharded parameters.

    Raises:
        ConfigError: accelerate is not installed, or has no function that is replaced here.
    """
    return AccelerateSwitch()


class AccelerateSwitch:
    """Turns the replaced functions of accelerate on and off. May be nested: they stay until the last one is off."""

    _installed = 0
    _put_back: list[Callable[[], None]] = []  # noqa: RUF012 - of the process, as what it replaces is

    def __init__(self) -> None:
        self._is_on = False

    def install(self) -> None:
        """Turn it on, until :meth:`remove`. Repeated calls do nothing."""
        if self._is_on:
            return
        if AccelerateSwitch._installed == 0:
            try:
                with compat.known_names:
                    for owner, name, make in _doors():
                        AccelerateSwitch._put_back.append(_replace(owner, name, make))
            except BaseException:
                _restore()
                raise
        self._is_on = True
        AccelerateSwitch._installed += 1

    def remove(self) -> None:
        """Turn it off. accelerate is restored unless another switch is on."""
        if not self._is_on:
            return
        self._is_on = False
        AccelerateSwitch._installed -= 1
        if AccelerateSwitch._installed == 0:
            _restore()

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


Replacing = Callable[..., Any]
"""What takes the place of a function: called with that function first, and then with its arguments."""


def _doors() -> list[tuple[Any, str, Replacing]]:
    """List the functions that are replaced: owner, name, replacement."""
    return [
        (compat.AcceleratorState, "__init__", begin_state),
        (compat.Accelerator, "prepare", prepare_objects),
        (compat.Accelerator, "_prepare_cp", prepare_context_parallel),
        (compat.Accelerator, "_prepare_fsdp2", pending.prepare_fsdp2),
        (compat.fsdp_utils, "fsdp2_load_full_state_dict", pending.load_full_state_dict),
        (compat.Accelerator, "get_state_dict", get_state_dict),
        (compat.Accelerator, "clip_grad_norm_", clip_grad_norm),
        (compat.Accelerator, "save_state", save_state),
        (compat.Accelerator, "load_state", load_state),
        (compat.accelerator_module, "save_fsdp_model", save_model),
        (compat.accelerator_module, "load_fsdp_model", load_model),
        (compat.accelerator_module, "save_fsdp_optimizer", save_optimizer),
        (compat.accelerator_module, "load_fsdp_optimizer", load_optimizer),
        (*loading_door(), pending.load_later),
        (*placing_door(), pending.place_missing),
        *((*door, pending.keep_adapter) for door in adapter_doors()),
    ]


def _replace(owner: Any, name: str, replacing: Replacing) -> Callable[[], None]:
    """Replace a function. Return a callable that restores it, unless it has been replaced again."""
    original, before = getattr(owner, name), vars(owner)[name]

    @functools.wraps(original)
    def door(*args: Any, **keywords: Any) -> Any:
        if AccelerateSwitch._installed == 0:
            return original(*args, **keywords)
        return replacing(original, *args, **keywords)

    mine = staticmethod(door) if isinstance(before, staticmethod) else door
    setattr(owner, name, mine)

    def put_back() -> None:
        if vars(owner).get(name) is mine:
            setattr(owner, name, before)

    return put_back


def _restore() -> None:
    while AccelerateSwitch._put_back:
        AccelerateSwitch._put_back.pop()()


_BEFORE = "prepare the optimizer before its first step"


def prepare_objects(
    original: compat.Original, accelerator: Any, *objects: Any, device_placement: list[bool] | None = None
) -> Any:
    """Replace ``Accelerator.prepare``: models that are sharded are left alone, others passed on."""
    models = [item for item in objects if isinstance(item, nn.Module)]
    compat.require_parallelism(accelerator)
    by_fsdp = any(isinstance(module, FSDPModule) for model in models for module in model.modules())
    if not models or (compat.tensor_parallel_size(accelerator) > 1 and not by_fsdp):
        return original(accelerator, *objects, device_placement=device_placement)
    with World.current(call="prepare") as world:
        if _agree_on_sharded(world, models):
            return _leave_alone(world, accelerator, objects, models, device_placement)
    return original(accelerator, *objects, device_placement=device_placement)


def prepare_context_parallel(original: compat.Original, accelerator: Any, *objects: Any) -> Any:
    """Replace accelerate's preparation for split sequences: its own, and checks of what it leaves to the loop."""
    split = compat.context_of(accelerator)
    result = original(accelerator, *objects)
    if not isinstance(split, SplitSequences):
        split = SplitSequences(compat.context_of(accelerator))
    compat.enter_instead(accelerator, split)
    for item in objects:
        if isinstance(item, nn.Module):
            require_split(item, split)
    return result


def begin_state(original: compat.Original, state: Any, *args: Any, **keywords: Any) -> None:
    """Replace the initializer of accelerate's state, to support FSDP2 on CPUs."""
    plugin = keywords.get("fsdp_plugin")
    wanted = plugin is not None and plugin.fsdp_version == 2
    if wanted and pending.launched_ranks() and not compat.is_begun() and not torch.accelerator.is_available():
        keywords["cpu"] = True  # else accelerate takes each of the ranks for a process alone
    original(state, *args, **keywords)
    if wanted and state.distributed_type == compat.DistributedType.MULTI_CPU:
        compat.become_fsdp2(state, plugin)
    ranks = pending.launched_ranks()
    if wanted and state.distributed_type == compat.DistributedType.NO and ranks > 1:
        raise ConfigError(
            f"accelerate takes each of the {ranks} ranks for a single process, and would train that many models. "
            "Make its first object, Accelerator or PartialState, with cpu=True"
        )


def is_left_alone(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` has sharded a model, or the one inside of PEFT's.

    Unsharded parameters are allowed.

    Raises:
        ShardingError: it has sharded a part of the model, or something else has sharded it.
    """
    plain = without_compile(model)
    for module in plain.modules():
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise ShardingError(
                f"the model is wrapped in {type(module).__name__}. Pass the model inside of it, sharded by "
                "shardwise.shard, or by fully_shard"
            )
    return is_sharded(plain, collect_tensors(plain))


def _agree_on_sharded(world: World, models: Sequence[nn.Module]) -> bool:
    """Return whether all models are sharded already (True), or none is. Collective: yes."""
    found = world.run_all(lambda: [is_left_alone(model) for model in models])
    world.require_equal(found, "the state of the model (sharded already, or not)")
    if any(found) and not all(found):
        raise ShardingError("of the models, some are sharded already and some are not. Prepare them apart")
    return any(found)


def _leave_alone(
    world: World,
    accelerator: Any,
    objects: Sequence[Any],
    models: Sequence[nn.Module],
    device_placement: Sequence[bool] | None,
) -> Any:
    """Prepare all but the model, and note that. Collective: yes."""

    def check() -> None:
        if len(models) > 1:
            raise ConfigError(f"{len(models)} models in one call. Prepare one FSDP2 model at a time")
        if device_placement is not None and len(device_placement) != len(objects):
            raise ConfigError(
                f"device_placement has {len(device_placement)} values, and there are {len(objects)} objects"
            )
        plugin = compat.plugin_of(accelerator)
        if plugin is not None and plugin.fsdp_version != 2:
            raise ConfigError(
                "the accelerator's plugin is of FSDP1 (fsdp_version=1), and the model is sharded by FSDP2. Pass "
                "FullyShardedDataParallelPlugin(fsdp_version=2), or set fsdp_version: 2 in its configuration"
            )
        held = collect_tensors(without_compile(models[0]))
        if on_meta := [item.fqn for item in held if item.tensor.is_meta]:
            raise ShardingError(
                f"{on_meta[0]} and {len(on_meta) - 1} more tensors are on meta. Call shardwise.load before prepare"
            )
        bind_optimizers([plain_optimizer(item) for item in objects if isinstance(item, Optimizer)], held, _BEFORE)

    world.run_all(check)
    if not accelerator.is_fsdp2:
        compat.become_fsdp2(accelerator.state, compat.plugin_of(accelerator) or compat.fsdp2_plugin())
    placement = list(device_placement) if device_placement is not None else [None] * len(objects)
    result = compat.left_as_they_are(accelerator, objects, placement)
    model = without_compile(models[0])
    mesh = _mesh_of(model)
    if mesh is not None:
        average_replicated_gradients(model, mesh)
    # Ranks of one tensor parallel group have the same rows, and the same gradients of what it does not split.
    world.run_all(require_synchronized, model, world.size // compat.tensor_parallel_size(accelerator))
    if compat.is_context_parallel(accelerator):
        accelerator._prepare_cp(model)
    return result if len(result) > 1 else result[0]


def _mesh_of(model: nn.Module) -> Any:
    """Return the mesh of a model's sharded parameters, or None."""
    found = (getattr(parameter, "device_mesh", None) for parameter in model.parameters())
    return next((mesh for mesh in found if mesh is not None), None)


T = TypeVar("T")


def _of_fsdp2(replacing: Callable[..., T]) -> Callable[..., T]:
    """Pass calls on to accelerate's own function where the plugin is not one of FSDP2."""

    @wraps(replacing)
    def door(original: Callable[..., T], fsdp_plugin: Any, accelerator: Any, *others: Any, **keywords: Any) -> T:
        if fsdp_plugin.fsdp_version != 2:
            return original(fsdp_plugin, accelerator, *others, **keywords)
        return replacing(fsdp_plugin, *others, **keywords)

    return door


@_of_fsdp2
def save_model(
    fsdp_plugin: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,  # noqa: FBT001, FBT002 - accelerate's own
    **others: Any,
) -> Any:
    """Replace ``save_fsdp_model``: the same files, written by all ranks at once."""
    only, place = _selection(model, adapter_only=adapter_only), _place(fsdp_plugin, output_dir, model_index, others)
    return writing.save_model(model, place, only, "first_rank", StateOptions())


@_of_fsdp2
def load_model(
    _fsdp_plugin: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,  # noqa: FBT001, FBT002
    **_others: Any,
) -> Any:
    """Replace ``load_fsdp_model``: any of its forms, on any number of ranks."""
    only = _selection(model, adapter_only=adapter_only)
    return load_accelerate_model(model, _folder_of(input_dir), number=model_index, only=only)


@_of_fsdp2
def save_optimizer(
    fsdp_plugin: Any, optimizer: Any, model: nn.Module, output_dir: str, optimizer_index: int = 0, **others: Any
) -> Any:
    """Replace ``save_fsdp_optimizer``."""
    place = _place(fsdp_plugin, output_dir, optimizer_index, others)
    return writing.save_optimizer(model, plain_optimizer(optimizer), place, StateOptions())


@_of_fsdp2
def load_optimizer(
    _fsdp_plugin: Any, optimizer: Any, model: nn.Module, input_dir: str, optimizer_index: int = 0, *_others: Any
) -> Any:
    """Replace ``load_fsdp_optimizer``."""
    return load_accelerate_optimizer(
        model, plain_optimizer(optimizer), _folder_of(input_dir), number=optimizer_index
    )


def get_state_dict(
    original: compat.Original,
    accelerator: Any,
    model: nn.Module,
    unwrap: bool = True,  # noqa: FBT001, FBT002
) -> Mapping[str, torch.Tensor]:
    """Replace ``Accelerator.get_state_dict``: whole tensors on the first rank."""
    if not accelerator.is_fsdp2:
        found: Mapping[str, torch.Tensor] = original(accelerator, model, unwrap)
        return found
    return get_model_state_dict(model, "full")


def clip_grad_norm(
    original: compat.Original,
    accelerator: Any,
    parameters: Iterable[nn.Parameter] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """Replace ``Accelerator.clip_grad_norm_``: one norm of sharded and of whole parameters."""
    if not accelerator.is_fsdp2 or float(norm_type) != 2.0:
        return original(accelerator, parameters, max_norm, norm_type)
    accelerator.unscale_gradients()
    given: Any = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = clip_gradients(given, float(max_norm))
    return torch.tensor(norm, device=accelerator.device)


def _folder_of(input_dir: str) -> Path:
    """The folder that accelerate loads from, the same on all ranks."""
    return input_dir.folder if isinstance(input_dir, LinkedFolder) else Path(input_dir)


def _place(plugin: Any, output_dir: str, number: int, others: Mapping[str, Any]) -> writing.FilesPlace:
    """Return the place of a model or an optimizer: in the state that is being saved, or by itself."""
    form = _form(plugin, others)
    if isinstance(output_dir, WorkFolder):
        return writing.FilesPlace(output_dir.folder, number, form, output_dir.part)
    return writing.FilesPlace(Path(output_dir), number, form)


def _selection(model: nn.Module, *, adapter_only: bool) -> Selection:
    return AdapterOnly() if adapter_only and has_adapters(model) else None


def _form(plugin: Any, others: Mapping[str, Any]) -> FileForm:
    if plugin.state_dict_type.name == "FULL_STATE_DICT":
        return "full"
    return "sharded" if others.get("use_dcp", True) else "local"
