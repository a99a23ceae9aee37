"""Folders ``checkpoint-N`` of a Trainer: their headers, and the newest.

See [Note: A checkpoint of the Trainer] in ``integrations/trainer_checkpoints.py``.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from shardwise.core.errors import FormatError
from shardwise.files.checkpoint_index import parse_object

HEADER_FILE: Final = "shardwise.trainer.json"
BEGUN_FILE: Final = "shardwise.begun"
STATE_FILE: Final = "trainer_state.json"
STATE_FOLDER: Final = "state"
"""A folder of :class:`~shardwise.checkpoints.checkpointer.Checkpointer`, in checkpoints of ``ShardwiseTrainer``."""

TRAINER_FOLDER: Final = re.compile(r"checkpoint-(0|[1-9][0-9]{0,15})")
MODEL_ALONE: Final = "the model alone"
"""Content of a checkpoint without the state of the training (``save_only_model``)."""

_MAX_HEADER_BYTES: Final = 1 << 16
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class TrainerHeader:
    """Header of a checkpoint.

    Attributes:
        step: optimizer steps done.
        holds: content of its state, of ``checkpoints.train_state.describe_selection``, or ``MODEL_ALONE``.
        rows_per_step: rows of one optimizer step, of all ranks and micro-batches.
        world_size: number of ranks that saved it.
        order: settings and ranks on which the order of rows depends, "" if it does not. None in headers of earlier
            versions.
        rows: number of rows and seed of the data, such as "96 rows with seed 42". None in headers of earlier
            versions.
        is_stop: saved by a stop, which leaves an evaluation out. False in headers of earlier versions.
    """

    step: int
    holds: str
    rows_per_step: int
    world_size: int
    order: str | None = None
    rows: str | None = None
    is_stop: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2).encode()

    @classmethod
    def read(cls, file: Path) -> TrainerHeader:
        """Read a header.

        Raises:
            FormatError: it is not the header of a checkpoint.
        """
        if file.stat().st_size > _MAX_HEADER_BYTES:
            raise FormatError(f"{file}: is too large for the header of a checkpoint. Pass another checkpoint")
        return cls.from_bytes(file.read_bytes(), str(file))

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> TrainerHeader:
        """Parse a header. ``what`` names the file.

        Raises:
            FormatError: it is not the header of a checkpoint.
        """
        values: dict[str, Any] = parse_object(content, what=what)
        if values.pop("version", None) != _VERSION:
            raise FormatError(f"{what}: is of another version of shardwise. Pass another checkpoint")
        texts = {name: values.pop(name, None) for name in ("order", "rows")}
        is_stop = values.pop("is_stop", False) is True
        # By type(), because True is an int for isinstance().
        types = [(name, type(value)) for name, value in sorted(values.items())]
        is_negative = any(value < 0 for value in values.values() if type(value) is int)
        if types != _FIELDS or is_negative or not all(isinstance(text, str | None) for text in texts.values()):
            raise FormatError(f"{what}: is not the header of a checkpoint. Pass another checkpoint")
        return cls(**values, **texts, is_stop=is_stop)


_FIELDS = [("holds", str), ("rows_per_step", int), ("step", int), ("world_size", int)]


def find_newest(run: Path) -> Path | None:
    """Return the newest complete checkpoint in an output folder, or None.

    Many LoRAs and other Trainers write no header: the last file of their checkpoints is the Trainer's state.
    """
    complete: dict[int, Path] = {}
    for folder in run.glob("checkpoint-*"):
        is_begun, has_state = (folder / BEGUN_FILE).is_file(), (folder / STATE_FILE).is_file()
        is_complete = (folder / HEADER_FILE).is_file() or (has_state and not is_begun)
        name = TRAINER_FOLDER.fullmatch(folder.name)
        if name and is_complete:
            complete[int(name[1])] = folder
    return complete[max(complete)] if complete else None
