"""``merge_adapter``: a LoRA folded into its base, in bounded memory."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Unpack

from shardwise.conversion import Expression, Stored, key_of
from shardwise.engines import offline
from shardwise.engines.outline import ModelOptions, Outline, config_of
from shardwise.engines.save_options import in_bytes_of
from shardwise.errors import CoverageError, FormatError
from shardwise.execution.edited import edited
from shardwise.execution.outgoing import Outgoing
from shardwise.execution.place import Placer
from shardwise.execution.sink import WrittenTensors
from shardwise.execution.twins import are_equal
from shardwise.formats import CheckpointIndex
from shardwise.formats.checkpoint_index import beside
from shardwise.formats.peft_adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig, parse_adapter_config
from shardwise.layout import TensorKind
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.module_weights import modules_of_columns, parameters_by_module
from shardwise.models.revert import Output
from shardwise.models.rules import assign_keys
from shardwise.planning import stored_tensors
from shardwise.planning.merge_plan import Edit, LowRank, MergePlan, MergeTargets, plan_merge, tensors_trained_whole
from shardwise.report.merge_report import MergeAdapterReport
from shardwise.storage import HubOptions, StorageReader, open_storage, resolve
from shardwise.storage.beside import Beside
from shardwise.storage.names import shown, why_unsafe
from shardwise.tensors import DType, row_blocks

DEFAULT_ADAPTER_NAME = "default"

_ADAPTER = "(adapter)"
"""What the names of the adapter's files and keys begin with, beside those of the base."""

_LOOKED_AT_NUMEL = 1 << 24
"""Elements of a factor that are looked at at a time."""

MAX_SHARD_SIZE = "50GB"
"""As in ``save_pretrained`` of transformers 5."""


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter_name: str = DEFAULT_ADAPTER_NAME,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **options: Unpack[ModelOptions],
) -> MergeAdapterReport:
    """Fold a LoRA adapter of PEFT into its base and write the outcome as the hub has it.

    Block by block: a box of the base is read, ``scaling * B @ A`` added in float32 to what of it the adapter
    changes, and the sum rounded once ([Note: One rounding]).

    Args:
        base: a folder, or a hub id in the cache.
        adapter: a folder of PEFT's with ``adapter_config.json``, or a hub id in the cache.
        out: a folder, made where it is not there. A model in it is replaced once all is written.
        adapter_name: of an adapter in a folder of its own inside ``adapter``, or in the names of its tensors.
        max_shard_size: as in ``"5GB"``: of one file's tensors.

    Keyword arguments: see :class:`~shardwise.engines.outline.ModelOptions`; the outcome has their ``dtype``.

    Collective: no.
    Memory: about half a GiB beyond what importing torch and transformers takes, however large the model is.

    Raises:
        ConfigError: an argument cannot be honoured, or an adapter of this kind cannot be merged.
        CoverageError: adapter and base do not fit, naming each tensor; or merging would change nothing.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written.

    Where it raises, a model that was in ``out`` before is there still.
    """
    start = time.perf_counter()
    in_cache = HubOptions(local_files_only=True)
    base_folder, target = resolve(base, in_cache, download=False), Path(out)
    lora_folder = _adapter_folder(resolve(adapter, in_cache, download=False), adapter_name)
    offline.require_other_folder(target, [base_folder, lora_folder])
    max_shard_bytes = in_bytes_of(max_shard_size)
    folder = base_folder if base_folder.is_dir() else base_folder.parent
    with ExitStack() as stack:
        lora = stack.enter_context(_open_adapter(lora_folder))
        config = config_of(folder, options)
        opened = open_storage(base_folder)
        reader = stack.enter_context(opened.reader)
        index = offline.index_of(opened, config)
        placer = stack.enter_context(offline.placer_of(reader, index))
        source = offline.read_source(
            folder, config, index, placer, options, lambda built: _pulled_apart(built, lora, adapter_name)
        )
        compat.record_conversions(source.built.model, source.built.transforms)
        outputs = source.revert()
        plan = plan_merge(
            lora.config,
            lora.tensors,
            _targets(source, outputs),
            adapter_name=adapter_name,
            what=f"{lora_folder} and {base_folder}",
        )
        _require_effect(plan, lora, lora_folder)
        changed: set[str] = set()
        joined = beside(index, lora.index, _ADAPTER)
        both = stack.enter_context(offline.placer_of(Beside(reader, lora.reader, _ADAPTER), joined))
        outgoing = Outgoing(_merged(source, outputs, plan, stored_tensors(joined), changed), both)
        dtype = options.get("dtype", "auto")
        written_dtype = None if dtype == "auto" else str(dtype).removeprefix("torch.")
        untied = bool(offline.ties_undone(source))
        companions = offline.companions_of(folder, lora_folder)
        companions["config.json"] = offline.config_content(folder, dtype=written_dtype, untied=untied)
        writer = stack.enter_context(offline.writer_to(target))

        def check(_: WrittenTensors) -> None:
            if not changed:
                raise _without_effect(lora_folder, plan)

        streamed, names = offline.write_out(
            writer,
            outgoing,
            sum(tensor.numel for tensor in source.layout.tensors if tensor.kind is TensorKind.PARAMETER),
            max_shard_bytes=max_shard_bytes,
            companions=companions,
            check=check,
            label="Merging",
        )
        offline.write_templates(target, offline.templates_of([lora_folder, folder]))
    return MergeAdapterReport(
        base=str(base_folder),
        adapter=str(lora_folder),
        out=str(target),
        model_class=type(source.built.model).__name__,
        dtype=str(config.dtype).removeprefix("torch."),
        modules=len(plan.modules),
        unchanged=tuple(name for name in plan.modules if name not in changed),
        tensors=len(streamed.fingerprints),
        nbytes=streamed.nbytes,
        files=names,
        companions=tuple(sorted(companions)),
        notes=(*source.notes, *_about_ties(source, plan), *offline.ties_undone(source)),
        seconds=time.perf_counter() - start,
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


def _adapter_folder(given: Path, adapter_name: str) -> Path:
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


def _open_adapter(folder: Path) -> _OpenedAdapter:
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


def _pulled_apart(built: Outline, lora: _OpenedAdapter, adapter_name: str) -> set[str]:
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


def _targets(source: offline.OfflineModel, outputs: Mapping[str, Output]) -> MergeTargets:
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


def _merged(
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
        return joined[f"{_ADAPTER}/{key}"]

    if isinstance(edit, LowRank):
        magnitude = None if edit.magnitude is None else found(edit.magnitude)
        return replace(edit, a=found(edit.a), b=found(edit.b), magnitude=magnitude)
    return replace(edit, leaf=found(edit.leaf))


def _require_effect(plan: MergePlan, lora: _OpenedAdapter, folder: Path) -> None:
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
        raise _without_effect(folder, plan)


def _without_effect(folder: Path, plan: MergePlan) -> CoverageError:
    first = shown(plan.modules[0])
    return CoverageError(
        f"{folder}: the outcome would equal the base: the deltas of all {len(plan.modules)} modules ({first}, ...) "
        "are zero, or too small for the dtype; take an adapter that has been trained, or a wider dtype"
    )


def _about_ties(source: offline.OfflineModel, plan: MergePlan) -> list[str]:
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
