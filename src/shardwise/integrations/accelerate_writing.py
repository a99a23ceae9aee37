"""Writes models, optimizers and whole states of a training as accelerate does under FSDP.

Of a state, models and optimizers are written in place by all ranks. Everything else that accelerate or a hook
writes goes into a temporary folder, and the first rank copies it from there. All files have temporary names until
a list of renames commits them together ([Note: A list of renames]).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.save_reports import FilesReport
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER, SavedKind, is_accelerate_file
from shardwise.files.folders import FoldersWriter, folders_in, remove_folder
from shardwise.fsdp.named_tensors import TensorRef, without_compile
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.ranks.call_arguments import check_options, get_hints, get_world
from shardwise.ranks.world import World
from shardwise.saving import commit, rename_journal
from shardwise.saving.commit_plan import WrittenFiles, temporary_name
from shardwise.saving.locked_folder import LockedFolder, Saving, locked_here
from shardwise.saving.saving_lock import LOCK_FILE
from shardwise.saving.torch_saves import flattened, write_distributed_folder, write_rank_files, write_whole_file
from shardwise.state.model_states import collect_model
from shardwise.state.optimizer_states import collect_optimizers
from shardwise.state.state_values import StateOptions, require_same_call
from shardwise.transfer.matching import FileForm


@dataclass(frozen=True, slots=True)
class StateSave:
    """A save of a state, with the written files of its models and optimizers, which are committed together."""

    saving: Saving
    written: list[WrittenFiles] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FilesPlace:
    """The folder, number and form of a model or an optimizer, and the save of its state, if any."""

    folder: Path
    number: int
    form: FileForm
    state_save: StateSave | None = None

    def agree(self, world: World, *modes: object, options: StateOptions) -> None:
        """Raise if it is not supported, or if ranks pass different arguments. Collective: yes.

        Raises:
            ConfigError, RankMismatchError: the message has the argument.
        """
        with world.collective("check the arguments"):
            self._check()
        require_same_call(world, os.fspath(self.folder), self.form, self.number, modes, options=options)

    def _check(self) -> None:
        check_options(get_hints(save_accelerate_model), {"form": self.form})
        require_number(self.number)


def require_number(number: object) -> None:
    """Raise ConfigError unless this is the number of a model or an optimizer."""
    if type(number) is not int or number < 0:
        raise ConfigError(f"number={number!r}: is not an index. Pass the position in the folder, from 0")


def save_accelerate_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    form: FileForm = "sharded",
    *,
    number: int = 0,
    only: Selection = None,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write a model as accelerate does under FSDP2, which ``accelerator.load_state`` reads.

    ``"full"`` is ``pytorch_model_fsdp.bin`` (``_1.bin`` for number 1), ``"sharded"`` ``pytorch_model_fsdp_0/``,
    ``"local"`` ``pytorch_model_fsdp_0_rank0.bin`` and so on. Names are those of the plain model. For an adapter
    they are PEFT's. In one file, as accelerate writes it, those of the model, restricted to trained parameters.

    Collective: yes, over ``options.process_group`` (default: all ranks). Memory: ``options.budget_bytes``. With
    ``"full"`` the first rank holds the full state.

    Args:
        model: any module, sharded or not.
        directory: the folder of models and optimizers, created if missing, visible to every rank.
        form: in which form.
        number: of the model among those in the folder.
        only: ``None``, or ``AdapterOnly()`` for an adapter of PEFT's.
        options: budget, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        ShardingError: tensors are on meta, or are placed neither as shards nor as replicas.
        RankMismatchError: ranks have different models or arguments, or different values of replicas.
        StorageError: files could not be written. The older ones are unchanged.
        RankLostError: a rank has been lost.

    Every error is the same on every rank.
    """
    return save_model(model, FilesPlace(Path(directory), number, form), only, options)


def save_accelerate_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    directory: str | os.PathLike[str],
    form: FileForm = "sharded",
    *,
    number: int = 0,
    options: StateOptions = StateOptions(),  # noqa: B008
) -> FilesReport:
    """Write an optimizer as accelerate does under FSDP2, by the names of the model's parameters.

    ``"full"`` is ``optimizer.bin`` (``optimizer_1.bin``), ``"sharded"`` is ``optimizer_0/``, and
    ``"local"`` are ``optimizer_0_rank0.bin`` and so on. The layout inside is that of
    :func:`~shardwise.state.optimizer_states.get_optimizer_state_dict`.

    Collective, Memory, Raises: as for :func:`save_accelerate_model`. State that cannot be sharded is a
    ShardingError.

    Args:
        model: whose parameters the optimizer holds.
        optimizer: with state or without. (accelerate loads only complete state, from after a step.)
        directory: the folder that holds models and optimizers.
        form: in which form.
        number: of the optimizer among those in the folder.
        options: budget, process group, timeouts.
    """
    return save_optimizer(model, optimizer, FilesPlace(Path(directory), number, form), options)


@torch.no_grad()
def save_model(model: nn.Module, place: FilesPlace, only: Selection, options: StateOptions) -> FilesReport:
    """Compare replicas of a model between ranks, and write it in accelerate's format. Collective: yes.

    Memory, errors: as of :func:`save_accelerate_model`.
    """
    start = time.perf_counter()
    model = without_compile(model)
    with get_world(options, "save_accelerate_model") as world, torch.device("cpu"):
        place.agree(world, only, options=options)
        taken = collect_model(world, model, only, options)
        state = taken.by_name({name: tensor.detach() for name, tensor in taken.tensors.items()})
        if place.form == "full" and isinstance(only, AdapterOnly):
            untouched = beside_trained(taken.refs, only.adapter)
            state = {fqn: state[name] for name, fqn in taken.names.items() if fqn not in untouched}
        path, nbytes = _write(world, place, MODEL, state, taken.device, options)
    count = len({id(tensor) for tensor in state.values()})
    return FilesReport(str(path), count, nbytes, time.perf_counter() - start, taken.differing)


@torch.no_grad()
def save_optimizer(model: nn.Module, optimizer: Optimizer, place: FilesPlace, options: StateOptions) -> FilesReport:
    """Compare replicas of an optimizer's state between ranks, and write it in accelerate's format. Collective: yes.

    Memory, errors: as of :func:`save_accelerate_optimizer`.
    """
    start = time.perf_counter()
    model = without_compile(model)
    with get_world(options, "save_accelerate_optimizer") as world, torch.device("cpu"):
        place.agree(world, options=options)
        taken = collect_optimizers(world, model, optimizer, "the optimizer", options)
        path, nbytes = _write(world, place, OPTIMIZER, taken.state_dict(), taken.device, options)
    return FilesReport(str(path), len(taken.tensors), nbytes, time.perf_counter() - start)


def beside_trained(held: Sequence[TensorRef], adapter: str) -> list[str]:
    """Return all names of tensors that are neither trained nor the adapter's. Empty if nothing is trained."""
    untouched = [
        name
        for item in held
        if not item.tensor.requires_grad and not any(f".{adapter}." in f".{name}." for name in item.names)
        for name in item.names
    ]
    return untouched if any(item.tensor.requires_grad for item in held) else []


def _write(
    world: World,
    place: FilesPlace,
    kind: SavedKind,
    state: dict[str, Any],
    device: torch.device,
    options: StateOptions,
) -> tuple[Path, int]:
    """Write a state and return its path and its bytes. Collective: yes."""
    if place.state_save is not None:
        path, nbytes, written = _written(world, place.state_save.saving, place, kind, state, device, options)
        place.state_save.written.append(written)
        return path, nbytes
    with rename_journal.locked_and_clean(world, place.folder) as saving:
        path, nbytes, written = _written(world, saving, place, kind, state, device, options)
        with world.broadcast("commit the files"):
            if world.rank == 0:
                commit.commit_written(saving.locked, written, _older(place, kind, written))
    return path, nbytes


def _written(
    world: World,
    saving: Saving,
    place: FilesPlace,
    kind: SavedKind,
    state: dict[str, Any],
    device: torch.device,
    options: StateOptions,
) -> tuple[Path, int, WrittenFiles]:
    """Write a state and return its final path, its bytes, and the files to rename. Collective: yes."""
    folder, number, budget = place.folder, place.number, options.budget_bytes
    match place.form:
        case "full":
            name = kind.file(number)
            values = dict(flattened(state))
            tensors = {way: value for way, value in values.items() if isinstance(value, torch.Tensor)}
            objects = {way: value for way, value in values.items() if way not in tensors}
            nbytes, written = write_whole_file(
                world, saving, name, tensors, objects, budget_bytes=budget, device=device
            )
        case "sharded":
            name = kind.folder(number)
            with world.collective("close the files"):
                FoldersWriter(folder, [name]).close()  # which refuses links
            written = write_distributed_folder(world, saving, name, {kind.what: state}, budget_bytes=budget)
            nbytes = sum(written.beside.values())
        case "local":
            names = [kind.rank_file(number, rank) for rank in range(world.size)]
            name = names[world.rank]
            nbytes, written = write_rank_files(world, saving, names, state)
        case _:
            assert_never(place.form)
    return folder / name, nbytes, written


def _older(place: FilesPlace, kind: SavedKind, written: WrittenFiles) -> list[str]:
    """Return the files that a newly committed model or optimizer replaces: the older one in the same form."""
    match place.form:
        case "full":
            return []
        case "sharded":
            name = kind.folder(place.number)
            new = {file.removeprefix(f"{name}/") for file in written.beside}
            return [f"{name}/{file}" for file in rename_journal.find_older(place.folder / name, new)]
        case "local":
            return [
                name
                for name in os.listdir(place.folder)
                if kind.parse_rank(name, place.number) is not None and name not in written.named
            ]
        case _:
            assert_never(place.form)


_NUMBERED = re.compile(r"checkpoint_([0-9]+)")
_ALWAYS_THERE = "random_states_0.pkl"
"""A file in every committed state."""


class LinkedFolder(str):
    """The path of a folder of links that accelerate loads from, and the folder that it represents."""

    folder: Path

    @classmethod
    def link(cls, place: Path, folder: Path) -> LinkedFolder:
        made = cls(place)
        made.folder = folder
        return made


class WorkFolder(str):
    """The path of a folder that accelerate saves into, and the state that models and optimizers there belong to."""

    state_save: StateSave
    folder: Path

    @classmethod
    def create(cls, saving: Saving) -> WorkFolder:
        """For a save that is under way."""
        made = cls(rename_journal.work_folder(saving.folder, saving.save_id))
        made.state_save, made.folder = StateSave(saving), Path(saving.folder)
        return made


@contextmanager
def state_saved(world: World, folder: Path, *, is_new: bool) -> Iterator[WorkFolder]:
    """Mark a folder for the time of the block, in which accelerate saves into the folder that is given.

    The files written in the block are committed at its end and replace the older state. Other files stay. With
    ``is_new`` nothing may be in the folder.

    Collective: yes, at the beginning and the end.
    Memory: a block of a file.

    Raises:
        StorageError: another save is in progress or has taken over, a file could not be written, or the folder is
            not new.
    """
    carried: set[str] = set()
    with rename_journal.locked_and_clean(world, folder, carried) as saving:
        work = WorkFolder.create(saving)
        with world.broadcast("begin the state files"):
            if world.rank == 0:
                _begin_state(saving, work, is_new=is_new)
        yield work
        with world.all_gather("list the names") as exchange:
            exchange.local = _names_in(work)
        seen = exchange.result
        names = sorted({name for found in seen for name in found})
        carried |= {name.rpartition("/")[0] for name in names} - {""}
        with world.broadcast("commit the state files"):
            if world.rank == 0:
                _commit_state(saving.locked, work, names)


def _begin_state(saving: Saving, work: str, *, is_new: bool) -> None:
    if is_new:
        _require_new(saving.locked)
    os.mkdir(work)


def find_latest(place: Path) -> Path | None:
    """Return the folder ``checkpoint_N`` with the highest number whose state is committed, or None.

    One that is committed by the rename journal of a killed save is included. One that was never committed is
    skipped.
    """
    for _, folder in sorted(_numbered(place), reverse=True):
        with rename_journal.as_renamed(folder) as seen:
            if (seen / _ALWAYS_THERE).is_file():
                return folder
    return None


def keep_latest(place: Path, newest: Path, limit: int | None) -> None:
    """Remove all but this number of committed states ``checkpoint_N``, lowest numbers first, never the newest.

    Raises:
        StorageError: something cannot be removed, or is being saved.
    """
    found = [folder for _, folder in sorted(_numbered(place)) if (folder / _ALWAYS_THERE).is_file()]
    for folder in found[: max(0, len(found) - limit)] if limit is not None else ():
        if folder != newest and not folder.is_symlink():  # a link leads to another folder
            with locked_here(folder) as saving, FoldersWriter(folder) as writer:
                rename_journal.clean_up(saving)
                writer.remove(_ALWAYS_THERE)  # a half of a state does not count as one
                writer.sync_names()
            remove_folder(folder)


def _numbered(place: Path) -> list[tuple[int, Path]]:
    if not place.is_dir():
        return []
    return [(int(found[1]), path) for path in place.iterdir() if (found := _NUMBERED.fullmatch(path.name))]


def _require_new(locked: LockedFolder) -> None:
    root = locked.writer.root
    others = [name for name in os.listdir(root) if name != LOCK_FILE]
    if others:
        raise StorageError(
            f"{root}: exists already. Set accelerator.project_configuration.iteration to the number that is to "
            "be saved next"
        )


def _names_in(work: str) -> list[str]:
    with FoldersWriter(work, folders_in(work)) as writer:
        return writer.list()


def _commit_state(locked: LockedFolder, work: WorkFolder, names: list[str]) -> None:
    """Copy accelerate's files and commit everything."""
    written = WrittenFiles()
    for files in work.state_save.written:
        written = written.with_more(files)
    copies: dict[str, int] = {}
    folders = {name.rpartition("/")[0] for name in names} - {""}
    with FoldersWriter(locked.writer.root, folders) as writer:
        rename_journal.remove_temporary(
            writer, [name for name in writer.list() if name.rpartition("/")[0] in folders]
        )
        for name in names:
            copies[name] = commit.copy_in(writer, os.path.join(work, name), temporary_name(name, locked.save_id))
        writer.sync_names()
    written = written.with_more(WrittenFiles(copies))
    commit.commit_written(locked, written, _older_state(locked.writer.root, written))


def _older_state(root: str, written: WrittenFiles) -> list[str]:
    """Return the files of an older state that are not replaced by a new one."""
    with FoldersWriter(root, rename_journal.distributed_folders(root)) as writer:
        new = {*written.named, *written.beside}
        return [name for name in writer.list() if is_accelerate_file(name) and name not in new]
