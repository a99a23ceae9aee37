"""Saves a model or an adapter: plan, agree, write, compare, commit."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from shardwise.conversion import computes
from shardwise.engines.arguments import hints_of, require_meant, world_of
from shardwise.errors import ConfigError, CoverageError, StorageError
from shardwise.execution.agreed import StateOptions
from shardwise.execution.committing import Begun, begin_save, commit_save, undo_save
from shardwise.execution.given_parts import Giver, Shares, agree_on_shares
from shardwise.execution.memory import collected_later, home_of
from shardwise.execution.progress import Clock, ProgressBar
from shardwise.execution.saving_lock import new_token, require_lock
from shardwise.execution.world import World
from shardwise.execution.write import Emitter, write_by_owners
from shardwise.layout import ModelLayout, Origin, TensorKind, place_of
from shardwise.models import four_bit_files, pretrained
from shardwise.models.four_bit_linear import is_in_four_bits
from shardwise.models.revert import Output, names_in_file, revert
from shardwise.models.selection import AdapterOnly, has_adapters, names_outside
from shardwise.models.torch_words import from_torch, saved_dtype, to_torch
from shardwise.models.view import Held, layout_of, look_inside, without_compile
from shardwise.planning.load_plan import OnDiffering
from shardwise.planning.save_plan import ADAPTER, MODEL, SavedTraining, SavePlan, arrange_writes, plan_save
from shardwise.planning.schedule import ReadRequest, Staging, staging_within
from shardwise.report.save_reports import SaveReport
from shardwise.storage import machine
from shardwise.storage.contract import StorageWriter, WritePolicy
from shardwise.storage.reading.opening import open_storage
from shardwise.storage.writing.opening import open_writer
from shardwise.tensors import DType
from shardwise.tensors.boxes import in_bytes_of
from shardwise.tuning import peft_compat

WrittenNames: TypeAlias = Literal["hub", "internal"]
"""Names of saved tensors: those of the model's checkpoints on the hub (and their shapes), or the modules' own."""


@dataclass(frozen=True, slots=True)
class PeftNames:
    """One adapter of a PEFT model is saved, and nothing else, under the names that PEFT's files have."""

    adapter: str = "default"


@dataclass(frozen=True, slots=True)
class SaveOptions(StateOptions):
    """How a save is carried out; none of it changes what is saved.

    Attributes:
        budget_bytes: host memory that one rank may use for staging (casts, copies from an accelerator).
        progress: show a bar on the first rank (where there is a terminal, and transformers' bars are not off).
        process_group: the ranks that hold the model; None is the default group, or this process alone.
        patience: how long ranks wait for each other.
    """

    budget_bytes: int = 256 << 20
    progress: bool = True


MAX_SHARD_SIZE = "50GB"
"""As in ``save_pretrained`` of transformers 5."""


@dataclass(frozen=True, slots=True)
class TrainingBeside:
    """The state of an adapter's training: tensors as parameters of a module, by their names; the rest as JSON."""

    module: nn.Module
    text: str


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What is to be saved, and under which names; ``training`` goes beside an adapter."""

    model: nn.Module
    directory: str | os.PathLike[str]
    names: WrittenNames | PeftNames = "hub"
    dtype: torch.dtype | None = None
    max_shard_bytes: int = sys.maxsize
    tokenizer: Any = None
    training: TrainingBeside | None = None

    @property
    def stem(self) -> str:
        """What the names of the files of weights begin with."""
        return ADAPTER if isinstance(self.names, PeftNames) else MODEL


@dataclass(frozen=True)
class PreparedSave:
    """All that is decided before anything is written. ``requests`` are this rank's own."""

    request: SaveRequest
    held: Sequence[Held]
    shares: Shares
    layout: ModelLayout
    outputs: Mapping[str, Output]
    parameters: int
    plan: SavePlan
    requests: Sequence[ReadRequest]
    staging: Staging
    cast: Mapping[str, tuple[str, str]]
    digest: str


def chosen(world: World, request: SaveRequest) -> tuple[list[Held], Mapping[str, str]]:
    """What is in the model; of an adapter what belongs to it, and the names in its file to those in the model.

    The state of its training comes last. One rank asks PEFT, which may look at the hub for the base's config.
    Collective: yes.
    """
    held = world.together(lambda: _looked_at(request))
    names = request.names
    if not isinstance(names, PeftNames):
        return held, {}
    places = world.from_first(lambda: names_outside(request.model, held, AdapterOnly(names.adapter)))
    chosen = set(places.values())
    beside = [] if request.training is None else look_inside(request.training.module)
    return [*(item for item in held if chosen.intersection(item.names)), *beside], places


def _looked_at(request: SaveRequest) -> list[Held]:
    held = look_inside(request.model)
    if isinstance(request.names, PeftNames):
        return held
    four_bit_files.refuse_without_scales(held)
    if request.names != "hub":
        return four_bit_files.held_as_stored(held)
    if request.dtype is not None and four_bit_files.has_four_bits(request.model):
        raise ConfigError(
            f"dtype={request.dtype}: weights in four bits, and their scales, are saved as they are; leave dtype out"
        )
    return four_bit_files.held_in_files(held)


@collected_later()
def prepare(
    request: SaveRequest,
    token: str,
    held: Sequence[Held],
    places: Mapping[str, str],
    shares: Shares,
    rank: int,
    policy: WritePolicy,
    budget_bytes: int,
) -> PreparedSave:
    """Decide, on this rank alone; ``places`` are an adapter's names, ``shares`` what each rank gives."""
    _require_possible(request, policy)
    layout = layout_of(held, lambda item: Origin.NOWHERE)
    outputs = four_bit_files.in_shapes_of_files(held, outputs_of(request, layout, places))
    _require_moved(outputs)
    saved = {key: (key, saved_dtype(output.dtype, request.dtype), output.shape) for key, output in outputs.items()}
    beside = {} if request.training is None else _as_they_are(layout, places)
    own = [item for item in layout.tensors if item.kind is TensorKind.PARAMETER and item.fqn not in beside]
    parameters = sum(item.numel for item in own)
    plan = plan_save(
        list(saved.values()),
        max_shard_bytes=request.max_shard_bytes,
        parameters=parameters,
        token=token,
        can_rename=policy.can_rename,
        stem=request.stem,
        training=_saved_training(request, beside),
    )
    is_on_host = all(item.local.device.type == "cpu" for item in held)
    staging = staging_within(budget_bytes, policy.concurrency, on_device=not is_on_host)
    cast = {
        key: (output.dtype.label, saved[key][1].label)
        for key, output in outputs.items()
        if output.dtype != saved[key][1]
    }
    outputs = {**outputs, **beside}
    places_of = {
        name: [(box, place_of(box, layout.by_name[name].boxes)) for box in boxes[rank]]
        for name, boxes in shares.by_name.items()
    }
    requests = arrange_writes(
        [(entry, outputs[key].expression) for key, entry in plan.entries.items()],
        places_of,
        {name: number for number, item in enumerate(held) for name in item.names},
        {name for item in held if _is_staged(item, request.dtype) for name in item.names},
        policy,
        staging.nbytes,
    )
    digest = hashlib.sha256(repr((list(saved.values()), plan.names, plan.files)).encode()).hexdigest()
    return PreparedSave(request, held, shares, layout, outputs, parameters, plan, requests, staging, cast, digest)


def _saved_training(request: SaveRequest, beside: Mapping[str, Output]) -> SavedTraining | None:
    if request.training is None:
        return None
    tensors = [(key, output.dtype, output.shape) for key, output in beside.items()]
    return SavedTraining(tensors, request.training.text)


def _require_possible(request: SaveRequest, policy: WritePolicy) -> None:
    if request.names == "hub" and has_adapters(request.model):
        raise ConfigError(
            f"{type(request.model).__name__} has adapters of PEFT's, and the hub has no names for both together; "
            "save the adapter by save_adapter, merge it first (merge_and_unload, shardwise "
            "merge-adapter), or pass names='internal' for all tensors as the model names them"
        )
    if isinstance(request.names, PeftNames) and not policy.can_rename:
        raise ConfigError(
            f"{os.fspath(request.directory)}: an adapter is one file, which takes its place in one step, and this "
            "storage renames nothing; save into a folder, and copy that"
        )


def _require_moved(outputs: Mapping[str, Output]) -> None:
    if keys := [key for key, output in outputs.items() if computes(output.expression)]:
        raise CoverageError(
            f"{len(keys)} tensors of the checkpoint, such as {keys[0]}, are computed from whole tensors, which "
            "a save does not do yet; pass names='internal'"
        )


def outputs_of(request: SaveRequest, layout: ModelLayout, places: Mapping[str, str]) -> Mapping[str, Output]:
    """The tensors of the files, and what they are made of."""
    if not isinstance(request.names, PeftNames):
        return revert(request.model, layout, internal_names=request.names == "internal")
    return {key: Output.of(key, layout.by_name[name]) for key, name in places.items()}


def _as_they_are(layout: ModelLayout, places: Mapping[str, str]) -> dict[str, Output]:
    """What is no tensor of an adapter: the state of its training, under its own names and in its own dtypes."""
    adapter = set(places.values())
    return {
        tensor.fqn: Output.of(tensor.fqn, tensor) for tensor in layout.tensors if adapter.isdisjoint(tensor.names)
    }


def _is_staged(item: Held, dtype: torch.dtype | None) -> bool:
    """Whether a tensor cannot be written as it lies in memory."""
    stored = from_torch(item.tensor.dtype, item.fqn) if item.kind.is_saved else None
    return item.local.device.type != "cpu" or (stored is not None and saved_dtype(stored, dtype) != stored)


def tied_names(ready: PreparedSave) -> dict[str, str]:
    """Names that are not saved, with the name under which their tensor is."""
    found: dict[str, str] = {}
    if isinstance(ready.request.names, PeftNames):
        return found
    for tensor in ready.layout.saved():
        kept = names_in_file(ready.request.model, tensor)
        if kept:
            found |= {name: kept[0] for name in tensor.names if name not in kept}
    return found


def resolved_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ConfigError(f"dtype={dtype!r} is not a floating dtype of 16 bits or more; pass torch.bfloat16, say")
    return found


def carry_out_save(
    ask: Callable[[], SaveRequest],
    on_differing_buffers: OnDiffering,
    options: SaveOptions,
    call: str,
    *,
    verify: bool,
) -> SaveReport:
    """Agree on what is saved, and save it. Collective: yes."""
    clock = Clock()
    with world_of(options, call) as world:
        with clock.phase("plan"):
            token = world.from_first(new_token)
            request = world.together(ask)
            writer = world.together(lambda: open_writer(request.directory))
        with writer:
            with clock.phase("plan"):
                held, places = chosen(world, request)
                shares = agree_on_shares(world, held, on_differing_buffers)
                budget = options.budget_bytes
                ready = world.together(
                    lambda: prepare(request, token, held, places, shares, world.rank, writer.policy, budget)
                )
                how = ready.digest, repr((request.names, verify)), budget
                world.require_equal(
                    how, "what is to be saved, or how (names, shapes, dtypes, sizes of files, verify, budget)"
                )
            return _write_and_commit(world, writer, ready, options, clock, verify=verify)


def _write_and_commit(
    world: World,
    writer: StorageWriter,
    ready: PreparedSave,
    options: SaveOptions,
    clock: Clock,
    *,
    verify: bool,
) -> SaveReport:
    """Create, write, sync, compare and commit: the same steps for every model and every world size."""
    plan = ready.plan
    begun: list[tuple[Begun, dict[str, bytes]]] = []  # on the first rank

    def begin() -> None:
        small_files = _small_files(ready.request, plan)
        begun.append((begin_save(writer, plan), small_files))
        for file in () if has_owners else plan.files:
            writer.create(file.name, file.nbytes)
            writer.write(file.name, 0, [memoryview(file.header)])

    try:
        with clock.phase("create"):
            has_owners = _has_owners(world, writer)
            world.from_first(begin)
            world.together(lambda: require_lock(writer, plan.token))
        with ProgressBar("Saving weights", world, plan.nbytes, enabled=options.progress) as bar:
            emitter = Emitter(writer, plan.entries, [item.local for item in ready.held], ready.staging, bar, world)
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
            if verify:
                _require_same(world, emitter, ready)
            sums = _add_up(world, plan, emitter)
        with clock.phase("commit"):
            removed = world.from_first(lambda: commit_save(writer, plan, *begun[0], sums))
    except BaseException:  # Ctrl-C, too: the next save of this process must find no mark of this one
        for first, _ in begun:
            undo_save(writer, plan, first)
        raise
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
        is_verified=verify,
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


def _small_files(request: SaveRequest, plan: SavePlan) -> dict[str, bytes]:
    """What transformers, or PEFT, writes beside the weights.

    Config, generation config, the model's own code, of an adapter its config; and the tokenizer's files.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        if isinstance(request.names, PeftNames):
            peft_compat.save_config(request.model, request.names.adapter, folder)
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
    if packed := next((module for module in request.model.modules() if is_in_four_bits(module)), None):
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


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "50GB",
    names: WrittenNames = "hub",
    verify: bool = False,
    on_differing_buffers: OnDiffering = "first_rank",
    options: SaveOptions = SaveOptions(),
) -> SaveReport:
    """Save a model as safetensors files that ``from_pretrained`` of transformers loads, with its config.

    Every rank works out the same headers, and writes its own shards to their places in the files: nothing is
    gathered. What is in the directory counts until the save is committed by one step, and is whole until then;
    afterwards its files are removed. See docs/save.md.

    Collective: yes, over ``options.process_group``.
    Memory: ``options.budget_bytes``, and that only for what is cast, strided, or on an accelerator.

    Args:
        model: any module, sharded or not, of transformers or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        tokenizer: a tokenizer or processor whose files are saved beside the weights.
        dtype: floating-point tensors of 16 bits and more are cast to it; None saves them as they are.
        max_shard_size: of one file's tensors, in bytes or as "5GB"; a larger tensor has a file of its own.
        names: as on the hub, or the model's own.
        verify: ``True`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``"first_rank"``, or an error, ``"error"``.
        options: memory budget, progress, process group, patience.

    Raises:
        ConfigError: an argument cannot be honoured.
        CoverageError: tensors that would have to be computed from whole ones.
        DisagreementError: ranks hold different models, or were called with different arguments; parameters that
            several ranks hold have different values there.
        FormatError: something that no safetensors file can hold.
        PlacementError: the model has tensors on meta, or the ranks do not hold all of one.
        StorageError: the directory cannot be written to, another save is writing to it, or bytes were lost.
        RankLostError: a rank has been lost.

    Every error is the same on every rank. Until the save is committed, an error leaves the older save as it was.
    """
    model = without_compile(model)

    def ask() -> SaveRequest:
        given = {"model": model, "names": names, "verify": verify, "options": options}
        require_meant(hints_of(save), given)
        wanted = resolved_dtype(dtype)
        return SaveRequest(model, directory, names, wanted, in_bytes_of(max_shard_size), tokenizer)

    return carry_out_save(ask, on_differing_buffers, options, "save", verify=verify)


def save_adapter(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    adapter: str = "default",
    tokenizer: Any = None,
    dtype: torch.dtype | str | None = None,
    verify: bool = False,
    on_differing_buffers: OnDiffering = "first_rank",
    options: SaveOptions = SaveOptions(),
) -> SaveReport:
    """Save one adapter of a PEFT model as ``PeftModel.from_pretrained`` loads it: its tensors and its config.

    Written as :func:`save` writes: every rank its own bytes, compared with memory where that is asked for,
    committed by one step. The base is not saved. What belongs to an adapter is PEFT's decision.

    Collective: yes, over ``options.process_group``.
    Memory: ``options.budget_bytes``, and that only for what is cast, strided, or on an accelerator.

    Args:
        model: PEFT's model, sharded or not, brought up by shardwise or not.
        directory: a folder that all ranks see, which need not be there yet.
        adapter: its name in the model; the folder does not have it.
        tokenizer: saved with it, if given.
        dtype: floating-point tensors are cast to it; None saves them as they are.
        verify: ``True`` reads tensors and headers back before the save counts.
        on_differing_buffers: buffers that have other values on some ranks than on others, as running statistics
            have, are the first rank's, ``"first_rank"``, or an error, ``"error"``.
        options: memory budget, progress, process group, patience.

    Raises:
        ConfigError: the model has no such adapter, or the directory cannot hold one.
        DisagreementError, FormatError, PlacementError, StorageError, RankLostError: as for :func:`save`.

    Every error is the same on every rank. Until the save is committed, an error leaves the older adapter as it was.
    """
    model = without_compile(model)

    def ask() -> SaveRequest:
        return SaveRequest(model, directory, PeftNames(adapter), resolved_dtype(dtype), tokenizer=tokenizer)

    return carry_out_save(ask, on_differing_buffers, options, "save_adapter", verify=verify)
