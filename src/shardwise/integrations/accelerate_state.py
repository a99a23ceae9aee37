"""``save_state`` and ``load_state`` of accelerate, committed in one step."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.core.errors import ConfigError, StorageError
from shardwise.files.accelerate_saves import MODEL
from shardwise.integrations import accelerate_compat as compat
from shardwise.integrations.accelerate_writing import TemporaryFolder, find_latest, keep_latest, saving_state
from shardwise.ranks.world import World
from shardwise.saving.rename_journal import has_broken_link, link_as_renamed


def save_state(
    original: compat.Original, accelerator: Any, output_dir: str | None = None, *others: Any, **keywords: Any
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
        # At the end of this block all files get their names together: those that models and optimizers have written
        # into the folder, and those that accelerate has written into ``work``.
        with saving_state(world, folder, is_new=is_named) as (saving, work):
            # accelerate calls hooks after the models and optimizers: nothing before the first inner call fails on
            # one rank.
            failure: Exception | None = None
            location: Any = None
            try:
                # Otherwise accelerate would choose the folder, and not take ``work``.
                with mock.patch.object(config, "automatic_checkpoint_naming", False):
                    location = original(accelerator, work, *others, **keywords)
            except Exception as error:
                failure = saving.find_cause(error)
            # Before the commit: a state must not count if any rank has failed to write its part.
            with world.collective("save the state"):
                if failure is not None:
                    raise failure
        if is_named:
            with world.broadcast("delete old checkpoints"):
                if world.rank == 0:
                    keep_latest(folder.parent, folder, config.total_limit)
    # The caller gets the folder of the state in place of the temporary one.
    if str(location) == work:
        location = type(location)(output_dir or folder)
    return location


def load_state(
    original: compat.Original, accelerator: Any, input_dir: str | None = None, *others: Any, **keywords: Any
) -> Any:
    """Replace ``Accelerator.load_state``: a committed state is read as a whole, even if its save was killed."""
    is_numbered = input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming
    if not accelerator.is_fsdp2 or (input_dir is None and not is_numbered):
        is_alone = accelerator.distributed_type == compat.DistributedType.NO
        # With the temporary names of a save that was killed: accelerate would read an older state beside it.
        if is_alone and input_dir is not None and any(Path(input_dir).expanduser().glob(f"*{MODEL.stem}*")):
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
                    return original(accelerator, None, *others, **keywords)  # whose error says so
                input_dir = str(newest)
            folder = Path(str(input_dir)).expanduser().resolve()
            with world.collective("open the folder"):
                seen = stack.enter_context(link_as_renamed(folder))
        # A save was killed within its renames: accelerate reads through links, which have the new names.
        if seen != folder:
            input_dir = TemporaryFolder(seen, folder)

        failure: Exception | None = None
        loaded: Any = None
        try:
            loaded = original(accelerator, input_dir, *others, **keywords)
            # accelerate skips random states that it cannot read, so it does not notice a state that was replaced.
            if seen != folder and has_broken_link(seen):
                raise StorageError(f"{folder}: a save began there while its state was loaded. Load it again")
        except Exception as error:
            failure = error
        # Not the World above: a rank that fails before its first inner call would wait in it for ranks that are in
        # that call, until join_timeout_s. In two different calls all ranks raise at once.
        with World.current(call="load_state") as world, world.collective("load the state"):
            if failure is not None:
                raise failure
        return loaded


def _require_one_each(call: str, models: int, optimizers: int) -> None:
    """Check that every optimizer has a model, because accelerate pairs them by number."""
    if optimizers > models:
        raise ConfigError(
            f"{call}: the accelerator has {optimizers} optimizers and {models} model(s), and accelerate's states "
            "have one optimizer for each model. Save several with shardwise.Checkpointer"
        )


def _next_folder(accelerator: Any) -> Path:
    """Return the folder of the next state, as accelerate names it."""
    return Path(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}").resolve()
