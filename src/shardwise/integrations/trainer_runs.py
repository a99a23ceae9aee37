"""What lies in an output folder of the Trainer's, and what follows: where to go on, what counts, what may go.

[Note: A checkpoint of the Trainer's] ``checkpoint-N`` holds the model as ``save_pretrained`` would write it,
the state of the training under ``state`` (a checkpoint of
:class:`~shardwise.checkpoints.checkpointer.Checkpointer`), and ``trainer_state.json``. It counts once
``shardwise.trainer.json`` is there, which is put in place in one step when all else is durable
(``integrations/trainer_commit.py``). A folder is begun by ``shardwise.begun``, so that what a kill has left is told
from what somebody else has put there: the first is removed by whoever saves or goes on there next, the second is an
error. Removing goes the other way round: first what makes it count.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from shardwise.checkpoints.folder import newest_in
from shardwise.checkpoints.state import in_words
from shardwise.errors import ConfigError, FormatError, StorageError
from shardwise.integrations.trainer_compat import PREFIX_CHECKPOINT_DIR
from shardwise.interchange.trainer_folder import STATE_FILE, TrainerFolder
from shardwise.models.selection import AdapterOnly, Everything, Selection

FACTS_FILE = "shardwise.trainer.json"
BEGUN_FILE = "shardwise.begun"
STATE_FOLDER = "state"
_FOLDER = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(0|[1-9][0-9]{{0,15}})")
_MOST_BYTES = 1 << 16
_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelAlone:
    """A checkpoint that holds no state of a training (``save_only_model``)."""


Holds: TypeAlias = Selection | ModelAlone
"""What a training goes on with that a checkpoint is of: everything, one adapter; or nothing but a model."""


def holds_in_words(holds: Holds) -> str:
    """As it stands in the facts, and in messages."""
    return "the model alone" if isinstance(holds, ModelAlone) else in_words(holds)


def _holds_of(words: object) -> Holds:
    adapter = words.removeprefix("adapter ") if isinstance(words, str) else ""
    told: Sequence[Holds] = (Everything(), ModelAlone(), AdapterOnly(adapter))
    return next(holds for holds in told if holds_in_words(holds) == words)


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What must be known of a checkpoint before it is opened.

    Attributes:
        step: optimizer steps done.
        holds: whose state.
        rows_per_step: rows of one optimizer step, of all ranks and micro-batches.
        world_size: ranks it was saved by.
    """

    step: int
    holds: Holds
    rows_per_step: int
    world_size: int

    def to_bytes(self) -> bytes:
        told = {"version": _VERSION, **asdict(self), "holds": holds_in_words(self.holds)}
        return json.dumps(told, indent=2).encode()

    @classmethod
    def from_bytes(cls, content: bytes, what: str) -> TrainerFacts:
        """Raises FormatError where it is none."""
        try:
            told = json.loads(content)
            if told.pop("version") != _VERSION:
                raise FormatError(f"{what}: was written by a newer shardwise")
            found = cls(**told | {"holds": _holds_of(told["holds"])})
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError) as error:
            raise FormatError(f"{what}: holds no facts of a checkpoint ({error}); take another one") from error
        counts = (found.step, found.rows_per_step, found.world_size)
        if not all(type(count) is int and count >= 0 for count in counts):
            raise FormatError(f"{what}: holds no facts of a checkpoint; take another one")
        return found


class FolderKind(Enum):
    """What a folder ``checkpoint-N`` is."""

    COMPLETE = "a checkpoint that counts"
    LEFT = "one that was begun, or is being removed"
    FOREIGN = "somebody else's"


def checkpoints_in(run: Path) -> dict[int, FolderKind]:
    """The folders ``checkpoint-N`` of a run, by step, in order.

    Raises:
        StorageError: the folder cannot be listed.
    """
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{run}: looking for checkpoints failed, {error.strerror}; check output_dir") from error
    steps = sorted(int(found[1]) for name in names if (found := _FOLDER.fullmatch(name)))
    return {step: kind_of(folder_of(run, step)) for step in steps}


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_in(run: Path, folder: str | None) -> int | None:
    """The step of a checkpoint of this run; None of one elsewhere, as where another run was gone on from."""
    found = None if folder is None else _FOLDER.fullmatch(Path(folder).name)
    if folder is None or found is None or Path(folder).parent.resolve() != run.resolve():
        return None
    return int(found[1])


def best_of(source: Path) -> str | None:
    """The best checkpoint so far of a training that goes on from ``source``; None where none is known, or left.

    A run may have been moved since: what has the name that was written down, and lies beside ``source``, is meant.

    Raises:
        FormatError, StorageError: the Trainer's state in ``source`` cannot be read.
    """
    recorded = TrainerFolder.of(source).state.get("best_model_checkpoint")
    if not isinstance(recorded, str):
        return None
    beside = source.parent / Path(recorded).name
    if _FOLDER.fullmatch(beside.name) and kind_of(beside) is FolderKind.COMPLETE:
        return str(beside)
    return recorded if Path(recorded).is_dir() else None


def kind_of(folder: Path) -> FolderKind:
    """Looks for two files."""
    if (folder / FACTS_FILE).is_file():
        return FolderKind.COMPLETE
    if not folder.is_dir():
        return FolderKind.FOREIGN
    is_ours = (folder / BEGUN_FILE).is_file() or not any(folder.iterdir())
    return FolderKind.LEFT if is_ours else FolderKind.FOREIGN


def facts_of(folder: Path) -> TrainerFacts:
    """Of a checkpoint that counts.

    Raises:
        ConfigError: it does not, or was saved by something else.
        FormatError: its facts are damaged.
    """
    what = f"resume_from_checkpoint={str(folder)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{what}: there is no such folder; pass a folder {PREFIX_CHECKPOINT_DIR}-N, or True")
    file = folder / FACTS_FILE
    if not file.is_file():
        if (folder / BEGUN_FILE).is_file():
            raise ConfigError(f"{what}: was never completed; resume_from_checkpoint=True takes the newest that was")
        hint = (
            "was not saved by ShardwiseTrainer (by the Trainer itself, or under accelerate's FSDP); "
            "shardwise.load_trainer_checkpoint(model, folder, optimizer=...) reads such folders"
            if (folder / STATE_FILE).is_file()
            else f"is no checkpoint; pass a folder {PREFIX_CHECKPOINT_DIR}-N"
        )
        raise ConfigError(f"{what}: {hint}")
    if file.stat().st_size > _MOST_BYTES:
        raise FormatError(f"{file}: is too large to be the facts of a checkpoint; take another one")
    return TrainerFacts.from_bytes(file.read_bytes(), str(file))


def whole_facts_of(folder: Path) -> TrainerFacts:
    """Of a checkpoint that counts, whose state has all of its files.

    Raises:
        ConfigError, FormatError: it has not.
    """
    facts = facts_of(folder)
    state = folder / STATE_FOLDER
    if not (folder / STATE_FILE).is_file() or (
        not isinstance(facts.holds, ModelAlone) and newest_in(state) != facts.step
    ):
        raise FormatError(
            f"resume_from_checkpoint={str(folder)!r}: files of it are gone, or have been cut; remove it, to go on "
            "from the one before"
        )
    return facts


@dataclass(frozen=True, slots=True)
class FromNothing:
    """The training begins anew."""


@dataclass(frozen=True, slots=True)
class FromNewest:
    """It goes on from the newest checkpoint of its own folder."""


@dataclass(frozen=True, slots=True)
class FromFolder:
    """It goes on from this one."""

    folder: Path


WhereFrom: TypeAlias = FromNothing | FromNewest | FromFolder


@dataclass(frozen=True, slots=True)
class Beginning:
    """How a training begins: at which checkpoint (None: at none), and which leftovers go first."""

    source: Path | None
    left: tuple[int, ...] = ()


def beginning_of(run: Path, asked: WhereFrom) -> Beginning:
    """Where a training goes on, that puts its checkpoints into ``run``.

    Raises:
        ConfigError: there is nothing to go on from; or checkpoints that it would overwrite.
        FormatError, StorageError: folders that cannot be read.
    """
    found = checkpoints_in(run)
    complete = [step for step, kind in found.items() if kind is FolderKind.COMPLETE]
    foreign = [step for step, kind in found.items() if kind is FolderKind.FOREIGN]
    source, at = None, -1
    match asked:
        case FromNewest():
            if not complete:
                raise ConfigError(
                    f"resume_from_checkpoint=True: output_dir={str(run)!r} has no checkpoint of ShardwiseTrainer's "
                    f"that was completed{_those(' (others: ', foreign, ')')}; leave it out to begin anew"
                )
            source, at = folder_of(run, complete[-1]), complete[-1]
        case FromFolder(folder):
            source = folder
            at = facts_of(folder).step if folder.parent.resolve() == run.resolve() else -1
        case FromNothing():
            pass
    odd = [*foreign, *(step for step in complete if step > at)]
    if odd:
        raise ConfigError(
            f"output_dir={str(run)!r} has {_those('', sorted(odd), '')} of another run, which this one would "
            "overwrite or remove; resume_from_checkpoint=True goes on from the newest of ShardwiseTrainer's, "
            "another output_dir begins anew, or remove them"
        )
    return Beginning(source, tuple(step for step, kind in found.items() if kind is FolderKind.LEFT))


def _those(before: str, steps: Sequence[int], after: str) -> str:
    names = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in steps[:6])
    return f"{before}{names}{', ...' if len(steps) > 6 else ''}{after}" if steps else ""


def steps_to_remove(complete: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """The oldest of more checkpoints than ``save_total_limit`` says; never the newest, nor the best."""
    if limit is None or limit <= 0 or not complete:
        return []
    kept = {max(complete), *([best] if best in complete else [])}
    others = [step for step in sorted(complete) if step not in kept]
    return others[: max(0, len(complete) - max(limit, len(kept)))]
