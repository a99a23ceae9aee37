"""Merges an adapter into its base: both opened and joined, and every outcome an expression over them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwise.conversion import Expression, Stored, key_of
from shardwise.engines import offline
from shardwise.engines.adapters import beside_of, weights_in
from shardwise.engines.companions import companions_of, config_content, small_file, templates_of, write_templates
from shardwise.engines.outline import ModelOptions, Outline, config_of
from shardwise.engines.saved_in_four_bits import FourBitSave, four_bits_of, in_four_bits
from shardwise.errors import CoverageError, FormatError
from shardwise.execution.reading.adapter_merge import edited
from shardwise.execution.reading.audit import are_equal
from shardwise.execution.reading.outgoing import Outgoing
from shardwise.execution.reading.place import Placer
from shardwise.execution.writing.sink import WrittenTensors
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.joining import beside
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, LoraConfig, parse_adapter_config
from shardwise.layout import TensorKind
from shardwise.models import pretrained
from shardwise.models.conversions.key_conversions import assign_keys
from shardwise.models.conversions.revert import Output
from shardwise.models.four_bits.quantization import FourBit
from shardwise.models.lora_weights import modules_of_columns, parameters_by_module
from shardwise.models.torch_words import to_torch
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.saves.merge_plan import (
    Edit,
    LowRank,
    MergePlan,
    MergeTargets,
    plan_merge,
    tensors_trained_whole,
)
from shardwise.report.save_report import MergeAdapterReport
from shardwise.storage.contract import StorageReader
from shardwise.storage.hub import resolve
from shardwise.storage.names import HubOptions, shown, why_unsafe
from shardwise.storage.reading.joined import Beside
from shardwise.storage.reading.opening import open_storage
from shardwise.tensors import DType, row_blocks

ADAPTER = beside_of("merged")
"""What the names of the adapter's files and keys begin with, beside those of the base."""


_LOOKED_AT_NUMEL = 1 << 24
"""Elements of a factor that are looked at at a time."""


@dataclass(frozen=True, slots=True)
class AdapterMergeCall:
    """What :func:`~shardwise.verbs.merge_adapter.merge_adapter` is asked for, once the folders are found."""

    base: Path
    adapter: Path
    out: Path
    adapter_name: str
    max_shard_bytes: int
    options: ModelOptions
    quantization: FourBit | None = None

    @classmethod
    def of(
        cls,
        base: str | os.PathLike[str],
        adapter: str | os.PathLike[str],
        out: str | os.PathLike[str],
        adapter_name: str,
        max_shard_bytes: int,
        options: ModelOptions,
        quantization: FourBit | str | None,
    ) -> AdapterMergeCall:
        """Find both folders.

        Raises:
            ConfigError: the outcome would take the place of one; or weights cannot be quantised so.
            FormatError, StorageError: there is no such folder.
        """
        packing = four_bits_of(quantization)
        in_cache = HubOptions(local_files_only=True)
        found = resolve(base, in_cache, download=False)
        lora = adapter_folder(resolve(adapter, in_cache, download=False), adapter_name)
        offline.require_other_folder(Path(out), [found, lora])
        return cls(found, lora, Path(out), adapter_name, max_shard_bytes, options, packing)

    @property
    def folder(self) -> Path:
        """That of the base's config."""
        return self.base if self.base.is_dir() else self.base.parent


@dataclass(frozen=True, slots=True)
class PlannedMerge:
    """An adapter and its base, joined: what is edited, and what comes out. Writing adds to ``changed``.

    ``packed`` says which layers come out in four bits.
    """

    source: offline.OfflineModel
    plan: MergePlan
    outgoing: Outgoing
    changed: set[str]
    packed: FourBitSave | None


def carry_out_adapter_merge(call: AdapterMergeCall) -> MergeAdapterReport:
    """Open both, plan the edits, and write the outcome. Collective: no.

    Memory, errors: as of :func:`~shardwise.verbs.merge_adapter.merge_adapter`.
    """
    start = time.perf_counter()
    with ExitStack() as stack:
        merge = _planned(call, stack)
        source, plan = merge.source, merge.plan
        companions = companions_of(call.folder, call.adapter)
        companions["config.json"] = _config_content(call, merge)
        streamed, names = _write(merge, companions, call)
        write_templates(call.out, templates_of([call.adapter, call.folder]))
    return MergeAdapterReport(
        base=str(call.base),
        adapter=str(call.adapter),
        out=str(call.out),
        model_class=type(source.built.model).__name__,
        dtype=str(source.config.dtype).removeprefix("torch."),
        modules=len(plan.modules),
        unchanged=tuple(name for name in plan.modules if name not in merge.changed),
        tensors=len(streamed.fingerprints),
        nbytes=streamed.nbytes,
        files=names,
        companions=tuple(sorted(companions)),
        notes=(
            *source.notes,
            *about_ties(source, plan),
            *offline.ties_undone(source),
            *(merge.packed.notes if merge.packed is not None else ()),
        ),
        seconds=time.perf_counter() - start,
    )


def _planned(call: AdapterMergeCall, stack: ExitStack) -> PlannedMerge:
    """Read headers and configs, and decide; what is opened is closed with ``stack``."""
    lora = stack.enter_context(open_for_merging(call.adapter))
    config = config_of(call.folder, call.options)
    opened = open_storage(call.base)
    reader = stack.enter_context(opened.reader)
    index = offline.index_of(opened, config)
    placer = stack.enter_context(offline.placer_of(reader, index))
    source = offline.read_source(
        call.folder, config, index, placer, call.options, lambda built: pulled_apart(built, lora, call.adapter_name)
    )
    pretrained.record_conversions(source.built.model, source.built.transforms)
    outputs = source.revert()
    plan = plan_merge(
        lora.config,
        lora.tensors,
        merge_targets(source, outputs),
        adapter_name=call.adapter_name,
        what=f"{call.adapter} and {call.base}",
    )
    require_effect(plan, lora, call.adapter)
    changed: set[str] = set()
    joined = beside(index, lora.index, ADAPTER)
    both = stack.enter_context(offline.placer_of(Beside(reader, lora.reader, ADAPTER), joined))
    tensors = merged_tensors(source, outputs, plan, stored_tensors(joined), changed)
    packed = None if call.quantization is None else in_four_bits(source, outputs, tensors, call.quantization)
    made = tensors if packed is None else packed.made
    return PlannedMerge(source, plan, Outgoing(made, both), changed, packed)


def _config_content(call: AdapterMergeCall, merge: PlannedMerge) -> bytes:
    dtype = call.options.get("dtype", "auto")
    told = None if dtype == "auto" else str(dtype).removeprefix("torch.")
    return config_content(
        call.folder,
        dtype=told,
        untied=bool(offline.ties_undone(merge.source)),
        quantization=None if merge.packed is None else merge.packed.config,
    )


def _write(
    merge: PlannedMerge, companions: Mapping[str, bytes], call: AdapterMergeCall
) -> tuple[WrittenTensors, tuple[str, ...]]:
    """Write the files, and let them count; also their names."""

    def check(_: WrittenTensors) -> None:
        if not merge.changed:
            raise without_effect(call.adapter, merge.plan)

    tensors = merge.source.layout.tensors
    with offline.writer_to(call.out) as writer:
        return offline.write_out(
            writer,
            merge.outgoing,
            sum(tensor.numel for tensor in tensors if tensor.kind is TensorKind.PARAMETER),
            max_shard_bytes=call.max_shard_bytes,
            companions=companions,
            check=check,
            label="Merging",
        )


@dataclass
class _OpenedAdapter:
    """An adapter that has been opened."""

    config: LoraConfig
    index: CheckpointIndex
    reader: StorageReader
    placer: Placer
    tensors: Mapping[str, Stored]
    close: ExitStack

    def __enter__(self) -> _OpenedAdapter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close.close()


def adapter_folder(given: Path, adapter_name: str) -> Path:
    """The folder itself, or that of the adapter of this name in it, where PEFT puts all but the default one."""
    if not given.is_dir():
        raise FormatError(f"{given}: is a file; pass the folder with {ADAPTER_CONFIG}")
    fault = why_unsafe(adapter_name)
    if fault is not None or "/" in adapter_name:
        raise FormatError(f"{shown(adapter_name)}: is no name of an adapter; pass the one it was saved under")
    for folder in (given / adapter_name, given):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    inside = sorted(place.parent.name for place in given.glob(f"*/{ADAPTER_CONFIG}"))
    remedy = f"choose one by adapter_name: {', '.join(map(shown, inside))}" if inside else "check the path"
    raise FormatError(f"{given}: there is no {ADAPTER_CONFIG}; {remedy}")


def open_for_merging(folder: Path) -> _OpenedAdapter:
    """Read an adapter's config and headers, without PEFT; whoever calls closes it.

    Raises:
        ConfigError: an adapter of this kind cannot be merged.
        FormatError, StorageError: a file is not there, contradicts its format, or cannot be read.
    """
    path = folder / ADAPTER_CONFIG
    config = parse_adapter_config(small_file(path), what=str(path))
    file = weights_in(folder)
    with ExitStack() as stack:
        reader, index = offline.open_local(folder, file)
        stack.enter_context(reader)
        placer = stack.enter_context(offline.placer_of(reader, index))
        tensors = {item.key: Stored(item.key, item.shape, item.dtype) for item in index.tensors()}
        if not tensors:
            raise FormatError(f"{folder / file}: holds no tensors; save the adapter again")
        return _OpenedAdapter(config, index, reader, placer, tensors, stack.pop_all())


def pulled_apart(built: Outline, lora: _OpenedAdapter, adapter_name: str) -> set[str]:
    """Names declared tied that are so no more: the adapter brings values for one that the other does not get."""
    if lora.config.ensure_weight_tying:
        return set()
    whole = tensors_trained_whole(lora.config, lora.tensors, adapter_name=adapter_name)
    expressions = stored_tensors(lora.index)
    apart: set[str] = set()
    for target, origin in pretrained.declared_ties(built.model).items():
        ours = [whole[name] for name in (target, origin) if name in whole]
        if not ours or target not in built.layout.by_name:
            continue
        one, other = ours[0], ours[-1]
        dtype = built.layout.by_name[target].dtype
        if len(ours) < 2 or not are_equal(expressions[one], expressions[other], dtype, lora.placer, rank=0, size=1):
            apart.add(target)
    return apart


def merge_targets(source: offline.OfflineModel, outputs: Mapping[str, Output]) -> MergeTargets:
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}

    @cache
    def renamed(name: str) -> str | None:
        return next(iter(assign_keys(source.built.model, [name], names, source.built.transforms).plain), None)

    return MergeTargets(
        tensors={name: tensor.shape for name, tensor in names.items() if tensor.fqn in source.expressions},
        keys={key: output.shape for key, output in outputs.items()},
        parameters=parameters_by_module(source.built.model),
        columns=modules_of_columns(source.built.model),
        renamed=renamed,
    )


def merged_tensors(
    source: offline.OfflineModel,
    outputs: Mapping[str, Output],
    plan: MergePlan,
    joined: Mapping[str, Expression],
    changed: set[str],
) -> dict[str, tuple[DType, Expression]]:
    """What the outcome is made of: tensors of the base and of the adapter, joined. Edits are under every name."""
    expressions = source.by_every_name()
    for tensor in source.layout.saved():
        edits = tuple(edit for name in tensor.names for edit in plan.tensors.get(name, ()))
        if edits and tensor.fqn in source.expressions:
            base = source.expressions[tensor.fqn]
            merged = edited(tensor.fqn, base, [_beside(edit, joined) for edit in edits], tensor.dtype, changed)
            expressions |= dict.fromkeys(tensor.names, merged)
    made = offline.made_of(source, outputs, expressions)
    for key, edits in plan.keys.items():
        dtype, base = made[key]
        made[key] = dtype, edited(key, base, [_beside(edit, joined) for edit in edits], dtype, changed)
    return made


def _beside(edit: Edit, joined: Mapping[str, Expression]) -> Edit:
    """An edit whose leaves are known by their keys beside those of the base."""

    def found(leaf: Expression) -> Expression:
        key = key_of(leaf)
        assert key is not None
        return joined[f"{ADAPTER}/{key}"]

    if isinstance(edit, LowRank):
        magnitude = None if edit.magnitude is None else found(edit.magnitude)
        return replace(edit, a=found(edit.a), b=found(edit.b), magnitude=magnitude)
    return replace(edit, leaf=found(edit.leaf))


def require_effect(plan: MergePlan, lora: _OpenedAdapter, folder: Path) -> None:
    """At least one edit may change something, before anything is written: not all factors are zero."""
    expressions = stored_tensors(lora.index)

    def is_zero(leaf: Expression) -> bool:
        key = key_of(leaf)
        assert key is not None
        expression = expressions[key]
        blocks = row_blocks(leaf.shape, _LOOKED_AT_NUMEL)
        return not any(bool(lora.placer.values(expression, box, to_torch(leaf.dtype)).any()) for box in blocks)

    def is_without(edit: Edit) -> bool:
        return isinstance(edit, LowRank) and edit.magnitude is None and (is_zero(edit.a) or is_zero(edit.b))

    if all(is_without(edit) for edits in (*plan.tensors.values(), *plan.keys.values()) for edit in edits):
        raise without_effect(folder, plan)


def without_effect(folder: Path, plan: MergePlan) -> CoverageError:
    first = shown(plan.modules[0])
    return CoverageError(
        f"{folder}: the outcome would equal the base: the deltas of all {len(plan.modules)} modules ({first}, ...) "
        "are zero, or too small for the dtype; take an adapter that has been trained, or a wider dtype"
    )


def about_ties(source: offline.OfflineModel, plan: MergePlan) -> list[str]:
    """What is merged into one of several names of a tensor shows under the others, too."""
    notes: list[str] = []
    for tensor in source.layout.saved():
        changed = [name for name in tensor.names if name in plan.tensors]
        if len(tensor.names) > 1 and changed:
            others = [name for name in tensor.names if name not in changed]
            if others:
                notes.append(f"{', '.join(changed)} is merged, and so {', '.join(others)}, tied to it, changes too")
            elif len(changed) > 1:
                notes.append(f"the deltas of {' and '.join(changed)}, which are tied, are added up")
    return notes
