"""Checkpoints in the output folder of a Trainer: finds, commits and removes them.

[Note: A checkpoint of the Trainer] ``checkpoint-N`` holds the model as ``save_pretrained`` would write it, the
state of the training under ``state`` (a checkpoint of :class:`~shardwise.checkpoints.checkpointer.Checkpointer`),
and ``trainer_state.json``. It is complete once ``shardwise.trainer.json`` exists, which is put in place in one step
when everything else is durable ([Note: One commit] in ``saving/commit_plan.py``). The first file of a checkpoint is
``shardwise.begun``, which distinguishes the remains of a killed save from files of others: the next save or resume
removes the former, the latter are an error. A checkpoint is removed in reverse order: first the file that commits
it. If the step is evaluated after it was saved, ``trainer_state.json`` is replaced in one step. If a stop leaves
that evaluation out, so is the header before.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from huggingface_hub import HfApi

from shardwise.checkpoints.step_folders import is_complete_folder, step_folder_name, steps_in
from shardwise.checkpoints.trainer_folders import (
    BEGUN_FILE,
    HEADER_FILE,
    MODEL_ALONE,
    STATE_FILE,
    STATE_FOLDER,
    TRAINER_FOLDER,
    TrainerHeader,
)
from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.files.folders import folders_in, remove_files
from shardwise.files.local_writer import LocalWriter
from shardwise.integrations.trainer_compat import PREFIX_CHECKPOINT_DIR
from shardwise.integrations.trainer_restoring import TrainerFolder
from shardwise.ranks.world import World
from shardwise.saving.commit import make_file, publish, write_again
from shardwise.saving.commit_plan import pending_name
from shardwise.saving.locked_folder import LockedFolder, Saving, lock_here, lock_on_first_rank
from shardwise.saving.rename_journal import remove_pending
from shardwise.transfer import fingerprints

_log = logging.getLogger(__name__)


_RUN_RECORDS = ".shardwise-*"
"""Pattern of files in an output folder that are not for the hub: the record of a run, with its lock."""

_SHARDS = f"model-{'[0-9a-f]' * 8}-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"
"""Pattern of the shards of a model, which have new names in each save."""


class FolderKind(Enum):
    """Content of a folder ``checkpoint-N``."""

    COMPLETE = "a complete checkpoint"
    INCOMPLETE = "an incomplete checkpoint"
    FOREIGN = "files of others"


def checkpoints_in(run: Path) -> dict[int, FolderKind]:
    """Return the kinds of the folders ``checkpoint-N`` of a run, by step, in order.

    Raises:
        StorageError: the folder cannot be listed.
    """
    try:
        names = os.listdir(run)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StorageError(f"{run}: looking for checkpoints failed, {error.strerror}. Check output_dir") from error
    steps = sorted(int(match[1]) for name in names if (match := TRAINER_FOLDER.fullmatch(name)))
    return {step: get_folder_kind(checkpoint_folder(run, step)) for step in steps}


def complete_steps(run: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, in order. Errors: see :func:`checkpoints_in`."""
    return [step for step, kind in checkpoints_in(run).items() if kind is FolderKind.COMPLETE]


def checkpoint_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def step_in(run: Path, folder: str | None) -> int | None:
    """Return the step of a checkpoint of this run, or None for other folders."""
    match = None if folder is None else TRAINER_FOLDER.fullmatch(Path(folder).name)
    if folder is None or match is None or Path(folder).parent.resolve() != run.resolve():
        return None
    return int(match[1])


def read_checkpoint(source: Path) -> tuple[TrainerHeader, str | None, tuple[int, float], bool]:
    """Read the header of a complete checkpoint, the best one so far of its run, and its position in a stream.

    The position is the number of passes before, and of optimizer steps in this pass. The last value is False if a
    stop has saved the checkpoint, and the log has no evaluation of its step.

    Raises:
        ConfigError, FormatError, StorageError: as :func:`read_complete_header`, or the Trainer's state in
            ``source`` cannot be read.
    """
    header, folder = read_complete_header(source), TrainerFolder.open(source)
    epoch, max_steps = int(folder.epoch), folder.state.get("max_steps")
    if type(max_steps) is int and abs(max_steps) >= 1 << 64:
        raise FormatError(f"{STATE_FILE} in {source}: its max_steps is damaged. Pass another checkpoint")
    # Of a stream, whose length it does not know, the Trainer counts max_steps as one pass. With max_steps=40 the
    # epoch 2.25 is the position (2, 10.0): two passes, and ten steps of the third.
    steps = (folder.epoch - epoch) * max_steps if type(max_steps) is int else 0
    log = folder.state.get("log_history")
    entries = [entry for entry in log if isinstance(entry, dict)] if isinstance(log, list) else []
    names = [name for entry in entries if entry.get("step") == header.step for name in entry]
    is_evaluated = not header.is_stop or any(name.startswith("eval_") for name in names)
    return header, _find_best(folder), (epoch, steps), is_evaluated


def _find_best(folder: TrainerFolder) -> str | None:
    """Return the best checkpoint so far of a run, or None.

    A run may have been moved, so a sibling of ``folder`` with the recorded name is used.
    """
    recorded = folder.state.get("best_model_checkpoint")
    if not isinstance(recorded, str):
        return None
    beside = folder.path.parent / Path(recorded).name
    if TRAINER_FOLDER.fullmatch(beside.name) and get_folder_kind(beside) is FolderKind.COMPLETE:
        return str(beside)
    return recorded if get_folder_kind(Path(recorded)) is FolderKind.COMPLETE else None


def get_folder_kind(folder: Path) -> FolderKind:
    """Return the kind of a folder ``checkpoint-N``. An empty one is an incomplete checkpoint."""
    if (folder / HEADER_FILE).is_file():
        return FolderKind.COMPLETE
    if not folder.is_dir():
        return FolderKind.FOREIGN
    # An empty folder is left by a save that is killed before it writes the marker.
    is_incomplete = (folder / BEGUN_FILE).is_file() or not any(folder.iterdir())
    return FolderKind.INCOMPLETE if is_incomplete else FolderKind.FOREIGN


def read_header(folder: Path) -> TrainerHeader:
    """Read the header of a complete checkpoint.

    Raises:
        ConfigError: the checkpoint is not complete, or was not saved by a ShardwiseTrainer.
        FormatError: the header is damaged.
    """
    what = f"resume_from_checkpoint={str(folder)!r}"
    if not folder.is_dir():
        raise ConfigError(f"{what}: no such folder. Pass a folder {PREFIX_CHECKPOINT_DIR}-N, or True")
    # Without a header, the other files tell what the folder is.
    file = folder / HEADER_FILE
    if not file.is_file():
        if (folder / BEGUN_FILE).is_file():
            raise ConfigError(
                f"{what}: was never completed. Pass resume_from_checkpoint=True for the newest that was"
            )
        if (folder / STATE_FILE).is_file():
            raise ConfigError(
                f"{what}: was not saved by ShardwiseTrainer (by the Trainer itself, or under accelerate's FSDP). "
                "Load its model with shardwise.load_trainer_checkpoint(model, folder)"
            )
        raise ConfigError(f"{what}: is not a checkpoint. Pass a folder {PREFIX_CHECKPOINT_DIR}-N")
    return TrainerHeader.read(file)


def read_complete_header(folder: Path) -> TrainerHeader:
    """Read the header of a complete checkpoint, and check that its state has all of its files.

    Raises:
        ConfigError, FormatError: as :func:`read_header`, or files are missing or truncated.
    """
    header = read_header(folder)
    # The header is written last, so a file is missing only if it was removed later, or not copied.
    # Of copies from the hub, the state may have folders of other steps, too.
    state = folder / STATE_FOLDER
    is_complete = header.holds == MODEL_ALONE or (
        header.step in steps_in(state) and is_complete_folder(state / step_folder_name(header.step))
    )
    if not (folder / STATE_FILE).is_file() or not is_complete:
        raise FormatError(
            f"resume_from_checkpoint={str(folder)!r}: files are missing or truncated. Remove it to resume from the "
            "one before"
        )
    return header


def resume_source(run: Path, requested: Path | Literal["newest"] | None) -> tuple[Path | None, bool]:
    """Find the checkpoint that a training run with the output folder ``run`` resumes from.

    Return it, or None to start from the beginning, and whether incomplete checkpoints have to be removed.

    Raises:
        ConfigError: there is no checkpoint to resume from, or there are checkpoints that it would overwrite.
        FormatError, StorageError: a folder cannot be read.
    """
    kinds = checkpoints_in(run)
    complete = [step for step, kind in kinds.items() if kind is FolderKind.COMPLETE]
    foreign = [step for step, kind in kinds.items() if kind is FolderKind.FOREIGN]
    # The step of this folder that the training continues from. It is -1 for a training run that starts from the
    # beginning, or from a checkpoint in another folder: then all checkpoints here are of another run.
    source, at = None, -1
    if requested == "newest":
        if not complete:
            others = f" (others: {_names(foreign)})" if foreign else ""
            raise ConfigError(
                f"resume_from_checkpoint=True: output_dir={str(run)!r} has no complete checkpoint of "
                f"ShardwiseTrainer{others}. Leave it out to start from the beginning, in a new output_dir"
            )
        source, at = checkpoint_folder(run, complete[-1]), complete[-1]
    elif requested is not None:
        source = requested
        step = read_header(requested).step
        at = step if requested.parent.resolve() == run.resolve() else -1
    later = [step for step in complete if step > at]
    if source is not None and at >= 0 and later and not foreign:
        raise ConfigError(
            f"output_dir={str(run)!r} has {_names(later)}, which this training would overwrite or remove. Remove "
            f"them to resume from {source.name}, or pass resume_from_checkpoint=True to resume from the newest"
        )
    if others_in_way := sorted([*foreign, *later]):
        resume = "resume_from_checkpoint=True to resume from the newest, or choose " if complete else ""
        raise ConfigError(
            f"output_dir={str(run)!r} has {_names(others_in_way)} of another run, which this one would overwrite "
            f"or remove. Pass {resume}another output_dir, or remove them"
        )
    return source, FolderKind.INCOMPLETE in kinds.values()


def _names(steps: Sequence[int]) -> str:
    names = ", ".join(f"{PREFIX_CHECKPOINT_DIR}-{step}" for step in steps[:6])
    return f"{names}, ..." if len(steps) > 6 else names


def steps_to_remove(complete: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Return the oldest checkpoints above ``save_total_limit``, without the newest and the best."""
    if limit is None or limit <= 0 or not complete:
        return []
    # Of steps 1 to 5 with a limit of 2, 1 to 3 are removed, or 2 to 4 if 1 is the best.
    removable = [step for step in sorted(complete) if step not in (max(complete), best)]
    return removable[: max(0, len(complete) - limit)]


@contextlib.contextmanager
def locked_for(world: World, run: Path, step: int) -> Iterator[Saving]:
    """Lock an output folder while the checkpoint of this step is saved, and remove incomplete checkpoints.

    Collective: yes, at the beginning.

    Raises:
        StorageError: another save is in progress or has saved this step, or the step's folder has files of others.
    """
    with lock_on_first_rank(world, run) as saving:
        try:
            with world.broadcast("begin the save"):
                if world.rank == 0:
                    _begin(run, step, saving.save_id)
            yield saving
        except BaseException:
            # On the first rank, which has the lock. If the removal fails, the first error is still the one raised.
            with contextlib.suppress(StorageError):
                if saving.is_locked_here:
                    _undo(run, step, saving.locked)
            raise


def _begin(run: Path, step: int, save_id: str) -> None:
    # Before the folder is examined, see [Note: Checked twice] in ``saving/commit.py``.
    _remove_incomplete_checkpoints(run)
    folder = checkpoint_folder(run, step)
    if folder.is_dir():
        raise StorageError(
            f"{folder}: exists already, with {get_folder_kind(folder).value}. Nothing was overwritten"
        )
    # The marker is durable before there is any other file, so that all remains of a killed save are recognized.
    with LocalWriter(folder, folders=()) as writer:
        make_file(writer, BEGUN_FILE, save_id.encode())
        writer.sync_names()


def _undo(run: Path, step: int, locked: LockedFolder) -> None:
    """Remove the files written for the step, unless it is committed or the folder belongs to another save."""
    folder = checkpoint_folder(run, step)
    if not folder.is_dir():
        return
    if locked.is_held():
        if (folder / BEGUN_FILE).is_file():
            _remove(folder, is_complete=False)
        return
    # The lock is lost: another save may be writing into this folder. Only the pending header has this save's name.
    with LocalWriter(folder, folders=folders_in(folder)) as writer:
        writer.remove(pending_name(HEADER_FILE, locked.save_id))
        names = writer.list()
        is_marked = BEGUN_FILE in names or HEADER_FILE in names
        if not is_marked and (names or writer.folders):  # it was removed, and this save's files came later
            with contextlib.suppress(OSError):
                remove_files(writer, names)
                os.rmdir(folder)


def complete(saving: Saving, folder: Path, header: TrainerHeader) -> None:
    """Make the files of a checkpoint durable, and commit it.

    Raises:
        StorageError: the files could not be written, or another save has begun in the folder.
    """
    locked = saving.locked
    locked.require()
    with LocalWriter(folder, folders=folders_in(folder)) as writer:
        if writer.read(BEGUN_FILE) != locked.save_id.encode():
            raise StorageError(
                f"{folder}: another training has begun to save there. Use a different output_dir for each"
            )
        # Weights and states are synced when they are written, and are not copied again.
        durable = _find_durable(writer)
        for name in writer.list():  # those of the Trainer, which syncs none
            if name not in durable and not name.startswith(f"{STATE_FOLDER}/"):
                write_again(writer, name, locked.save_id)
        writer.sync_names()
        files = {name: nbytes for name, nbytes in writer.sizes().items() if name != HEADER_FILE}
        publish(writer, locked, HEADER_FILE, header.to_bytes(), files)


def replace_state(run: Path, folder: Path, state: Mapping[str, Any], *, is_stop: bool) -> None:
    """Replace the Trainer's state in a complete checkpoint of the output folder ``run``, in one step.

    With ``is_stop`` also its header, before, by one of a stop.

    Raises:
        StorageError: another save is in progress there, or the state cannot be written.
    """
    with lock_here(run), LocalWriter(folder, folders=()) as writer:
        if is_stop:
            header = replace(TrainerHeader.read(folder / HEADER_FILE), is_stop=True)
            writer.replace(HEADER_FILE, header.to_bytes())
        writer.replace(STATE_FILE, json.dumps(state, indent=2, sort_keys=True).encode())


@contextlib.contextmanager
def replacing_uploads() -> Iterator[None]:
    """Have uploads to the hub leave out the record of a run and delete what they replace there, within the block.

    They replace shards, if the folder has any, and in a checkpoint the states of earlier steps.
    """
    upload = HfApi.upload_folder

    def upload_and_delete(
        self: HfApi, *, folder_path: str, ignore_patterns: Sequence[str] = (), **keywords: Any
    ) -> Any:
        deleted = [_SHARDS] if any(Path(folder_path).glob(_SHARDS)) else []
        if "path_in_repo" in keywords:  # a checkpoint; elsewhere "state" may be a folder of others
            deleted.append(f"{STATE_FOLDER}/step-*")
        ignored = [*ignore_patterns, _RUN_RECORDS]
        keywords |= {"ignore_patterns": ignored, "delete_patterns": deleted or None}
        return upload(self, folder_path=folder_path, **keywords)

    with mock.patch.object(HfApi, "upload_folder", upload_and_delete):
        yield


def remove_older_shards(run: Path, folder: Path) -> None:
    """Remove shards from the output folder ``run``, if the checkpoint in ``folder`` has others."""
    shards = {file.name for file in folder.glob(_SHARDS)}
    for file in run.glob(_SHARDS):
        if shards and file.name not in shards:
            file.unlink()


def _find_durable(writer: LocalWriter) -> set[str]:
    """Return the files that saves of shardwise have synced and recorded, and the start marker."""
    durable = {BEGUN_FILE}
    for name in writer.list():
        if not name.endswith(fingerprints.fingerprint_file("")):
            continue
        # A record has names within its own folder: in "a/x.fingerprints.json", "y" is the file "a/y".
        folder, slash, _ = name.rpartition("/")
        for saved in fingerprints.parse(writer.read(name) or b"") or []:
            durable |= {f"{folder}{slash}{file}" for file in saved.files}
    return durable


def remove_under(locked: LockedFolder, run: Path, steps: Sequence[int]) -> None:
    """Remove checkpoints of a locked output folder, the file that commits each one first.

    What cannot be removed is logged, and removed by a later save.
    """
    for step in steps:
        if not locked.is_held():
            return  # the save that has the lock now removes them
        try:
            _remove(checkpoint_folder(run, step), is_complete=True)
        except StorageError as error:
            if locked.is_held():  # otherwise another save is removing the same files
                _log.warning("%s. It is removed with a later checkpoint", error)


def remove_others(run: Path, step: int) -> None:
    """Remove all complete checkpoints but that of a step.

    Raises:
        StorageError: another save is in progress there.
    """
    with lock_here(run) as saving:
        remove_under(saving.locked, run, [one for one in complete_steps(run) if one != step])


def remove_incomplete_checkpoints(run: Path) -> None:
    """Remove incomplete checkpoints.

    Raises:
        StorageError: another save is in progress there.
    """
    with lock_here(run):
        _remove_incomplete_checkpoints(run)


def _remove_incomplete_checkpoints(run: Path) -> None:
    for step, kind in checkpoints_in(run).items():
        if kind is FolderKind.INCOMPLETE:
            try:
                _remove(checkpoint_folder(run, step), is_complete=False)
            except StorageError as error:  # it is not taken for a checkpoint
                _log.warning("%s. It is removed with a later checkpoint", error)


def _remove(folder: Path, *, is_complete: bool) -> None:
    """Remove a checkpoint. One that is not complete stays if it is committed meanwhile.

    The file that commits it, or still could in case its writer resumes, is removed first.
    """
    if folder.is_symlink():  # to a checkpoint that may be another run's, and stays
        with LocalWriter(folder.parent, folders=()) as run:
            run.remove(folder.name)
        return
    with LocalWriter(folder, folders=folders_in(folder)) as writer:
        if is_complete:
            if BEGUN_FILE not in writer.list():
                writer.replace(BEGUN_FILE, b"")  # the marker goes last
            writer.remove(HEADER_FILE)
            writer.sync_names()
        else:
            remove_pending(writer, [name for name in writer.list() if name.startswith(f".{HEADER_FILE}.")])
        if HEADER_FILE not in writer.list():
            _empty(writer, folder)


def _empty(writer: LocalWriter, folder: Path) -> None:
    """Remove all files, the start marker last, and the folder."""
    remove_files(writer, [name for name in writer.list() if name != BEGUN_FILE])
    writer.sync_names()
    try:
        # NFS keeps a file that a process has open under another name. Without the marker it would be one of others.
        if left := sorted({*os.listdir(folder)} - {BEGUN_FILE}):
            raise StorageError(f"{folder}: cannot be removed, {left[0]} is still in use")
        writer.remove(BEGUN_FILE)
        os.rmdir(folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be removed ({error.strerror or error})") from error
