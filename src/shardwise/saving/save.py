"""Saves a model or an adapter: plan, agree, write, compare, commit."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import PreTrainedModel

from shardwise.core import machine
from shardwise.core.errors import ConfigError, StorageError
from shardwise.core.save_reports import SaveReport
from shardwise.core.tensors import parse_size
from shardwise.files.folders import temporary_folder
from shardwise.files.local_reader import open_storage
from shardwise.files.local_writer import open_writer
from shardwise.files.storage import StorageWriter
from shardwise.fsdp.named_tensors import collect_tensors, unwrap
from shardwise.fsdp.torch_private import to_torch
from shardwise.models import revert
from shardwise.models.four_bit.layers import is_in_four_bits
from shardwise.models.lora import peft_private
from shardwise.models.selection import AdapterOnly
from shardwise.ranks.call_arguments import check_options, comparing_arguments, get_hints, get_world
from shardwise.ranks.world import Clock, World
from shardwise.saving import prepare
from shardwise.saving.commit import TEMPLATES_FOLDER, CommitState, begin_save, commit_save, undo_save
from shardwise.saving.plan import SavePlan
from shardwise.saving.saving_lock import new_save_id, require_lock
from shardwise.saving.write import ShardWriter, write_by_owners
from shardwise.transfer.progress import progress_bar
from shardwise.transfer.replicas import agree_on_shares

_log = logging.getLogger(__name__)


def execute_save(
    world: World, request: prepare.SaveRequest, options: prepare.SaveOptions, clock: Clock, *, verify: bool
) -> SaveReport:
    """Agree on the content of a save, write, compare and commit it. Collective: yes."""
    with clock.phase("plan"):
        with world.broadcast("choose a save id") as exchange:
            if world.rank == 0:
                exchange.local = new_save_id()
        save_id: str = exchange.result
        with world.collective("open the storage"):
            writer = open_writer(request.directory)
    with writer:
        with clock.phase("plan"):
            tensors, fqns = prepare.collect_selected(world, request.model, request.names, request.dtype)
            if request.training is not None:
                tensors += collect_tensors(request.training.module)
            shares = agree_on_shares(world, tensors)
            budget = options.budget_bytes
            with world.collective("plan the files"):
                prepared = prepare.prepare(
                    request, save_id, tensors, fqns, shares, world.rank, writer.policy, budget
                )
            # Before anything is created: ranks with other headers would write to other places of the same
            # files.
            with comparing_arguments(world) as exchange:
                exchange.local = {
                    "dtype": str(request.dtype),
                    "max_shard_size": str(request.max_shard_bytes),
                    "names": repr(request.names),
                    "verify": str(verify),
                    "options.budget_bytes": str(budget),
                    "the tensors": prepared.digest[:16],
                }
        return _write_and_commit(world, writer, prepared, options, clock, verify=verify)


def _write_and_commit(
    world: World,
    writer: StorageWriter,
    prepared: prepare.PreparedSave,
    options: prepare.SaveOptions,
    clock: Clock,
    *,
    verify: bool,
) -> SaveReport:
    """Create, write, sync, compare and commit: the same steps for every model and every world size."""
    plan = prepared.plan
    state: CommitState | None = None  # on the first rank, while it has the lock
    try:
        with clock.phase("create"):
            has_owners = _has_owners(world, writer)
            # The first rank locks, cleans up and creates the files before any rank writes.
            with world.broadcast("begin the save"):
                if world.rank == 0:
                    # Before the lock: a model whose config cannot be written fails without any trace in the folder.
                    small_files, templates = _config_files(prepared.request, plan)
                    state = begin_save(writer, plan, small_files, templates)
                    # If files have owners, each owner creates its own. Otherwise all ranks write into these.
                    for file in () if has_owners else plan.files:
                        writer.create(file.name, file.nbytes)
                        writer.write(file.name, 0, [memoryview(file.header)])
            # A rank that does not see the lock does not see the folder of the first rank.
            with world.collective("check the lock"):
                require_lock(writer, plan.save_id)
        shows_progress = options.progress and world.rank == 0
        with progress_bar("Saving weights", plan.nbytes // world.size, enabled=shows_progress) as bar:
            shard_writer = ShardWriter(
                writer, plan.entries, [item.local for item in prepared.tensors], prepared.staging, bar, world
            )
            with clock.phase("write"):
                if has_owners:
                    shard_writer.written = write_by_owners(
                        world, writer, prepared, budget_bytes=options.budget_bytes, progress=bar
                    )
                else:
                    with world.collective("write files"):
                        shard_writer.write(prepared.requests)
            with clock.phase("sync"):
                if not has_owners:
                    # The first rank syncs all files that it created, also those it wrote nothing to: their sizes.
                    created = [file.name for file in plan.files] if world.rank == 0 else []
                    with world.collective("flush files to disk"):
                        shard_writer.finish(prepared.requests, created)
        # All files are durable on all ranks here. The older save is still valid.
        with clock.phase("verify"):
            if verify:
                _require_read_back(world, shard_writer, prepared)
            sums = _total_fingerprints(world, plan, shard_writer)
        with clock.phase("commit"):
            with world.broadcast("commit the save") as exchange:
                if state is not None:
                    exchange.local = commit_save(state, sums)
            removed = exchange.result
    except BaseException:  # Ctrl-C, too: the next save of this process must not find the lock of this one
        if state is not None:
            undo_save(state)
        raise
    return SaveReport(
        rank=world.rank,
        world_size=world.size,
        directory=writer.root,
        files=plan.names,
        tensors=len(plan.entries),
        parameters=prepared.parameters,
        checkpoint_bytes=plan.nbytes,
        written_bytes=shard_writer.written.nbytes,
        dtypes=dict(Counter(entry.dtype.label for entry in plan.entries.values())),
        cast=prepared.cast,
        tied=prepare.find_tied_names(prepared),
        differing_buffers=prepared.shares.differing,
        removed=tuple(removed),
        is_verified=verify,
        seconds=dict(clock.seconds),
    )


def _has_owners(world: World, writer: StorageWriter) -> bool:
    """Return whether a file must be written by a single rank. The same on every rank. Collective: yes.

    This is so on a network file system, for ranks on several machines, which would undo each other's bytes in the
    blocks that they share.
    """
    # Ranks of one machine share its page cache, so only several machines are in each other's way.
    facts = world.all_gather_object((writer.policy.block_bytes > 1, machine.boot_id()))
    has_blocks, hosts = zip(*facts, strict=True)
    return any(has_blocks) and len(set(hosts)) > 1


def _config_files(request: prepare.SaveRequest, plan: SavePlan) -> tuple[dict[str, bytes], dict[str, bytes] | None]:
    """Return the small files of a save (configs, code, tokenizer), and a tokenizer's additional chat templates."""
    with temporary_folder() as folder:
        if isinstance(request.names, AdapterOnly):
            peft_private.save_config(request.model, request.names.adapter, str(folder))
            adapters: Any = request.model.peft_config
            # Configs of other adapters than LoRA do not have the field.
            if parameters := getattr(adapters[request.names.adapter], "target_parameters", None):
                _warn_of_engines(tuple(sorted(parameters)))
        else:
            revert.save_configs(request.model, _choose_config_dtype(request, plan), folder)
        tokenizer = request.tokenizer
        if tokenizer is not None:
            if not hasattr(tokenizer, "save_pretrained"):
                raise ConfigError(f"tokenizer={tokenizer!r} has no save_pretrained. Pass a tokenizer or processor")
            tokenizer.save_pretrained(str(folder))
        # Written to a folder first, because these libraries write files only. The save commits their content.
        paths = sorted(folder.iterdir())
        folders = [path.name for path in paths if path.is_dir() and path.name != TEMPLATES_FOLDER]
        if folders:
            raise ConfigError(
                f"the tokenizer or the model's code writes a folder, {folders[0]}, and a save writes files only. "
                "Leave tokenizer=... out, and call its save_pretrained afterwards"
            )
        files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        templates = {path.name: path.read_bytes() for path in (folder / TEMPLATES_FOLDER).glob("*.jinja")}
        return files, None if tokenizer is None else templates


@cache  # once for an adapter that is saved many times
def _warn_of_engines(parameters: tuple[str, ...]) -> None:
    """Warn that engines may ignore the part of an adapter that is on parameters, such as stacked experts."""
    _log.warning(
        "target_parameters (%s): vLLM and SGLang apply a LoRA of stacked experts for some architectures, and "
        "ignore it for others without an error. For an engine, merge it: shardwise merge-adapter",
        ", ".join(parameters),
    )


def _choose_config_dtype(request: prepare.SaveRequest, plan: SavePlan) -> torch.dtype | None:
    """Return the dtype of most saved floating-point numbers. For 4-bit weights, the dtype before quantization."""
    if packed := next((module for module in request.model.modules() if is_in_four_bits(module)), None):
        dtype: torch.dtype = packed.packing.dtype
        return dtype
    main = prepare.find_main_dtype((entry.key, entry.dtype, entry.shape) for entry in plan.entries.values())
    return None if main is None else to_torch(main)


def _require_read_back(world: World, shard_writer: ShardWriter, prepared: prepare.PreparedSave) -> None:
    """Require that what every rank wrote is read back as it is in memory. Collective: yes."""
    with world.all_gather("read back") as exchange, open_storage(prepared.request.directory).reader as reader:
        # The first rank has written the headers, and every rank its own tensors.
        headers = prepared.plan.files if world.rank == 0 else ()
        files = [file.name for file in headers if reader.read(file.name, 0, len(file.header)) != file.header]
        exchange.local = files, shard_writer.require_same(reader, prepared.requests)
    for rank, (files, keys) in enumerate(exchange.result):
        if files or keys:
            what = f"{len(keys)} tensors, such as {keys[0]}," if keys else f"the header of {files[0]}"
            raise StorageError(
                f"{shard_writer.writer.root}: {what} that rank {world.global_ranks[rank]} wrote differ from memory "
                "when they are read back. The older save is kept. Check the disk and its driver"
            )


def _total_fingerprints(world: World, plan: SavePlan, shard_writer: ShardWriter) -> dict[str, int]:
    """Return the fingerprint of every tensor, added up of the boxes that ranks wrote. Collective: yes.

    Raises:
        StorageError: not every byte was written, or some twice.
    """
    # One array of all sums and sizes: one meeting of the ranks, however many tensors there are.
    keys, files = list(plan.entries), [file.name for file in plan.files]
    local = [shard_writer.written.fingerprints.get(key, 0) for key in keys]
    local += [shard_writer.written.bytes_by_file[name] for name in files]
    # (tensors + files,): fingerprints are sums modulo MODULUS of transfer/fingerprints.py, where uint64 wraps, too.
    unsigned = np.array([value % (1 << 64) for value in local], dtype=np.uint64)
    total = world.all_reduce_object(unsigned, partial(np.sum, axis=0, dtype=np.uint64)).tolist()
    for file, written in zip(plan.files, total[len(keys) :], strict=True):
        expected = file.nbytes - len(file.header)
        if written != expected:
            raise StorageError(
                f"{file.name}: the ranks wrote {written:,} of {expected:,} bytes: they hold different models, or a "
                "rank is missing in the mesh. Save from the ranks that hold the model"
            )
    return dict(zip(keys, total, strict=False))


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "50GB",
    names: prepare.WrittenNames = "hub",
    verify: bool = False,
    options: prepare.SaveOptions = prepare.SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save a model as safetensors files that ``from_pretrained`` of transformers loads, with its config.

    Every rank works out the same headers, and writes its own shards to their places in the files: nothing is
    gathered. The older save in the directory stays valid and complete until the new one is committed in one step.
    Then its files are removed. See docs/save.md.

    Collective: yes, over ``options.process_group``. Memory: ``options.budget_bytes``, only for tensors that are
    cast, strided, or on an accelerator.

    Args:
        model: any module, sharded or not, of transformers or not, loaded by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        tokenizer: a tokenizer or processor whose files are saved with the weights.
        dtype: floating-point tensors of 16 bits and more are cast to it. None saves them unchanged.
        max_shard_size: of one file's tensors, in bytes or as "5GB". A larger tensor has a file of its own.
        names: as on the hub, or the model's own.
        verify: ``True`` reads tensors and headers back before the save is committed.
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
    model, clock = unwrap(model), Clock()
    if names == "hub" and isinstance(model, AveragedModel):
        average = unwrap(model.module)
        # Its prefix and its count of averages are in no file of transformers.
        model = average if isinstance(average, PreTrainedModel) else model
    with get_world(options, "save") as world:
        arguments: dict[str, Any] = {"model": model, "names": names, "verify": verify, "options": options}
        with world.collective("plan the save"):
            request = _make_request(arguments, directory, names, dtype, max_shard_size, tokenizer)
        return execute_save(world, request, options, clock, verify=verify)


def _make_request(
    arguments: Mapping[str, Any],
    directory: str | os.PathLike[str],
    names: prepare.WrittenNames | AdapterOnly,
    dtype: torch.dtype | str | None,
    max_shard_size: int | str,
    tokenizer: Any,
) -> prepare.SaveRequest:
    """Check the arguments of a save on this rank. Return its request."""
    check_options(get_hints(save), arguments)
    max_shard_bytes = parse_size(max_shard_size)
    saved_dtype = prepare.resolve_dtype(dtype)
    return prepare.SaveRequest(arguments["model"], directory, names, saved_dtype, max_shard_bytes, tokenizer)


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter: str = "default",
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    verify: bool = False,
    options: prepare.SaveOptions = prepare.SaveOptions(),  # noqa: B008
) -> SaveReport:
    """Save one adapter of a PEFT model as ``PeftModel.from_pretrained`` loads it: its tensors and its config.

    It is written like :func:`save`: every rank its own bytes, verified on request, committed in one step. The base
    is not saved. PEFT decides which tensors belong to an adapter.

    Collective: yes, over ``options.process_group``. Memory: ``options.budget_bytes``, only for tensors that are
    cast, strided, or on an accelerator.

    Args:
        model: PEFT's model, sharded or not, loaded by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        adapter: its name in the model, which is not saved.
        tokenizer: saved with it, if given.
        dtype: floating-point tensors are cast to it. None saves them unchanged.
        verify: ``True`` reads tensors and headers back before the save is committed.
        options: memory budget, progress, process group, timeouts.

    Raises:
        ConfigError: the model has no such adapter, or the directory cannot hold one.
        RankMismatchError, FormatError, ShardingError, StorageError, RankLostError: as for :func:`save`.

    Every error is the same on every rank. Until the save is committed, an error leaves the older adapter as it was.
    """
    model, clock = unwrap(model), Clock()
    with get_world(options, "save_adapter") as world:
        arguments = {"model": model, "verify": verify, "options": options}
        names = AdapterOnly(adapter)
        with world.collective("plan the save"):
            request = _make_request(arguments, directory, names, dtype, sys.maxsize, tokenizer)
        return execute_save(world, request, options, clock, verify=verify)
