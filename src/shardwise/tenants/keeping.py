"""Keeps what a tenant goes on from: its state in the bank, its position in its data, how far it has come.

[Note: When a tenant's checkpoint counts] Step 120 of a tenant is kept in ``states/step-120`` of its folder.
The bank's own files come first, in one commit of their own; ``progress.json`` comes last, and by it the checkpoint
counts. It goes first when a checkpoint is removed. So a kill at any moment leaves the one before, and a checkpoint
is never of two steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.bank.adapter_bank import AdapterBank, TenantKeywords
from shardwise.bank.results import BeginsAnew
from shardwise.checkpoints.folder import name_of
from shardwise.engines.save_options import SaveOptions
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.execution.ranks.world import World
from shardwise.planning.saves.fingerprints import own_digest
from shardwise.planning.states.matching import OnFault
from shardwise.storage.writing.opening import open_writer
from shardwise.training.checkpoints import TrainingProgress

PROGRESS = "progress.json"
_MAX_BYTES = 1 << 20
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class KeptProgress:
    """What a tenant keeps beside its state in the bank."""

    progress: TrainingProgress
    position: Mapping[str, int]
    """In its data, behind the step."""
    tuning: Mapping[str, Any]
    """What its LoRA is, as configured."""

    def require_tuning(self, name: str, tuning: Mapping[str, Any]) -> None:
        """Refuse to go on as another LoRA.

        Raises:
            ConfigError: naming what differs.
        """
        keys = sorted({*self.tuning, *tuning})
        others = [key for key in keys if self.tuning.get(key) != tuning.get(key)]
        if others:
            told = ", ".join(
                f"tuning.{key} {self.tuning.get(key)} then and {tuning.get(key)} now" for key in others
            )
            raise ConfigError(
                f"what {name!r} has kept is of another LoRA ({told}); go on with the same, or give it another name"
            )


class TenantKeeper:
    """Keeps and restores one tenant. See [Note: When a tenant's checkpoint counts]."""

    def __init__(self, folder: Path, source: Path | None, *, keep: int) -> None:
        self.folder = folder
        self.source = source
        """Another folder to go on from, while there is nothing in its own."""
        self.keep = keep

    def newest(self) -> Path | None:
        """The newest checkpoint to go on from, as far as this rank sees. Collective: no."""
        for folder in filter(None, (self.folder, self.source)):
            if steps := kept_steps(folder):
                return folder / name_of(steps[-1])
        return None

    def save(self, world: World, bank: AdapterBank, name: str, kept: KeptProgress) -> None:
        """Keep a tenant that is between two steps. Collective: yes.

        Raises:
            ShardwiseError: as of a save; the checkpoints before are as they were.
        """
        place = self.folder / name_of(kept.progress.step)
        bank.save(name, place, options=SaveOptions(progress=False))
        told = {"progress": kept.progress.to_dict(), "position": dict(kept.position), "tuning": dict(kept.tuning)}
        content = json.dumps({**told, _DIGEST: own_digest(told)}).encode()

        def let_count() -> None:
            with open_writer(place) as writer:
                writer.replace(PROGRESS, content)
            for step in kept_steps(self.folder)[: -self.keep]:
                _remove(self.folder / name_of(step))

        world.from_first(let_count)

    def read(self, world: World, place: Path) -> KeptProgress:
        """How far the tenant of a checkpoint had come. Collective: yes.

        Raises:
            FormatError: the file is not what was saved.
            ConfigError, StorageError: it does not say so; or cannot be read.
        """
        return world.from_first(lambda: _read_progress(place / PROGRESS))

    def restore(
        self, bank: AdapterBank, name: str, place: Path, keywords: TenantKeywords, on_other_base: OnFault
    ) -> str:
        """Add a tenant that goes on from what is kept there; what is told of its base.

        Collective: yes. If it fails, there is no such tenant.

        Raises:
            FormatError: nothing of a training is kept there.
            ShardwiseError: as of :meth:`~shardwise.bank.adapter_bank.AdapterBank.load`.
        """
        started = bank.load(name, place, on_other_base=on_other_base, **keywords)
        if isinstance(started, BeginsAnew):
            bank.remove(name)
            raise FormatError(f"{place}: there is no state of a training to go on from ({started.why})")
        return started.base


def kept_steps(folder: Path) -> list[int]:
    """The steps of which there is a checkpoint that counts, in order. Links are none."""
    try:
        names = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink()}
    except OSError:
        return []
    steps = [int(name[5:]) for name in names if name.startswith("step-") and name[5:].isdecimal()]
    return sorted(step for step in steps if (folder / name_of(step) / PROGRESS).is_file())


def _read_progress(file: Path) -> KeptProgress:
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{file}: it is too large to be what a tenant keeps")
        told: Any = json.loads(file.read_bytes())
        own = told.pop(_DIGEST, None)
        if own != own_digest(told):
            raise FormatError(
                f"{file}: is damaged, or of an earlier version; remove {file.parent} to go on from before"
            )
        progress = TrainingProgress.from_dict(told["progress"])
        position = {str(key): int(value) for key, value in told["position"].items()}
        tuning = dict(told["tuning"].items())
    except OSError as error:
        raise StorageError(f"{file}: it cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file}: it does not say how far a tenant has come ({error})") from error
    if progress.step < 0 or math.isnan(progress.best_loss):
        raise ConfigError(f"{file}: it does not say how far a tenant has come")
    return KeptProgress(progress, position, tuning)


def _remove(place: Path) -> None:
    """Remove a checkpoint, and nothing of somebody else's."""
    with open_writer(place) as writer:
        writer.remove(PROGRESS)
        writer.sync_names()
        for name in writer.list():
            writer.remove(name)
        writer.sync_names()
    try:
        place.rmdir()
    except OSError:  # something of somebody else's
        return
