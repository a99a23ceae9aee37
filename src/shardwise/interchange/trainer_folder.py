"""A folder ``checkpoint-N`` of the Hugging Face Trainer: what of a training is in it, and where."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import FormatError, StorageError
from shardwise.formats.accelerate_names import MODEL, OPTIMIZER, SavedKind
from shardwise.formats.peft_adapter import ADAPTER_WEIGHTS
from shardwise.storage.reading.local import LocalReader

STATE_FILE = "trainer_state.json"
_OPTIMIZER_FILE = "optimizer.pt"
_MAX_STATE_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class TrainerFolder:
    """What is in a folder, looked at once.

    Attributes:
        path: of the folder.
        names: what lies in it.
        state: ``trainer_state.json``, whose ``global_step`` is a count.
    """

    path: Path
    names: tuple[str, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> TrainerFolder:
        """Raises StorageError where it cannot be listed, FormatError where it is no such folder."""
        return cls(path, _names_in(path), _read_state(path))

    @property
    def step(self) -> int:
        """The optimizer's steps that have been taken."""
        return int(self.state["global_step"])

    @property
    def epoch(self) -> float:
        """How often the data have been gone through."""
        return float(self.state.get("epoch") or 0.0)

    @property
    def is_fsdp(self) -> bool:
        """Whether the model is in accelerate's files."""
        return _has(MODEL, self.names)

    @property
    def optimizer(self) -> Path | None:
        """Where what there is of an optimizer is: in accelerate's files, or in the Trainer's own."""
        if _has(OPTIMIZER, self.names):
            return self.path
        return self.path / _OPTIMIZER_FILE if _OPTIMIZER_FILE in self.names else None

    def weights_of(self, adapter: str) -> Path:
        """The file of a PEFT model's adapter.

        Raises:
            FormatError: there is none.
        """
        home = self.path if adapter == "default" else self.path / adapter
        file = next((home / name for name in ADAPTER_WEIGHTS if (home / name).is_file()), None)
        if file is None:
            raise FormatError(
                f"{home}: has neither {' nor '.join(ADAPTER_WEIGHTS)}, nor {MODEL.stem}* beside it, and the model "
                "has adapters; check the path, and the adapter's name"
            )
        return file


def _has(kind: SavedKind, names: tuple[str, ...]) -> bool:
    return any(name in (kind.file(0), kind.folder(0)) or kind.rank_of(name, 0) is not None for name in names)


def _names_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError as error:
        raise StorageError(f"{folder}: listing it failed, {error.strerror}; check the path") from error


def _read_state(folder: Path) -> dict[str, Any]:
    """``trainer_state.json``.

    Raises:
        FormatError: there is none, or its step is no count.
    """
    what = f"{STATE_FILE} in {folder}"
    if not (folder / STATE_FILE).is_file():
        inner = sorted(place.name for place in folder.glob("checkpoint-*") if (place / STATE_FILE).is_file())
        hint = (
            f"pass one of {', '.join(inner[:8])} in it" if inner else "pass a folder checkpoint-N of the Trainer's"
        )
        raise FormatError(f"{folder}: has no {STATE_FILE}; {hint}")
    with LocalReader(folder) as reader:
        nbytes = reader.size(STATE_FILE)
        if nbytes > _MAX_STATE_BYTES:
            raise FormatError(f"{what}: it has {nbytes} bytes, {_MAX_STATE_BYTES} is the limit")
        content = reader.read(STATE_FILE, 0, nbytes)
    try:
        state = json.loads(content)  # the Trainer logs NaN, so this is not strict
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: is no JSON ({error}); the checkpoint is damaged: take another") from error
    if not isinstance(state, dict):
        raise FormatError(f"{what}: holds a {type(state).__name__}, not an object")
    step, epoch = state.get("global_step"), state.get("epoch") or 0
    if type(step) is not int or step < 0 or not isinstance(epoch, (int, float)) or not math.isfinite(epoch):
        raise FormatError(f"{what}: global_step {step!r} and epoch {epoch!r} are no place in a training")
    return state
