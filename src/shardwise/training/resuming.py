"""Whether a training may write where it is to, and go on from what is there: found out before a model is loaded."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.checkpoints.checkpointer import Checkpointer
from shardwise.checkpoints.modes import Asynchronous, KeepLast, Synchronous
from shardwise.checkpoints.opened import CheckpointPreview, preview
from shardwise.checkpoints.state import in_words
from shardwise.errors import ConfigError, CoverageError, StorageError
from shardwise.execution.ranks.world import World
from shardwise.models.selection import Selection
from shardwise.training.checkpoints import KeptInFolders
from shardwise.training.configuration.config_sections import TrainConfig
from shardwise.training.configuration.config_values import on_other_base_of
from shardwise.training.data.loader import require_same_rows
from shardwise.training.data.read_once import TrainData
from shardwise.training.data.train_data import EVERY_ROW
from shardwise.training.optimizing.optimizers import optimizers_of
from shardwise.tuning.modes import Lora, Tuning

_OF_ADAPTERS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias")
"""Settings of an adapter that are what they are asked to be; PEFT decides others once it sees the model."""


def kept_in(config: TrainConfig, output: Path, only: Selection) -> KeptInFolders:
    """Where states are kept, of which tensors, and whence this training goes on. Collective: yes.

    Raises:
        ConfigError: there is a checkpoint that is not to be gone on from; or another run has left its model there.
        StorageError: there is no checkpoint where one should be.
    """
    section = config.checkpoints
    mode = Asynchronous() if section.mode == "asynchronous" else Synchronous()
    own = World.current().together(
        lambda: Checkpointer(output / "checkpoints", keep=KeepLast(section.keep), mode=mode, only=only)
    )
    about, permission = {"tuning": config.tuning.method}, on_other_base_of(section)
    step = own.latest()
    if step is not None and section.resume == "never":
        raise ConfigError(
            f"checkpoints.resume='never', but {own.directory} has a checkpoint of step {step}; "
            "resume=auto goes on from it, and another output.directory begins anew"
        )
    if step is not None:
        return KeptInFolders(own, own, about, permission)
    require_free(config, output)
    if section.resume in ("auto", "never"):
        return KeptInFolders(own, None, about)
    other = World.current().together(lambda: Checkpointer(section.resume, only=only))
    if other.latest() is None:
        raise StorageError(f"checkpoints.resume={section.resume!r}: there is no complete checkpoint in this folder")
    return KeptInFolders(own, other, about, permission)


def require_free(config: TrainConfig, output: Path) -> None:
    """Refuse a folder where there is a model that this training would write over, and did not write itself.

    Collective: yes, over the default process group; one rank looks.

    Raises:
        ConfigError: naming what is there.
    """

    def look() -> None:
        found = [name for name in ("last", "best") if (output / name).exists() and any((output / name).iterdir())]
        if not found or config.output.overwrite or _is_of_this_run(config, output):
            return
        raise ConfigError(
            f"output.directory={str(output)!r}: there is {' and '.join(f'{name}/' for name in found)} of another "
            "run, and no checkpoint to go on from; name another folder, or let this run write over it by "
            "output.overwrite=true"
        )

    World.current().from_first(look)


def _is_of_this_run(config: TrainConfig, output: Path) -> bool:
    """Whether what was asked for there is what is asked for now."""
    try:
        return (output / "config.yaml").read_text("utf-8") == config.to_yaml()
    except (OSError, ValueError):
        return False


def preview_of(keeper: KeptInFolders) -> CheckpointPreview | None:
    """What is known of the checkpoint that a training goes on from; None where it begins. Collective: yes."""
    return None if keeper.source is None else preview(keeper.source.directory)


def dated(keeper: KeptInFolders, before: CheckpointPreview | None) -> tuple[KeptInFolders, datetime.date]:
    """The day that templates are told: that on which the run has begun, which is kept beside its states.

    Collective: yes.
    """

    def find() -> str:
        told = None if before is None else before.user.get("day")
        return datetime.date.today().isoformat() if told is None else datetime.date.fromisoformat(told).isoformat()

    day = World.current().from_first(find)
    return replace(keeper, about={**keeper.about, "day": day}), datetime.date.fromisoformat(day)


def require_same_kind(before: CheckpointPreview, config: TrainConfig, tuning: Tuning) -> None:
    """Refuse a checkpoint of another tuning or another optimizer, as far as its facts tell. Collective: no.

    What else does not fit is found once there is a model.

    Raises:
        CoverageError: naming everything that differs.
    """
    faults: list[str] = []
    here, there = config.tuning.method, before.user.get("tuning")
    if before.holds != (holds := in_words(tuning.saves())) or (there is not None and there != here):
        faults.append(
            f"tuning: it holds {before.holds} of {there or 'another tuning'}, and this run trains {here}, "
            f"which keeps {holds}"
        )
    elif isinstance(tuning, Lora) and before.adapter is not None:
        faults += _differing(before.adapter, tuning.config.to_dict())
    if before.optimizers is not None:
        known = {recipe.name for recipe in optimizers_of(config.options()).values()}
        if others := sorted(set(before.optimizers) - known):
            faults.append(f"optimizer: it was {', '.join(others)}, and is {' and '.join(sorted(known))} now")
    if faults:
        raise CoverageError(
            f"{before.folder} cannot be gone on from:\n  " + "\n  ".join(faults) + "\nAsk for what was asked for "
            "then, or begin anew in another output.directory"
        )


def _differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"tuning.{name}: it was {then[name]!r}, and is {now[name]!r} now"
        for name in _OF_ADAPTERS
        if name in then and name in now and then[name] != now[name]
    ]


def require_same_data(before: CheckpointPreview, config: TrainConfig, data: TrainData) -> None:
    """Refuse a position in other rows, or in another order of them. Collective: no.

    Raises:
        ConfigError: naming what differs.
    """
    if before.data is not None:
        is_known = not config.data.packing and data.mixing == EVERY_ROW
        rows = len(data.examples) if is_known else None
        require_same_rows(data, config.training.seed, before.data, rows)
