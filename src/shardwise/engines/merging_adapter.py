"""An adapter and its base, opened and joined, and what the outcome is made of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shardwise.conversion import Expression, Stored, key_of
from shardwise.engines import offline
from shardwise.engines.adapters import beside_of
from shardwise.engines.outline import Outline
from shardwise.errors import CoverageError, FormatError
from shardwise.execution.reading.edited import edited
from shardwise.execution.reading.place import Placer
from shardwise.execution.reading.twins import are_equal
from shardwise.formats.checkpoint_index import CheckpointIndex
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, parse_adapter_config
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.module_weights import modules_of_columns, parameters_by_module
from shardwise.models.revert import Output
from shardwise.models.rules import assign_keys
from shardwise.planning.loads.stored import stored_tensors
from shardwise.planning.saves.merge_plan import Edit, LowRank, MergePlan, MergeTargets, tensors_trained_whole
from shardwise.storage.contract import StorageReader
from shardwise.storage.names import shown, why_unsafe
from shardwise.tensors import DType, row_blocks

ADAPTER = beside_of("merged")
"""What the names of the adapter's files and keys begin with, beside those of the base."""


_LOOKED_AT_NUMEL = 1 << 24
"""Elements of a factor that are looked at at a time."""


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
    config = parse_adapter_config(offline.small_file(path), what=str(path))
    names = [name for name in ADAPTER_WEIGHTS if (folder / name).is_file()]
    if not names:
        raise FormatError(f"{folder}: there is neither {' nor '.join(ADAPTER_WEIGHTS)}; save the adapter again")
    with ExitStack() as stack:
        reader, index = offline.open_local(folder, names[0])
        stack.enter_context(reader)
        placer = stack.enter_context(offline.placer_of(reader, index))
        tensors = {item.key: Stored(item.key, item.shape, item.dtype) for item in index.tensors()}
        if not tensors:
            raise FormatError(f"{folder / names[0]}: holds no tensors; save the adapter again")
        return _OpenedAdapter(config, index, reader, placer, tensors, stack.pop_all())


def pulled_apart(built: Outline, lora: _OpenedAdapter, adapter_name: str) -> set[str]:
    """Names declared tied that are so no more: the adapter brings values for one that the other does not get."""
    if lora.config.ensure_weight_tying:
        return set()
    whole = tensors_trained_whole(lora.config, lora.tensors, adapter_name=adapter_name)
    expressions = stored_tensors(lora.index)
    apart: set[str] = set()
    for target, origin in compat.declared_ties(built.model).items():
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
    prefix = compat.base_model_prefix(source.built.model)

    @cache
    def renamed(name: str) -> str | None:
        return next(iter(assign_keys([name], names, source.built.transforms, prefix).plain), None)

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
