"""Writes models, optimizers and whole states of a training run as accelerate does under FSDP.

Of a state, models and optimizers are written in place by all ranks. Everything else that accelerate or a hook
writes goes into a temporary folder, and the first rank copies it from there. All files have temporary names until
a rename journal commits them together ([Note: Rename journals] in ``saving/commit_plan.py``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, assert_never

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.save_reports import FilesReport
from shardwise.files.accelerate_saves import MODEL, OPTIMIZER, SavedKind, is_accelerate_file
from shardwise.files.folders import folders_in, remove_folder
from shardwise.files.local_writer import LocalWriter
from shardwise.fsdp.named_tensors import TensorRef, unwrap
from shardwise.models.selection import AdapterOnly, Selection
from shardwise.ranks.call_arguments import get_world
from shardwise.ranks.world import World
from shardwise.saving import commit, rename_journal, torch_saves
from shardwise.saving.commit_plan import WrittenFiles, temporary_name
from shardwise.saving.locked_folder import LockedFolder, Saving, lock_here
from shardwise.saving.saving_lock import LOCK_FILE
from shardwise.state.model_states import collect_model
from shardwise.state.optimizer_states import collect_optimizers
from shardwise.state.state_values import StateOptions, agree_on_arguments
from shardwise.transfer.matching import FileForm


class TemporaryFolder(str):
    """The path that accelerate loads from or saves into, in place of the folder of the state.

    Attributes:
        folder: the folder of the state.
        saving: the save that models and optimizers belong to. None in a load.
        written: their files, which are committed together.
    """

    folder: Path
    saving: Saving | None
    written: list[WrittenFiles]

    def __new__(cls, path: str | Path, folder: Path, saving: Saving | None = None) -> Self:
        self = super().__new__(cls, path)
        self.folder, self.saving, self.written = folder, saving, []
        return self


@dataclass(frozen=True, slots=True)
class FilesPlace:
    """The folder, number and form of a model or an optimizer, and the state that it is saved with, if any."""

    folder: Path
    number: int
    form: FileForm
    state: TemporaryFolder | None = None


def agree_on_call(
    world: World, call: object, path: Path, number: object, arguments: Mapping[str, Any], options: StateOptions
) -> None:
    """Raise if arguments are not supported, or if ranks pass different ones. Collective: yes.

    ``arguments`` are those of the public function ``call``, by name, without ``path``, ``number`` and ``options``.

    Raises:
        ConfigError, RankMismatchError: the message has the argument.
    """
    with world.collective("check the number"):
        if type(number) is not int or number < 0:
            raise ConfigError(f"number={number!r}: is not an index. Pass the position in the folder, from 0")
    agree_on_arguments(world, call, arguments, options, path=os.fspath(path), number=number)


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
    return save_model(model, FilesPlace(Path(os.path.expanduser(directory)), number, form), only, options)


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
    return save_optimizer(model, optimizer, FilesPlace(Path(os.path.expanduser(directory)), number, form), options)


@torch.no_grad()
def save_model(model: nn.Module, place: FilesPlace, only: Selection, options: StateOptions) -> FilesReport:
    """Compare replicas of a model between ranks, and write it in accelerate's format. Collective: yes.

    Memory, errors: as of :func:`save_accelerate_model`.
    """
    start = time.perf_counter()
    model = unwrap(model)
    with get_world(options, "save_accelerate_model") as world, torch.device("cpu"):
        arguments = {"form": place.form, "only": only}
        agree_on_call(world, save_accelerate_model, place.folder, place.number, arguments, options)
        collected = collect_model(world, model, only, options)
        state = collected.by_name({name: tensor.detach() for name, tensor in collected.tensors.items()})
        # accelerate writes one file of an adapter under the model's names, without what is not trained.
        if place.form == "full" and isinstance(only, AdapterOnly):
            untrained = untrained_names(collected.refs, only.adapter)
            state = {fqn: state[name] for name, fqn in collected.names.items() if fqn not in untrained}
        path, nbytes = _write(world, place, MODEL, state, collected.device, options)
    # By identity: a tied tensor is one object under several names.
    count = len({id(tensor) for tensor in state.values()})
    return FilesReport(str(path), count, nbytes, time.perf_counter() - start, collected.differing)


@torch.no_grad()
def save_optimizer(model: nn.Module, optimizer: Optimizer, place: FilesPlace, options: StateOptions) -> FilesReport:
    """Compare replicas of an optimizer's state between ranks, and write it in accelerate's format. Collective: yes.

    Memory, errors: as of :func:`save_accelerate_optimizer`.
    """
    start = time.perf_counter()
    model = unwrap(model)
    with get_world(options, "save_accelerate_optimizer") as world, torch.device("cpu"):
        arguments = {"form": place.form}
        agree_on_call(world, save_accelerate_optimizer, place.folder, place.number, arguments, options)
        state = collect_optimizers(world, model, optimizer, "the optimizer", options)
        path, nbytes = _write(world, place, OPTIMIZER, state.state_dict(), state.device, options)
    return FilesReport(str(path), len(state.tensors), nbytes, time.perf_counter() - start)


def untrained_names(tensors: Sequence[TensorRef], adapter: str) -> list[str]:
    """Return all names of tensors that are neither trained nor the adapter's. Empty if nothing is trained."""
    if not any(item.tensor.requires_grad for item in tensors):
        return []
    untrained: list[str] = []
    for item in tensors:
        if not item.tensor.requires_grad and not any(f".{adapter}." in f".{name}." for name in item.names):
            untrained += item.names
    return untrained


def _write(
    world: World,
    place: FilesPlace,
    kind: SavedKind,
    state: dict[str, Any],
    device: torch.device,
    options: StateOptions,
) -> tuple[Path, int]:
    """Write a state and return its path and its bytes. Collective: yes."""
    # Within save_state, which has locked the folder and commits at its end. Otherwise this is a save of its own.
    if place.state is not None:
        assert place.state.saving is not None, "a load writes nothing"
        path, nbytes, written = _write_files(world, place.state.saving, place, kind, state, device, options)
        place.state.written.append(written)  # committed with the state
        return path, nbytes
    with rename_journal.lock_and_clean_up(world, place.folder) as saving:
        path, nbytes, written = _write_files(world, saving, place, kind, state, device, options)
        with world.broadcast("commit the files"):
            if world.rank == 0:
                commit.commit_written(saving.locked, written, _find_older(place, kind, written))
    return path, nbytes


def _write_files(
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
            # By path in the tree of the state: tensors, and all other values.
            values = dict(torch_saves.flatten_values(state))
            tensors = {way: value for way, value in values.items() if isinstance(value, torch.Tensor)}
            objects = {way: value for way, value in values.items() if way not in tensors}
            nbytes, written = torch_saves.write_whole_file(
                world, saving, name, tensors, objects, budget_bytes=budget, device=device
            )
        case "sharded":
            name = kind.folder(number)
            with world.collective("close the files"):
                LocalWriter(folder, folders=[name]).close()  # which refuses links
            written = torch_saves.write_distributed_folder(
                world, saving, name, {kind.what: state}, budget_bytes=budget
            )
            nbytes = sum(written.beside.values())
        case "local":
            names = [kind.rank_file(number, rank) for rank in range(world.size)]
            name = names[world.rank]
            nbytes, written = torch_saves.write_rank_files(world, saving, names, state)
        case _:
            assert_never(place.form)
    return folder / name, nbytes, written


def _find_older(place: FilesPlace, kind: SavedKind, written: WrittenFiles) -> list[str]:
    """Return the files that a newly committed model or optimizer replaces: the older one in the same form."""
    match place.form:
        case "full":
            return []  # the new file has the name of the older one
        case "sharded":
            name = kind.folder(place.number)
            new = {file.removeprefix(f"{name}/") for file in written.beside}
            return [f"{name}/{file}" for file in rename_journal.find_older(place.folder / name, new)]
        case "local":
            # More ranks may have written the older one.
            names = os.listdir(place.folder)
            of_ranks = [name for name in names if kind.parse_rank(name, place.number) is not None]
            return [name for name in of_ranks if name not in written.named]
        case _:
            assert_never(place.form)


_NUMBERED = re.compile(r"checkpoint_([0-9]+)")
_ALWAYS_THERE = "random_states_0.pkl"
"""A file in every committed state."""


@contextmanager
def saving_state(world: World, folder: Path, *, is_new: bool) -> Iterator[tuple[Saving, TemporaryFolder]]:
    """Lock a folder, and yield its save and the folder that accelerate saves into within the block.

    The files written in the block are committed at its end and replace the older state. Other files stay. With
    ``is_new`` nothing may be in the folder.

    Collective: yes, at the beginning and the end.
    Memory: a block of a file.

    Raises:
        StorageError: another save is in progress or has taken over, a file could not be written, or the folder is
            not new.
    """
    # Folders of accelerate's files. It is filled before the commit, and read if that fails, to remove the copies.
    carried: set[str] = set()
    with rename_journal.lock_and_clean_up(world, folder, carried) as saving:
        path = rename_journal.work_folder(saving.folder, saving.save_id)
        work = TemporaryFolder(path, Path(saving.folder), saving)
        with world.broadcast("begin the state files"):
            if world.rank == 0:
                if is_new:
                    _require_new(saving.locked)
                os.mkdir(work)
        yield saving, work
        # Every rank lists the names: on a network file system the first may not see new files of others yet.
        with world.all_gather("list the names") as exchange, LocalWriter(work, folders=folders_in(work)) as writer:
            exchange.local = writer.list()
        names = sorted(set().union(*exchange.result))
        carried |= {name.rpartition("/")[0] for name in names} - {""}
        with world.broadcast("commit the state files"):
            if world.rank == 0:
                _commit_state(saving.locked, work, names)


def find_latest(place: Path) -> Path | None:
    """Return the folder ``checkpoint_N`` with the highest number whose state is committed, or None.

    One that is committed by the rename journal of a killed save is included. One that was never committed is
    skipped.
    """
    for _, folder in sorted(_numbered(place), reverse=True):
        with rename_journal.link_as_renamed(folder) as seen:
            if (seen / _ALWAYS_THERE).is_file():
                return folder
    return None


def keep_latest(place: Path, newest: Path, limit: int | None) -> None:
    """Remove all but this number of committed states ``checkpoint_N``, lowest numbers first, never the newest.

    Raises:
        StorageError: something cannot be removed, or is being saved.
    """
    if limit is None:
        return
    committed = [folder for _, folder in sorted(_numbered(place)) if (folder / _ALWAYS_THERE).is_file()]
    for folder in committed[: max(0, len(committed) - limit)]:
        if folder != newest and not folder.is_symlink():  # a link leads to another folder
            with lock_here(folder) as saving, LocalWriter(folder, folders=()) as writer:
                rename_journal.clean_up(saving)
                writer.remove(_ALWAYS_THERE)  # a half of a state does not count as one
                writer.sync_names()
            remove_folder(folder)


def _numbered(place: Path) -> list[tuple[int, Path]]:
    if not place.is_dir():
        return []
    return [(int(match[1]), path) for path in place.iterdir() if (match := _NUMBERED.fullmatch(path.name))]


def _require_new(locked: LockedFolder) -> None:
    root = locked.writer.root
    others = [name for name in os.listdir(root) if name != LOCK_FILE]
    if others:
        raise StorageError(
            f"{root}: exists already. Set accelerator.project_configuration.iteration to the number that is to "
            "be saved next"
        )


def _commit_state(locked: LockedFolder, work: TemporaryFolder, names: list[str]) -> None:
    """Copy accelerate's files and commit everything."""
    written = WrittenFiles()
    for files in work.written:
        written = written.with_more(files)
    # The files of models and optimizers have temporary names in the folder already. accelerate's files get theirs
    # here, after those of killed saves are removed.
    copies: dict[str, int] = {}
    folders = {name.rpartition("/")[0] for name in names} - {""}
    with LocalWriter(locked.writer.root, folders=folders) as writer:
        rename_journal.remove_temporary(
            writer, [name for name in writer.list() if name.rpartition("/")[0] in folders]
        )
        for name in names:
            copies[name] = commit.copy_in(writer, os.path.join(work, name), temporary_name(name, locked.save_id))
        writer.sync_names()
    written = written.with_more(WrittenFiles(copies))
    # The files of an older state that are not replaced by new ones.
    with LocalWriter(locked.writer.root, folders=rename_journal.distributed_folders(locked.writer.root)) as writer:
        new = {*written.named, *written.beside}
        older = [name for name in writer.list() if is_accelerate_file(name) and name not in new]
    commit.commit_written(locked, written, older)
