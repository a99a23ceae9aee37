"""Saves a model: plan, agree, write, compare, commit."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from shardwise.engines.arguments import world_of
from shardwise.engines.save_options import (
    CompareWithMemory,
    PeftNames,
    SaveOptions,
    Verification,
)
from shardwise.engines.save_plan import PreparedSave, SaveRequest, chosen, prepare, tied_names
from shardwise.errors import ConfigError, StorageError
from shardwise.execution.memory.materialize import home_of
from shardwise.execution.ranks.progress import Clock, ProgressBar
from shardwise.execution.ranks.world import World
from shardwise.execution.states.given_parts import Giver, agree_on_shares
from shardwise.execution.writing.committing import Begun, begin_save, commit_save, undo_save
from shardwise.execution.writing.owned_files import write_by_owners
from shardwise.execution.writing.saving_lock import new_token, require_lock, take_lock
from shardwise.execution.writing.write import Emitter
from shardwise.models import pretrained
from shardwise.models.four_bits.four_bit_linear import is_in_four_bits
from shardwise.models.torch_words import modules_in, to_torch
from shardwise.planning.loads.load_plan import OnDiffering
from shardwise.planning.saves.save_plan import SavePlan
from shardwise.report.save_report import SaveReport
from shardwise.storage import machine
from shardwise.storage.contract import StorageWriter
from shardwise.storage.names import is_url
from shardwise.storage.reading.opening import open_storage
from shardwise.storage.writing.opening import open_writer
from shardwise.tensors import DType
from shardwise.tuning import configs


def carry_out_save(
    ask: Callable[[str], SaveRequest],
    verify: Verification,
    on_differing_buffers: OnDiffering,
    options: SaveOptions,
    call: str,
) -> SaveReport:
    """Agree on what is saved, and save it. ``ask`` takes a token that sets this save apart. Collective: yes."""
    clock = Clock()
    with world_of(options, call) as world:
        with clock.phase("plan"):
            token = world.from_first(new_token)
            request = world.together(lambda: ask(token))
            writer = world.together(lambda: open_writer(request.directory))
        with writer:
            with clock.phase("plan"):
                held, places = chosen(world, request)
                shares = agree_on_shares(world, held, on_differing_buffers)
                ready = world.together(
                    lambda: prepare(request, held, places, shares, world.rank, writer.policy, options.budget_bytes)
                )
                how = ready.digest, repr((request.names, verify)), options.budget_bytes
                world.require_equal(
                    how, "what is to be saved, or how (names, shapes, dtypes, sizes of files, verify, budget)"
                )
            return _write_and_commit(world, writer, ready, verify, options, clock)


def require_writable(directory: str | os.PathLike[str]) -> None:
    """Find out whether a save to this directory could begin, long before it does. Leaves nothing behind.

    Collective: no.

    Raises:
        StorageError: the directory cannot be written to, or another save is writing to it.
    """
    made = [] if is_url(directory) else _folders_to_make(Path(os.path.abspath(directory)))
    try:
        with open_writer(directory) as writer:
            take_lock(writer, new_token()).release()
    finally:
        for folder in made:
            with contextlib.suppress(OSError):  # somebody else has put something into it
                folder.rmdir()


def _folders_to_make(folder: Path) -> list[Path]:
    """A folder and those above it, as far as they are not there; the innermost first."""
    return [place for place in (folder, *folder.parents) if not os.path.lexists(place)]


def _write_and_commit(
    world: World,
    writer: StorageWriter,
    ready: PreparedSave,
    verify: Verification,
    options: SaveOptions,
    clock: Clock,
) -> SaveReport:
    """Create, write, sync, compare and commit: the same steps for every model and every world size."""
    plan = ready.plan
    desk = _OnFirstRank(writer, ready)
    try:
        with clock.phase("create"):
            has_owners = _has_owners(world, writer)
            world.from_first(lambda: desk.begin(creates=not has_owners))
            world.together(lambda: require_lock(writer, plan.token))
        with ProgressBar("Saving weights", world, plan.nbytes, enabled=options.progress) as bar:
            emitter = Emitter(writer, plan.entries, ready.tensors, ready.staging, bar, world)
            with clock.phase("write"):
                if has_owners:
                    _write_by_owners(world, emitter, ready, options, bar)
                else:
                    world.together(lambda: emitter.write(ready.requests))
            with clock.phase("sync"):
                if not has_owners:
                    created = [file.name for file in plan.files] if world.rank == 0 else []
                    world.together(lambda: emitter.finish(ready.requests, created))
        with clock.phase("verify"):
            if isinstance(verify, CompareWithMemory):
                _require_same(world, emitter, ready)
            sums = _add_up(world, plan, emitter)
        with clock.phase("commit"):
            removed = world.from_first(lambda: desk.commit(sums))
    except BaseException:  # Ctrl-C, too: the next save of this process must find no mark of this one
        desk.undo()
        raise
    return _report(world, emitter, ready, verify, removed, clock)


def _report(
    world: World,
    emitter: Emitter,
    ready: PreparedSave,
    verify: Verification,
    removed: Sequence[str],
    clock: Clock,
) -> SaveReport:
    plan = ready.plan
    return SaveReport(
        rank=world.rank,
        world_size=world.size,
        directory=emitter.writer.root,
        files=plan.names,
        tensors=len(plan.entries),
        parameters=ready.parameters,
        checkpoint_bytes=plan.nbytes,
        written_bytes=sum(emitter.written_bytes.values()),
        dtypes=dict(Counter(entry.dtype.label for entry in plan.entries.values())),
        cast=ready.cast,
        tied=tied_names(ready),
        differing_buffers=ready.shares.differing,
        removed=tuple(removed),
        is_verified=isinstance(verify, CompareWithMemory),
        seconds=dict(clock.seconds),
    )


def _has_owners(world: World, writer: StorageWriter) -> bool:
    """Whether a file must be written by one rank alone; the same on every rank. Collective: yes.

    So it is where a storage takes files as streams, and on a network file system for ranks on several machines,
    which would undo each other's bytes in the blocks that they share.
    """

    def decide(hosts: Sequence[tuple[bool, int, str]]) -> bool:
        takes_ranges = all(has_random_writes for has_random_writes, _, _ in hosts)
        is_shared = any(block_bytes > 1 for _, block_bytes, _ in hosts) and len({host for _, _, host in hosts}) > 1
        return not takes_ranges or is_shared

    policy = writer.policy
    return world.all_reduce(lambda: (policy.has_random_writes, policy.block_bytes, machine.boot()), decide)


def _write_by_owners(
    world: World, emitter: Emitter, ready: PreparedSave, options: SaveOptions, progress: ProgressBar
) -> None:
    """Collective: yes."""
    written = write_by_owners(
        world,
        emitter.writer,
        ready.plan.files,
        {key: output.expression for key, output in ready.outputs.items()},
        Giver({name: item for item in ready.held for name in item.names}, ready.shares.by_name, world.rank),
        ready.shares.by_name,
        budget_bytes=options.budget_bytes,
        device=home_of(ready.held, None),
        progress=progress,
    )
    emitter.written_bytes.update(written.bytes_by_file)
    emitter.sums.update(written.fingerprints)


class _OnFirstRank:
    """What one rank does for all: before anything is written, and when all is. Nothing on the others."""

    def __init__(self, writer: StorageWriter, ready: PreparedSave) -> None:
        self._writer = writer
        self._ready = ready
        self._small_files: dict[str, bytes] = {}
        self._begun: Begun | None = None

    def begin(self, *, creates: bool) -> None:
        """Mark the folder, look at what is there, and perhaps create the files."""
        writer, plan = self._writer, self._ready.plan
        self._small_files = _small_files(self._ready.request, plan)
        self._begun = begin_save(writer, plan)
        for file in plan.files if creates else ():
            writer.create(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header)])

    def commit(self, sums: Mapping[str, int]) -> list[str]:
        """Let the save count; the names of what was removed."""
        assert self._begun is not None
        return commit_save(self._writer, self._ready.plan, self._begun, self._small_files, sums)

    def undo(self) -> None:
        """Give the save up, if it was begun."""
        if self._begun is not None:
            undo_save(self._writer, self._ready.plan, self._begun)


def _small_files(request: SaveRequest, plan: SavePlan) -> dict[str, bytes]:
    """What transformers, or PEFT, writes beside the weights.

    Config, generation config, the model's own code, of an adapter its config; and the tokenizer's files.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        if isinstance(request.names, PeftNames):
            configs.save_config(request.model, request.names.adapter, folder)
        else:
            pretrained.save_small_files(request.model, _main_dtype(request, plan), Path(folder))
        tokenizer = request.tokenizer
        if tokenizer is not None:
            if not hasattr(tokenizer, "save_pretrained"):
                raise ConfigError(f"tokenizer={tokenizer!r} has no save_pretrained; pass a tokenizer or processor")
            tokenizer.save_pretrained(folder)
        found = sorted(Path(folder).iterdir())
        folders = [path.name for path in found if path.is_dir()]
        if folders:
            raise ConfigError(
                f"{type(tokenizer).__name__} writes a folder, {folders[0]}, and a save writes files only; leave "
                "tokenizer=... out, and call its save_pretrained afterwards"
            )
        return {path.name: path.read_bytes() for path in found}


def _main_dtype(request: SaveRequest, plan: SavePlan) -> torch.dtype | None:
    """The dtype that most of the saved floating-point numbers have; in four bits, that they had."""
    if packed := next((module for module in modules_in(request.model) if is_in_four_bits(module)), None):
        dtype: torch.dtype = packed.packing.dtype
        return dtype
    numels: Counter[DType] = Counter()
    for entry in plan.entries.values():
        if entry.dtype.kind == "float" and entry.dtype.bits >= 16:
            numels[entry.dtype] += entry.numel
    return to_torch(numels.most_common(1)[0][0]) if numels else None


def _require_same(world: World, emitter: Emitter, ready: PreparedSave) -> None:
    """Collective: yes."""

    def compare() -> tuple[list[str], list[str]]:
        with open_storage(ready.request.directory).reader as reader:
            headers = ready.plan.files if world.rank == 0 else ()
            files = [file.name for file in headers if reader.read(file.name, 0, len(file.header)) != file.header]
            return files, emitter.require_same(reader, ready.requests)

    for rank, (files, keys) in enumerate(world.each(compare)):
        if files or keys:
            what = f"{len(keys)} tensors, such as {keys[0]}," if keys else f"the header of {files[0]}"
            raise StorageError(
                f"{what} that rank {rank} wrote to {emitter.writer.root} read otherwise than they are in memory; "
                "the disk or its driver loses data: the older save has been kept"
            )


def _add_up(world: World, plan: SavePlan, emitter: Emitter) -> dict[str, int]:
    """The fingerprint of every tensor, of the parts that ranks wrote. Collective: yes.

    Raises:
        StorageError: not every byte was written, or some twice.
    """
    keys, files = list(plan.entries), [file.name for file in plan.files]
    own = [emitter.sums.get(key, 0) for key in keys] + [emitter.written_bytes.get(name, 0) for name in files]
    total = world.sum_words(own)
    for file, written in zip(plan.files, total[len(keys) :], strict=True):
        wanted = file.nbytes - len(file.header)
        if written != wanted:
            raise StorageError(
                f"{file.name}: the ranks wrote {written:,} of {wanted:,} bytes between them; they hold different "
                "models, or the mesh leaves out a rank"
            )
    return dict(zip(keys, total, strict=False))
