"""What an accelerator saves, loads, hands out and clips of models under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shardwise.engines.model_states import model_state
from shardwise.errors import ConfigError, StorageError
from shardwise.execution.agreed import StateOptions
from shardwise.execution.renames import as_renamed, leads_nowhere
from shardwise.execution.world import World
from shardwise.formats.accelerate_names import MODEL
from shardwise.integrations import accelerate_compat as compat
from shardwise.interchange import accelerate_writing as writing
from shardwise.interchange.accelerate_reading import load_accelerate_model, load_accelerate_optimizer
from shardwise.interchange.accelerate_writing import (
    LinkedFolder,
    WorkFolder,
    keep_newest,
    newest_in,
    state_saved,
)
from shardwise.models.gradients import clip_gradients
from shardwise.models.selection import AdapterOnly, Selection, has_adapters
from shardwise.planning.matching import FileForm

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
    return writing.save_optimizer(model, compat.bare(optimizer), place, StateOptions())


@_of_fsdp2
def load_optimizer(
    _fsdp_plugin: Any, optimizer: Any, model: nn.Module, input_dir: str, optimizer_index: int = 0, *_others: Any
) -> Any:
    """Replace ``load_fsdp_optimizer``."""
    return load_accelerate_optimizer(model, compat.bare(optimizer), _folder_of(input_dir), number=optimizer_index)


def get_state_dict(
    original: Callable[..., Any],
    accelerator: Any,
    model: nn.Module,
    unwrap: bool = True,  # noqa: FBT001, FBT002
) -> Mapping[str, torch.Tensor]:
    """What takes the place of ``Accelerator.get_state_dict``: whole tensors on the first rank."""
    if not compat.is_fsdp2(accelerator):
        found: Mapping[str, torch.Tensor] = original(accelerator, model, unwrap)
        return found
    return model_state(model, "full")


def clip_grad_norm(
    original: Callable[..., Any],
    accelerator: Any,
    parameters: Iterable[nn.Parameter] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2,
) -> Any:
    """What takes the place of ``Accelerator.clip_grad_norm_``: one norm of sharded and of whole parameters."""
    if not compat.is_fsdp2(accelerator) or float(norm_type) != 2.0:
        return original(accelerator, parameters, max_norm, norm_type)
    accelerator.unscale_gradients()
    given: Any = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = clip_gradients(given, float(max_norm))
    return torch.tensor(norm, device=accelerator.device)


def save_state(
    original: Callable[..., Any],
    accelerator: Any,
    output_dir: str | None = None,
    *others: Any,
    **keywords: Any,
) -> Any:
    """What takes the place of ``Accelerator.save_state``: all that is written counts in one step.

    A state in the folder, and with ``automatic_checkpoint_naming`` the oldest ones, go once the new one counts.
    """
    config = accelerator.project_configuration
    if not compat.is_fsdp2(accelerator) or (output_dir is None and not config.automatic_checkpoint_naming):
        return original(accelerator, output_dir, *others, **keywords)
    is_named = config.automatic_checkpoint_naming
    folder = _numbered_folder(accelerator) if is_named else Path(str(output_dir)).expanduser().resolve()
    with World.current(call="save_state") as world:
        world.together(lambda: _require_one_each("save_state", *compat.how_many(accelerator)))
        world.require_equal(str(folder), "the folder to save into")
        with state_saved(world, folder, is_new=is_named) as work:
            config.automatic_checkpoint_naming = False
            try:
                saved = _attempted(lambda: original(accelerator, work, *others, **keywords))
            finally:
                config.automatic_checkpoint_naming = is_named
            if isinstance(saved, Exception):
                saved = work.part.saving.cause_of(saved)
            location = world.together(lambda: _value_of(saved))
        if is_named:
            world.from_first(lambda: keep_newest(folder.parent, folder, config.total_limit))
    return type(location)(output_dir or folder) if str(location) == work else location


def load_state(
    original: Callable[..., Any],
    accelerator: Any,
    input_dir: str | None = None,
    *others: Any,
    **keywords: Any,
) -> Any:
    """What takes the place of ``Accelerator.load_state``: of a save that counts, but was killed, all is read."""
    is_numbered = input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming
    is_ours = compat.is_fsdp2(accelerator) or compat.is_one_process(accelerator)
    if not is_ours or (input_dir is None and not is_numbered):
        return original(accelerator, input_dir, *others, **keywords)
    with ExitStack() as stack:
        with World.current(call="load_state") as world:
            if compat.is_fsdp2(accelerator):
                world.together(lambda: _require_one_each("load_state", *compat.how_many(accelerator)))
            if is_numbered:
                place = _numbered_folder(accelerator).parent
                input_dir = world.from_first(lambda: _path_of(newest_in(place)))
                if input_dir is None:
                    return _all_done("load_state", lambda: original(accelerator, None, *others, **keywords))
            folder = Path(str(input_dir)).expanduser().resolve()
            seen = world.together(lambda: stack.enter_context(as_renamed(folder)))
        if seen != folder:
            input_dir = LinkedFolder.of(seen, folder)

        def load() -> Any:
            loaded = original(accelerator, input_dir, *others, **keywords)
            _require_still_there(seen, folder)
            return loaded

        if compat.is_fsdp2(accelerator) or not any(seen.glob(f"{MODEL.stem}*")):
            return _all_done("load_state", load)
        with compat.without_models(accelerator) as (models, optimizers):  # a process alone, where ranks have saved
            _require_one_each("load_state", len(models), len(optimizers))
            for number, model in enumerate(models):
                load_accelerate_model(model, folder, number=number)
            for number, optimizer in enumerate(optimizers):
                load_accelerate_optimizer(models[number], compat.bare(optimizer), folder, number=number)
            return load()


def _require_one_each(call: str, models: int, optimizers: int) -> None:
    """Accelerate takes an optimizer for that of the model of the same number."""
    if optimizers > models:
        raise ConfigError(
            f"{call}: the accelerator has {optimizers} optimizers and {models} model(s), and accelerate's states "
            "have one optimizer for each model; save several with shardwise.Checkpointer"
        )


def _require_still_there(seen: Path, folder: Path) -> None:
    """Accelerate passes over random states that it cannot read."""
    if seen != folder and leads_nowhere(seen):
        raise StorageError(f"{folder}: a save began there while its state was loaded; load it again")


def _folder_of(input_dir: str) -> Path:
    """The folder that accelerate loads from, the same on all ranks."""
    return input_dir.folder if isinstance(input_dir, LinkedFolder) else Path(input_dir)


def _path_of(found: Path | None) -> str | None:
    return None if found is None else str(found)


def _attempted(function: Callable[[], T]) -> T | Exception:
    try:
        return function()
    except Exception as error:
        return error


def _value_of(found: T | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found


def _all_done(call: str, function: Callable[[], T]) -> T:
    """What accelerate does on each rank; where one of them fails, all do. Collective: yes."""
    found = _attempted(function)
    with World.current(call=call) as world:
        return world.together(lambda: _value_of(found))


def _numbered_folder(accelerator: Any) -> Path:
    """Where the next state goes, as accelerate names it."""
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}").resolve()


def _place(plugin: Any, output_dir: str, number: int, others: Mapping[str, Any]) -> writing.FilesPlace:
    """Where a model or an optimizer goes: into the state that is being saved, or by itself."""
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
