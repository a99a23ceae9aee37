"""Saves a model or an adapter: plan, agree, write, compare, commit."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from shardwise.engines import save_plan
from shardwise.engines.arguments import hints_of, require_meant, world_of
from shardwise.errors import ConfigError, StorageError, answer_keywords
from shardwise.execution.committing import CommitState, begin_save, commit_save, undo_save
from shardwise.execution.memory import home_of
from shardwise.execution.replicas import ShardSender, agree_on_shares
from shardwise.execution.saving_lock import new_save_id, require_lock
from shardwise.execution.world import Clock, World
from shardwise.execution.write import Emitter, write_by_owners
from shardwise.models import revert
from shardwise.models.four_bit_layers import is_in_four_bits
from shardwise.models.pretrained import progress_bar
from shardwise.models.torch_api import to_torch
from shardwise.models.view import without_compile
from shardwise.planning.load_plan import OnDiffering
from shardwise.planning.save_plan import SavePlan
from shardwise.report.save_reports import SaveReport
from shardwise.storage import machine
from shardwise.storage.contract import StorageWriter
from shardwise.storage.reading import open_storage
from shardwise.storage.writing import open_writer
from shardwise.tensors import DType, in_bytes_of
from shardwise.tuning import peft_compat


def execute_save(
    ask: Callable[[], save_plan.SaveRequest],
    on_differing_buffers: OnDiffering,
    options: save_plan.SaveOptions,
    call: str,
    *,
    verify: bool,
) -> SaveReport:
    """Agree on the content of the save, and carry it out. Collective: yes."""
    clock = Clock()
    with world_of(options, call) as world:
        with clock.phase("plan"):
            save_id = world.broadcast(new_save_id)
            request = world.run_all(ask)
            writer = world.run_all(open_writer, request.directory)
        with writer:
            with clock.phase("plan"):
                held, places = save_plan.chosen(world, request)
                shares = agree_on_shares(world, held, on_differing_buffers)
                budget = options.budget_bytes
                ready = world.run_all(
                    save_plan.prepare, request, save_id, held, places, shares, world.rank, writer.policy, budget
                )
                how = ready.digest, repr((request.names, verify)), budget
                world.require_equal(
                    how, "what is to be saved, or how (names, shapes, dtypes, sizes of files, verify, budget)"
                )
            return _write_and_commit(world, writer, ready, options, clock, verify=verify)


def _write_and_commit(
    world: World,
    writer: StorageWriter,
    ready: save_plan.PreparedSave,
    options: save_plan.SaveOptions,
    clock: Clock,
    *,
    verify: bool,
) -> SaveReport:
    """Create, write, sync, compare and commit: the same steps for every model and every world size."""
    plan = ready.plan
    begun: list[tuple[CommitState, dict[str, bytes]]] = []  # on the first rank

    def begin() -> None:
        small_files = _small_files(ready.request, plan)
        begun.append((begin_save(writer, plan), small_files))
        for file in () if has_owners else plan.files:
            writer.create(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header)])

    try:
        with clock.phase("create"):
            has_owners = _has_owners(world, writer)
            world.broadcast(begin)
            world.run_all(require_lock, writer, plan.save_id)
        shows_progress = options.progress and world.rank == 0
        with progress_bar("Saving weights", plan.nbytes // world.size, enabled=shows_progress) as bar:
            emitter = Emitter(writer, plan.entries, [item.local for item in ready.held], ready.staging, bar, world)
            with clock.phase("write"):
                if has_owners:
                    _write_by_owners(world, emitter, ready, options, bar)
                else:
                    world.run_all(emitter.write, ready.requests)
            with clock.phase("sync"):
                if not has_owners:
                    created = [file.name for file in plan.files] if world.rank == 0 else []
                    world.run_all(emitter.finish, ready.requests, created)
        with clock.phase("verify"):
            if verify:
                _require_same(world, emitter, ready)
            sums = _add_up(world, plan, emitter)
        with clock.phase("commit"):
            removed = world.broadcast(lambda: commit_save(writer, plan, *begun[0], sums))
    except BaseException:  # Ctrl-C, too: the next save of this process must find no mark of this one
        for first, _ in begun:
            undo_save(writer, plan, first)
        raise
    return _report(world, emitter, ready, removed, clock, verify=verify)


def _report(
    world: World,
    emitter: Emitter,
    ready: save_plan.PreparedSave,
    removed: Sequence[str],
    clock: Clock,
    *,
    verify: bool,
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
        tied=save_plan.tied_names(ready),
        differing_buffers=ready.shares.differing,
        removed=tuple(removed),
        is_verified=verify,
        seconds=dict(clock.seconds),
    )


def _has_owners(world: World, writer: StorageWriter) -> bool:
    """Return whether a file must be written by a single rank. The same on every rank. Collective: yes.

    So it is where a storage takes files as streams, and on a network file system for ranks on several machines,
    which would undo each other's bytes in the blocks that they share.
    """

    def decide(hosts: Sequence[tuple[bool, int, str]]) -> bool:
        takes_ranges = all(has_random_writes for has_random_writes, _, _ in hosts)
        is_shared = any(block_bytes > 1 for _, block_bytes, _ in hosts) and len({host for _, _, host in hosts}) > 1
        return not takes_ranges or is_shared

    policy = writer.policy
    return world.map_reduce(lambda: (policy.has_random_writes, policy.block_bytes, machine.boot()), decide)


def _write_by_owners(
    world: World,
    emitter: Emitter,
    ready: save_plan.PreparedSave,
    options: save_plan.SaveOptions,
    progress: tqdm,
) -> None:
    """Collective: yes."""
    written = write_by_owners(
        world,
        emitter.writer,
        ready.plan.files,
        {key: output.expression for key, output in ready.outputs.items()},
        ShardSender({name: item for item in ready.held for name in item.names}, ready.shares.by_name, world.rank),
        budget_bytes=options.budget_bytes,
        device=home_of(ready.held, None),
        progress=progress,
    )
    emitter.written_bytes.update(written.bytes_by_file)
    emitter.sums.update(written.fingerprints)


def _small_files(request: save_plan.SaveRequest, plan: SavePlan) -> dict[str, bytes]:
    """Return the small files that transformers or PEFT writes with the weights.

    Config, generation config, and the model's own code, or an adapter's config, and the tokenizer's files.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        if isinstance(request.names, save_plan.PeftNames):
            peft_compat.save_config(request.model, request.names.adapter, folder)
        else:
            revert.save_small_files(request.model, _main_dtype(request, plan), Path(folder))
        tokenizer = request.tokenizer
        if tokenizer is not None:
            if not hasattr(tokenizer, "save_pretrained"):
                raise ConfigError(f"tokenizer={tokenizer!r} has no save_pretrained. Pass a tokenizer or processor")
            tokenizer.save_pretrained(folder)
        found = sorted(Path(folder).iterdir())
        folders = [path.name for path in found if path.is_dir()]
        if folders:
            raise ConfigError(
                f"{type(tokenizer).__name__} writes a folder, {folders[0]}, and a save writes files only. Leave "
                "tokenizer=... out, and call its save_pretrained afterwards"
            )
        return {path.name: path.read_bytes() for path in found}


def _main_dtype(request: save_plan.SaveRequest, plan: SavePlan) -> torch.dtype | None:
    """Return the dtype of most saved floating-point numbers. For 4-bit weights, the dtype before quantization."""
    if packed := next((module for module in request.model.modules() if is_in_four_bits(module)), None):
        dtype: torch.dtype = packed.packing.dtype
        return dtype
    numels: Counter[DType] = Counter()
    for entry in plan.entries.values():
        if entry.dtype.kind == "float" and entry.dtype.bits >= 16:
            numels[entry.dtype] += entry.numel
    return to_torch(numels.most_common(1)[0][0]) if numels else None


def _require_same(world: World, emitter: Emitter, ready: save_plan.PreparedSave) -> None:
    """Collective: yes."""

    def compare() -> tuple[list[str], list[str]]:
        with open_storage(ready.request.directory).reader as reader:
            headers = ready.plan.files if world.rank == 0 else ()
            files = [file.name for file in headers if reader.read(file.name, 0, len(file.header)) != file.header]
            return files, emitter.require_same(reader, ready.requests)

    for rank, (files, keys) in enumerate(world.all_gather(compare)):
        if files or keys:
            what = f"{len(keys)} tensors, such as {keys[0]}," if keys else f"the header of {files[0]}"
            raise StorageError(
                f"{what} that rank {rank} wrote to {emitter.writer.root} read otherwise than they are in memory. "
                "The disk or its driver loses data: the older save has been kept"
            )


def _add_up(world: World, plan: SavePlan, emitter: Emitter) -> dict[str, int]:
    """The fingerprint of every tensor, of the parts that ranks wrote. Collective: yes.

    Raises:
        StorageError: not every byte was written, or some twice.
    """
    keys, files = list(plan.entries), [file.name for file in plan.files]
    own = [emitter.sums.get(key, 0) for key in keys] + [emitter.written_bytes.get(name, 0) for name in files]
    unsigned = np.array([value % (1 << 64) for value in own], dtype=np.uint64)
    total = world.all_reduce_object(unsigned, partial(np.sum, axis=0, dtype=np.uint64)).tolist()
    for file, written in zip(plan.files, total[len(keys) :], strict=True):
        wanted = file.nbytes - len(file.header)
        if written != wanted:
            raise StorageError(
                f"{file.name}: the ranks wrote {written:,} of {wanted:,} bytes between them. They hold different "
                "models, or the mesh leaves out a rank"
            )
    return dict(zip(keys, total, strict=False))


_UPLOAD = "Save to a folder, and upload it with huggingface_hub.upload_folder"


@answer_keywords(
    {
        "safe_serialization": "Leave it out: files are always safetensors",
        "push_to_hub": _UPLOAD,
        "repo_id": _UPLOAD,
        "is_main_process": "Leave it out: every rank calls save and writes its own bytes",
        "state_dict": "Pass the model, whose tensors are saved",
    }
)
def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "50GB",
    names: save_plan.WrittenNames = "hub",
    verify: bool = False,
    on_differing_buffers: OnDiffering = "first_rank",
    options: save_plan.SaveOptions = save_plan.SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save a model as safetensors files that ``from_pretrained`` of transformers loads, with its config.

    Every rank works out the same headers, and writes its own shards to their places in the files: nothing is
    gathered. The older save in the directory stays valid and complete until the new one is committed in one step.
    Then its files are removed. See docs/save.md.

    Collective: yes, over ``options.process_group``. Memory: ``options.budget_bytes``, only for tensors that are
    cast, strided, or on an accelerator.

    Args:
        model: any module, sharded or not, of transformers or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        tokenizer: a tokenizer or processor whose files are saved with the weights.
        dtype: floating-point tensors of 16 bits and more are cast to it. None saves them unchanged.
        max_shard_size: of one file's tensors, in bytes or as "5GB". A larger tensor has a file of its own.
        names: as on the hub, or the model's own.
        verify: ``True`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``"first_rank"``, or an error, ``"error"``.
        options: memory budget, progress, process group, timeouts.

    Raises:
        ConfigError: an argument cannot be honored.
        KeyMismatchError: tensors that would have to be computed from whole ones.
        RankMismatchError: ranks hold different models, pass different arguments, or hold different values of
            replicated parameters.
        FormatError: something that no safetensors file can hold.
        ShardingError: the model has tensors on meta, or the ranks do not hold all of one.
        StorageError: the directory cannot be written to, another save is writing to it, or bytes were lost.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. Until the save is committed, an error leaves the older save as it was.
    """
    model = without_compile(model)

    def ask() -> save_plan.SaveRequest:
        given = {"model": model, "names": names, "verify": verify, "options": options}
        require_meant(hints_of(save), given)
        wanted = save_plan.resolved_dtype(dtype)
        return save_plan.SaveRequest(model, directory, names, wanted, in_bytes_of(max_shard_size), tokenizer)

    return execute_save(ask, on_differing_buffers, options, "save", verify=verify)


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter: str = "default",
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    verify: bool = False,
    on_differing_buffers: OnDiffering = "first_rank",
    options: save_plan.SaveOptions = save_plan.SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save one adapter of a PEFT model as ``PeftModel.from_pretrained`` loads it: its tensors and its config.

    It is written like :func:`save`: every rank its own bytes, verified on request, committed in one step. The base
    is not saved. PEFT decides which tensors belong to an adapter.

    Collective: yes, over ``options.process_group``. Memory: ``options.budget_bytes``, only for tensors that are
    cast, strided, or on an accelerator.

    Args:
        model: PEFT's model, sharded or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        adapter: its name in the model, which is not saved.
        tokenizer: saved with it, if given.
        dtype: floating-point tensors are cast to it. None saves them unchanged.
        verify: ``True`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``"first_rank"``, or an error, ``"error"``.
        options: memory budget, progress, process group, timeouts.

    Raises:
        ConfigError: the model has no such adapter, or the directory cannot hold one.
        RankMismatchError, FormatError, ShardingError, StorageError, RankLostError: as for :func:`save`.

    Every error is the same on every rank. Until the save is committed, an error leaves the older adapter as it was.
    """
    model = without_compile(model)

    def ask() -> save_plan.SaveRequest:
        return save_plan.SaveRequest(
            model, directory, save_plan.PeftNames(adapter), save_plan.resolved_dtype(dtype), tokenizer=tokenizer
        )

    return execute_save(ask, on_differing_buffers, options, "save_adapter", verify=verify)
