"""``save_state`` and ``load_state`` of accelerate, committed in one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shardwise.core.errors import ConfigError, StorageError
from shardwise.files.accelerate_saves import MODEL
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations.accelerate_writing import TemporaryFolder, find_latest, keep_latest, saving_state
from shardwise.ranks.world import World
from shardwise.saving.rename_journal import has_broken_link, link_as_renamed

T = TypeVar("T")
P = ParamSpec("P")


def save_state(
    original: compat.Original,
    accelerator: Any,
    output_dir: str | None = None,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Replace ``Accelerator.save_state``: all files are committed in one step.

    The older state in the folder, and with ``automatic_checkpoint_naming`` the oldest ones, are removed afterwards.
    """
    config = accelerator.project_configuration
    if not accelerator.is_fsdp2 or (output_dir is None and not config.automatic_checkpoint_naming):
        return original(accelerator, output_dir, *others, **keywords)
    is_named = config.automatic_checkpoint_naming
    folder = _next_folder(accelerator) if is_named else Path(str(output_dir)).expanduser().resolve()
    with World.current(call="save_state") as world:
        with world.collective("check the folder"):
            _require_one_each("save_state", *map(len, compat.get_prepared(accelerator)))
        world.require_equal(str(folder), "the folder to save into")
        with saving_state(world, folder, is_new=is_named) as (saving, work):
            # Or else accelerate would write to a folder of its own, and delete old ones before the commit.
            config.automatic_checkpoint_naming = False
            try:
                saved = _try_call(original, accelerator, work, *others, **keywords)
            finally:
                config.automatic_checkpoint_naming = is_named
            if isinstance(saved, Exception):
                saved = saving.find_cause(saved)
            with world.collective("save the state"):
                location = _raise_or_return(saved)
        if is_named:
            with world.broadcast("delete old checkpoints"):
                if world.rank == 0:
                    keep_latest(folder.parent, folder, config.total_limit)
    # accelerate returns the folder it was given, as a str or Path: the caller's, not the temporary one.
    return type(location)(output_dir or folder) if str(location) == work else location


def load_state(
    original: compat.Original,
    accelerator: Any,
    input_dir: str | None = None,
    *others: Any,
    **keywords: Any,
) -> Any:
    """Replace ``Accelerator.load_state``: a committed state is read as a whole, even if its save was killed."""
    is_numbered = input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming
    if not accelerator.is_fsdp2 or (input_dir is None and not is_numbered):
        is_alone = accelerator.distributed_type == compat.DistributedType.NO
        # With the temporary names of a save that was killed: accelerate would read an older state beside it.
        if is_alone and input_dir is not None and any(Path(input_dir).glob(f"*{MODEL.stem}*")):
            raise ConfigError(
                f"{input_dir}: was saved under FSDP, and this accelerator runs one process without it. Call "
                "load_accelerate_model and load_accelerate_optimizer"
            )
        return original(accelerator, input_dir, *others, **keywords)
    with ExitStack() as stack:
        with World.current(call="load_state") as world:
            with world.collective("check the folder"):
                _require_one_each("load_state", *map(len, compat.get_prepared(accelerator)))
            if is_numbered:
                with world.broadcast("find the latest checkpoint") as exchange:
                    if world.rank == 0:
                        exchange.local = find_latest(_next_folder(accelerator).parent)
                newest = exchange.result
                if newest is None:
                    return _call_on_all_ranks("load_state", original, accelerator, None, *others, **keywords)
                input_dir = str(newest)
            folder = Path(str(input_dir)).expanduser().resolve()
            with world.collective("open the folder"):
                visible = stack.enter_context(link_as_renamed(folder))
        if visible != folder:
            input_dir = TemporaryFolder(visible, folder)

        def load() -> Any:
            loaded = original(accelerator, input_dir, *others, **keywords)
            _require_still_there(visible, folder)
            return loaded

        return _call_on_all_ranks("load_state", load)


def _require_one_each(call: str, models: int, optimizers: int) -> None:
    """Check that every optimizer has a model, because accelerate pairs them by number."""
    if optimizers > models:
        raise ConfigError(
            f"{call}: the accelerator has {optimizers} optimizers and {models} model(s), and accelerate's states "
            "have one optimizer for each model. Save several with shardwise.Checkpointer"
        )


def _require_still_there(visible: Path, folder: Path) -> None:
    """Check that the state was not replaced meanwhile, because accelerate skips random states it cannot read.

    ``visible`` is a folder of links to the files of ``folder``, or that folder itself.
    """
    if visible != folder and has_broken_link(visible):
        raise StorageError(f"{folder}: a save began there while its state was loaded. Load it again")


def _try_call(function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T | Exception:
    try:
        return function(*args, **keywords)
    except Exception as error:
        return error


def _raise_or_return(outcome: T | Exception) -> T:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _call_on_all_ranks(call: str, function: Callable[P, T], *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function of accelerate on each rank. If one fails, all raise. Collective: yes."""
    # Outside of the phase, which is without communication: accelerate's function has collectives of its own.
    outcome = _try_call(function, *args, **keywords)
    with World.current(call=call) as world, world.collective("load the state"):
        return _raise_or_return(outcome)


def _next_folder(accelerator: Any) -> Path:
    """Return the folder of the next state, as accelerate names it."""
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}").resolve()
