"""Merges an adapter into its base: both opened and joined, and every outcome an expression over them."""

import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Unpack

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.core.errors import ConfigError, FormatError, KeyMismatchError
from shardwise.core.expression import Expression, Stored, count_stored_rows, iter_stored_leaves, substitute
from shardwise.core.layout import TensorKind
from shardwise.core.save_reports import MergeAdapterReport
from shardwise.core.tensors import DType, parse_size
from shardwise.core.untrusted import require_quick_patterns
from shardwise.files.checkpoint_index import TRAINING_HEADER, without_wrappers
from shardwise.files.join_entries import merge_indexes
from shardwise.files.local_reader import CombinedReader, LocalReader, open_storage
from shardwise.files.local_writer import LocalWriter
from shardwise.files.open_checkpoint import open_checkpoint
from shardwise.files.peft_adapter import (
    ADAPTER_CONFIG,
    LoraConfig,
    adapter_prefix,
    find_adapter_weights,
    find_inner_adapters,
    parse_adapter_config,
)
from shardwise.files.remote import resolve
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.urls import HubOptions, shown, unsafe_name_reason
from shardwise.fsdp.named_tensors import abbreviate, collect_tensors
from shardwise.loading.audit import are_equal
from shardwise.loading.meta_model import MetaModel, ModelOptions, build_meta_model, check_keywords, load_config
from shardwise.models import pretrained
from shardwise.models.build import find_vocabulary_tensors
from shardwise.models.former_names import LowRankPair, fuse_experts, match_former_names
from shardwise.models.revert import Output
from shardwise.models.selection import find_transposed_modules, parameters_by_module
from shardwise.saving import merge_plan, merge_steps
from shardwise.saving.commit import replace_templates
from shardwise.saving.prepare import MAX_SHARD_SIZE
from shardwise.saving.stream_out import TensorsToSave, apply_edits
from shardwise.transfer.read import ReadExecutor

ADAPTER = adapter_prefix("merged")
"""What the names of the adapter's files and keys begin with, beside those of the base."""

_TASKS: Final = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""Classes of models with a head, by ``task_type`` in the config of an adapter."""


@dataclass(frozen=True)
class _AdapterSource:
    """An adapter that has been opened.

    Attributes:
        tensors: all tensors of its file, by key.
        whole: names in the model of tensors that are not factors, by key.
        factors: keys of the factors of each module, by the adapter's name of it.
        notes: notes for the report.
    """

    config: LoraConfig
    executor: ReadExecutor
    tensors: Mapping[str, Stored]
    whole: Mapping[str, str]
    factors: Mapping[str, Sequence[str]]
    notes: Sequence[str]


def find_adapter_folder(path: Path, adapter_name: str) -> Path:
    """The folder itself, or that of the adapter of this name in it, where PEFT puts all but the default one."""
    if not path.is_dir():
        raise FormatError(f"{path}: is a file. Pass the folder with {ADAPTER_CONFIG}")
    # The name becomes a part of a path, so it must not lead anywhere else.
    fault = unsafe_name_reason(adapter_name)
    if fault is not None or "/" in adapter_name:
        raise FormatError(f"{shown(adapter_name)}: is not the name of an adapter. Pass the name it was saved under")
    for folder in (path / adapter_name, path):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    inside = find_inner_adapters(path)
    remedy = f"Choose one by adapter_name: {', '.join(map(shown, inside))}" if inside else "Check the path"
    if any((folder / TRAINING_HEADER).is_file() for folder in (path, *path.glob("step-*"))):
        remedy = "It is of a Checkpointer: restore it into the model with its LoRA, and call save_adapter"
    raise FormatError(f"{path}: has no {ADAPTER_CONFIG}. {remedy}")


def open_for_merging(folder: Path, adapter_name: str, stack: ExitStack) -> _AdapterSource:
    """Read an adapter's config and headers, without PEFT. Readers are closed with ``stack``.

    Raises:
        ConfigError: an adapter of this kind cannot be merged.
        FormatError, StorageError: a file is not there, contradicts its format, or cannot be read.
    """
    path = folder / ADAPTER_CONFIG
    file = find_adapter_weights(folder)
    config = parse_adapter_config(merge_steps.read_files(folder, (path.name,))[path.name], what=str(path))
    reader = stack.enter_context(LocalReader(folder))
    index, notes = without_wrappers(open_checkpoint(reader, weights_name=file))
    executor = merge_steps.create_executor(reader, index)
    tensors = {item.key: Stored(item.key, item.shape, item.dtype) for item in index.tensors()}
    if not tensors:
        raise FormatError(f"{folder / file}: holds no tensors. Save the adapter again")
    whole = merge_plan.find_whole_tensors(tensors, adapter_name=adapter_name)
    factors = merge_plan.group_factor_keys(tensors, adapter_name=adapter_name)
    return _AdapterSource(config, executor, tensors, whole, factors, notes)


def find_new_vocab_size(lora: _AdapterSource, built: MetaModel) -> int | None:
    """Return the number of tokens of an adapter that was trained with a resized vocabulary, or None."""
    by_name, rows, renamed = built.layout.by_name, {}, make_renamer(built)
    # 1. Tensors of the adapter that have another number of rows than the base's, but are otherwise equal.
    for key, whole_name in lora.whole.items():
        name = renamed(whole_name) or whole_name
        shape, base_shape = lora.tensors[key].shape, by_name[name].shape if name in by_name else ()
        if (
            base_shape
            and len(shape) == len(base_shape)
            and shape[1:] == base_shape[1:]
            and shape[0] not in (0, base_shape[0])
        ):
            rows[name] = shape[0]
    try:
        # 2. Of these, the embedding and the head. They have to agree on one number of tokens.
        vocabulary = find_vocabulary_tensors(built.model, collect_tensors(built.model)) if rows else set()
    except ConfigError:
        return None
    sizes = {size for name, size in rows.items() if name in vocabulary}
    return sizes.pop() if len(sizes) == 1 else None


def find_class_with_head(lora: _AdapterSource, built: MetaModel) -> Any:
    """Return the class of model that an adapter was trained on, if it has a head that the base does not have.

    None if it has none. The adapter's config names the task, or the class.
    """
    renamed = make_renamer(built)
    # The base has a place for each of the adapter's tensors, so it has the head, too.
    if all(renamed(name) is not None for name in lora.whole.values()):
        return None
    name = _TASKS.get(lora.config.task_type or "") or lora.config.auto_mapping.get("base_model_class")
    return getattr(transformers, name, None) if isinstance(name, str) else None


def find_head(lora: _AdapterSource, built: MetaModel) -> dict[str, str]:
    """Return the adapter's keys of the tensors that the base does not store, by their names in the model."""
    ties = pretrained.get_declared_ties(built.model)
    # A tied tensor is stored under one of its names, so the other ones are not absent.
    stored = {*built.bindings.matched, *ties, *ties.values()}
    absent = {name for tensor in built.layout.saved() for name in tensor.names} - stored
    return {name: key for key, name in lora.whole.items() if name in absent}


def find_num_labels(lora: _AdapterSource, built: MetaModel, head: Mapping[str, str]) -> int | None:
    """Return the number of rows of a head, if that is not the number of labels in the config."""
    # A head of shape (labels, hidden) must differ from the model's in its first dimension only.
    expected = built.model.config.num_labels
    rows = set()
    for name, key in head.items():
        shape, stored = built.layout.by_name[name].shape, lora.tensors[key].shape
        if shape[:1] == (expected,) and len(shape) == len(stored) and shape[1:] == stored[1:]:
            rows.add(stored[0])
    return rows.pop() if len(rows) == 1 and rows != {expected} else None


def get_config_content(
    folder: Path, config: PreTrainedConfig, options: ModelOptions, model: PreTrainedModel, *, has_new_head: bool
) -> dict[str, object]:
    """Return the output's config: the base's file in ``folder``, with the class and labels of a new head.

    With ``config`` or ``config_overrides`` it is all of ``config``, in which these are: fields of the file under
    former names (``rope_scaling``) would overrule its own.
    """
    is_changed = "config" in options or bool(options.get("config_overrides"))
    content = json.loads(config.to_json_string(use_diff=False)) if is_changed else merge_steps.parse_config(folder)
    if has_new_head:
        of_model = json.loads(model.config.to_json_string(use_diff=False))
        content |= {name: of_model[name] for name in ("id2label", "label2id") if name in of_model}
    if is_changed or has_new_head:
        content["architectures"] = [type(model).__name__]
    return content


def require_equal_copies(lora: _AdapterSource, adapter_name: str) -> None:
    """Check that tensors that the adapter stores under two names have the same values.

    Raises:
        KeyMismatchError: they differ. The message has both names.
    """
    stored = stored_tensors(lora.executor.index)
    for key, other in merge_plan.find_repeated_copies(lora.tensors, adapter_name=adapter_name).items():
        if not are_equal(stored[key], stored[other], lora.tensors[other].dtype, lora.executor):
            raise KeyMismatchError(
                f"{lora.executor.reader.root}: {shown(key)} and {shown(other)} are the same tensor, and differ. "
                "Save the adapter again"
            )


def require_all_rows(source: merge_steps.OfflineModel, plan: merge_plan.MergePlan, what: str) -> None:
    """Check that the adapter has the new rows of a resized vocabulary.

    Raises:
        KeyMismatchError: it does not have a tensor that needs them. The message has its name.
    """
    for tensor in source.layout.saved():
        stored = count_stored_rows(source.expressions[tensor.fqn]) if tensor.fqn in source.expressions else None
        edits = [edit for name in tensor.names for edit in plan.tensors.get(name, ())]
        if stored is not None and not any(isinstance(edit, merge_plan.Replaced) for edit in edits):
            raise KeyMismatchError(
                f"{what}: the adapter was trained with {tensor.shape[0]} tokens, the base has {stored}, and the "
                f"adapter has no {shown(tensor.fqn)} of that size. Train it with this module in modules_to_save"
            )


def find_untied(lora: _AdapterSource, built: MetaModel) -> tuple[set[str], dict[str, str]]:
    """Return the declared ties that are not tied in the output, and those of them that were tied in training.

    The latter are targets with their sources. PEFT adapts modules: with a LoRA on one of two tied modules, the
    other one has the tensor without it. An adapter also unties a tensor if it has values for one of its names only,
    or two values. A config can only untie all at once (``tie_word_embeddings``).
    """
    renamed = make_renamer(built)
    whole = {renamed(name) or name: key for key, name in lora.whole.items()}
    adapted = {renamed(f"{module}.weight") for module in lora.factors}
    expressions = stored_tensors(lora.executor.index)
    declared = pretrained.get_declared_ties(built.model)
    ties = {target: origin for target, origin in declared.items() if target in built.layout.by_name}
    # With ensure_weight_tying, PEFT keeps the tie whatever the adapter stores.
    separate: set[str] = set()
    for target, origin in ties.items():
        stored_names = [name for name in (target, origin) if name in whole]
        if not stored_names or lora.config.ensure_weight_tying:
            continue
        # Stored under one name: PEFT copies a module of modules_to_save, which then has values of its own.
        # Stored under both names: the values decide.
        if len(stored_names) == 1:
            is_tied = not lora.config.saves_module(stored_names[0].rpartition(".")[0])
        else:
            one, other = (expressions[whole[name]] for name in stored_names)
            is_tied = are_equal(one, other, built.layout.by_name[target].dtype, lora.executor)
        if not is_tied:
            separate.add(target)
    # No tie is affected, so the config of the base still holds.
    if not separate and adapted.isdisjoint([*ties, *ties.values()]):
        return set(), {}
    return set(ties), {target: origin for target, origin in ties.items() if target not in separate}


def make_renamer(built: MetaModel) -> Callable[[str], str | None]:
    """Return a function from a tensor's name in a checkpoint to the model's, or to None if the model has none."""
    names = {name: tensor for tensor in built.layout.saved() for name in tensor.names}
    # was_used() of the originals decides the form of the saved experts.
    transforms = copy.deepcopy(built.transforms)

    @cache
    def renamed(name: str) -> str | None:
        return match_former_names(built.model, [name], names, transforms).plain.get(name)

    return renamed


def find_merge_targets(source: merge_steps.OfflineModel, outputs: Mapping[str, Output]) -> merge_plan.MergeTargets:
    names = {name: tensor for tensor in source.layout.saved() for name in tensor.names}
    return merge_plan.MergeTargets(
        tensors={name: tensor.shape for name, tensor in names.items() if tensor.fqn in source.expressions},
        keys={key: output.shape for key, output in outputs.items()},
        parameters=parameters_by_module(source.built.model),
        columns=find_transposed_modules(source.built.model),
        renamed=make_renamer(source.built),
    )


def fuse_single_experts(
    source: merge_steps.OfflineModel, outputs: Mapping[str, Output], lora: _AdapterSource
) -> tuple[dict[str, merge_plan.Edit], set[str]]:
    """Return the edits of fused experts by an adapter of single ones, and the adapter's keys that they use.

    If the checkpoint stores experts one by one, there are none: each is merged into its own tensor.

    Raises:
        KeyMismatchError: the adapter does not have all parts of a tensor, or in several ranks or scalings.
    """
    layout = source.layout
    names = {name: tensor for tensor in layout.saved() for name in tensor.names}
    keys: dict[str, dict[str, str]] = {}
    for module, factor_keys in lora.factors.items():
        # "... .lora_A.default.weight" is factor "A".
        keys[f"{module}.weight"] = {key.rpartition(".lora_")[2].partition(".")[0]: key for key in factor_keys}
    # Factors of modules that are no tensors of the checkpoint: single experts of a fused weight.
    plain = [name for name, by_factor in keys.items() if name not in outputs and by_factor.keys() == {"A", "B"}]
    matched = match_former_names(source.built.model, plain, names, source.built.transforms)
    # All pairs of an expert weight become one pair of stacked factors, which is merged into the fused tensor.
    pairs = {}
    for name in matched.former.values():
        lora_A, lora_B = lora.tensors[keys[name]["A"]], lora.tensors[keys[name]["B"]]
        scaling = lora.config.scaling(name.removesuffix(".weight"))
        pairs[name] = LowRankPair(lora_A, lora_B, lora_A.shape[0], scaling)
    fused = fuse_experts(source.built.model, layout, matched, pairs, what=str(lora.executor.reader.root))
    columns = find_transposed_modules(source.built.model)
    edits: dict[str, merge_plan.Edit] = {}
    for name, pair in fused.items():
        is_transposed = name.rpartition(".")[0] in columns
        form = merge_plan.WeightForm.EXPERT_COLUMNS if is_transposed else merge_plan.WeightForm.EXPERTS
        edits[name] = merge_plan.LowRank(name, form, pair.r, pair.scaling, pair.lora_A, pair.lora_B)
    return edits, {key for name in pairs for key in keys[name].values()}


def merge_tensors(
    source: merge_steps.OfflineModel,
    outputs: Mapping[str, Output],
    plan: merge_plan.MergePlan,
    joined: Mapping[str, Expression],
    changed: set[str],
) -> dict[str, tuple[DType, Expression]]:
    """Return the tensors of the output: those of the base, with the edits of the adapter under each name."""
    expressions = source.by_every_name()
    # A shared tensor may be edited under any of its names. All names get the same result.
    for tensor in source.layout.saved():
        edits = tuple(edit for name in tensor.names for edit in plan.tensors.get(name, ()))
        if edits and tensor.fqn in source.expressions:
            base, joined_edits = source.expressions[tensor.fqn], [_with_unique_keys(edit, joined) for edit in edits]
            merged = apply_edits(tensor.fqn, base, joined_edits, tensor.dtype, changed)
            expressions |= dict.fromkeys(tensor.names, merged)
    # Edits by name are inside of the outputs now. Edits by key are of tensors that only the checkpoint has.
    tensors = merge_steps.substitute_outputs(source, outputs, expressions)
    for key, edits in plan.keys.items():
        (dtype, base), joined_edits = tensors[key], [_with_unique_keys(edit, joined) for edit in edits]
        tensors[key] = dtype, apply_edits(key, base, joined_edits, dtype, changed)
    return tensors


def _with_unique_keys(edit: merge_plan.Edit, joined: Mapping[str, Expression]) -> merge_plan.Edit:
    """Return an edit with keys of leaves that are unique among those of the base."""

    def rename(tensor: Expression) -> Expression:
        leaves = {leaf.key: joined[f"{ADAPTER}/{leaf.key}"] for leaf in iter_stored_leaves(tensor)}
        return substitute(tensor, leaves)

    if isinstance(edit, merge_plan.LowRank):
        magnitude = None if edit.magnitude is None else rename(edit.magnitude)
        return replace(edit, a=rename(edit.a), b=rename(edit.b), magnitude=magnitude)
    return replace(edit, leaf=rename(edit.leaf))


def merge_adapter(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    adapter_name: str = "default",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    **options: Unpack[ModelOptions],
) -> MergeAdapterReport:
    """Fold a LoRA adapter of PEFT into its base and write the outcome as the hub has it.

    Block by block: read a box of the base, add ``scaling * B @ A`` in float32 to the part that the adapter changes,
    and round the sum once ([Note: One rounding] in ``saving/stream_out.py``).

    Args:
        base: a folder, or a hub id in the cache. ``hub`` and its keywords are for it.
        adapter: a folder of PEFT's with ``adapter_config.json``, or a hub id in the same cache.
        out: a folder, created if missing. A model in it is replaced once all is written.
        adapter_name: of an adapter in a folder of its own inside ``adapter``, or in the names of its tensors.
        max_shard_size: as in ``"5GB"``: of one file's tensors.

    Keyword arguments: see :class:`~shardwise.loading.meta_model.ModelOptions`. The output has their ``dtype``.

    Collective: no. Memory: about half a GiB in addition to importing torch and transformers, for any model size.

    Raises:
        ConfigError: an argument cannot be honored, or an adapter of this kind cannot be merged.
        KeyMismatchError: adapter and base do not match, or merging would change nothing. The message names the
            tensors.
        FormatError, StorageError: a file contradicts its format, or cannot be read or written.

    If it raises, an older model in ``out`` is unchanged.
    """
    start = time.perf_counter()
    options = check_keywords("merge_adapter", options, ModelOptions)
    max_shard_bytes = parse_size(max_shard_size)
    # Both from the cache, so that a merge never begins with a download.
    in_cache = replace(options.get("hub", HubOptions()), local_files_only=True)
    # The adapter is in another repository than the base, with revisions and folders of its own.
    of_adapter = replace(in_cache, revision=None, subfolder="")
    base_path = resolve(base, in_cache, download=False)
    adapter_path = resolve(adapter, of_adapter, download=False)
    lora_folder = find_adapter_folder(adapter_path, adapter_name)
    folder, out = base_path if base_path.is_dir() else base_path.parent, Path(out).expanduser()
    merge_steps.require_other_folder(out, [base_path, lora_folder])
    with ExitStack() as stack:
        merge = _plan_edits(base_path, folder, lora_folder, adapter_name, options, stack)
        source, plan = merge.source, merge.plan
        # A Trainer writes the tokenizer above adapters in folders of their own. The config is the base's, with the
        # fields that the merge changes.
        companions, templates = merge_steps.read_companions(folder, [lora_folder, adapter_path, folder])
        dtype = options.get("dtype", "auto")
        companions["config.json"] = merge_steps.config_content(
            merge.config,
            dtype=None if dtype == "auto" else str(dtype).removeprefix("torch."),
            untied=source.is_untied(),
            vocab_size=merge.vocab_size,
        )
        tensors = source.layout.tensors
        parameters = sum(item.numel for item in tensors if item.kind is TensorKind.PARAMETER)
        with (
            LocalWriter(out) as writer,
            merge_steps.write_out(
                writer, merge.to_save, parameters, max_shard_bytes=max_shard_bytes, companions=companions
            ) as (written, names),
        ):
            # Known when all is written, and before the commit, so that the older model stays.
            merge.require_effect(lora_folder)
        replace_templates(out, templates)
    return MergeAdapterReport(
        base=str(base_path),
        adapter=str(lora_folder),
        out=str(out),
        model_class=type(source.built.model).__name__,
        dtype=str(source.config.dtype).removeprefix("torch."),
        modules=len(plan.modules),
        unchanged=tuple(name for name in plan.modules if name not in merge.changed),
        tensors=len(written.fingerprints),
        nbytes=written.nbytes,
        files=names,
        companions=tuple(sorted(companions)),
        notes=tuple(source.notes),
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True)
class _PlannedEdits:
    """An adapter and its base: edits and outputs. Writing adds to ``changed``."""

    source: merge_steps.OfflineModel
    plan: merge_plan.MergePlan
    to_save: TensorsToSave
    changed: set[str]
    vocab_size: int | None
    """The number of tokens, if the adapter changes it."""
    config: Mapping[str, object]
    """The output's config, but for its dtype, ties and number of tokens."""

    def require_effect(self, folder: Path) -> None:
        """Raises KeyMismatchError if nothing has been changed."""
        if not self.changed:
            modules = self.plan.modules
            raise KeyMismatchError(
                f"{folder}: the outcome would equal the base: the deltas of all {len(modules)} modules "
                f"({shown(modules[0])}, ...) are zero, or too small for the dtype. Take a trained adapter, or a "
                "wider dtype"
            )


def _plan_edits(
    base_path: Path, folder: Path, lora_folder: Path, adapter_name: str, options: ModelOptions, stack: ExitStack
) -> _PlannedEdits:
    """Open both, read headers and configs, and plan the edits."""
    # 1. Open the adapter and the base, and build the base's model on meta.
    lora = open_for_merging(lora_folder, adapter_name, stack)
    opened, config = open_storage(base_path), load_config(folder, options)
    reader = stack.enter_context(opened.reader)
    index = merge_steps.open_index(opened, config)
    executor = merge_steps.create_executor(reader, index)
    built = build_meta_model(folder, config, index, options)
    # 2. Build it again as the adapter was trained: with a head, with its number of labels, with its vocabulary.
    # Each step needs the model of the step before.
    model_class = None if "model_class" in options else find_class_with_head(lora, built)
    if model_class is not None:
        options = {**options, "model_class": model_class}
        built = build_meta_model(folder, config, index, options)
    head = find_head(lora, built)
    num_labels = find_num_labels(lora, built, head)
    if num_labels is not None:
        config.num_labels = num_labels
        built = build_meta_model(folder, config, index, options)
    is_named = any(f".{adapter_name}." in f"{key}." for key in lora.tensors)
    if adapter_name not in ("default", lora_folder.name) and not is_named:
        raise FormatError(f"{lora_folder}: has no adapter {shown(adapter_name)}. Check adapter_name")
    require_equal_copies(lora, adapter_name)
    vocab_size = find_new_vocab_size(lora, built)
    if vocab_size is not None:
        built = build_meta_model(folder, config, index, options, vocab_size)
    # 3. Bind the base's tensors, after it is known which ties are kept. The head's come from the adapter.
    untied, tied_in_training = find_untied(lora, built)
    source = merge_steps.bind_offline(config, index, built, executor, untied, provided=head)
    joined = merge_indexes(index, lora.executor.index, ADAPTER)
    expressions = stored_tensors(joined)
    source.expressions.update({name: expressions[f"{ADAPTER}/{key}"] for name, key in head.items()})
    pretrained.record_conversions(built.model, built.transforms)
    outputs = source.revert()
    # 4. Plan the edits. Patterns of the config are checked before any name is matched with them, because a
    # hostile one may take forever.
    targets, what = find_merge_targets(source, outputs), f"{lora_folder} and {base_path}"
    require_quick_patterns(lora.config.patterns(), merge_plan.find_adapted_names(lora.config, lora.tensors))
    of_experts, used = fuse_single_experts(source, outputs, lora)
    others = {key: leaf for key, leaf in lora.tensors.items() if key not in used}
    plan = merge_plan.plan_merge(lora.config, others, targets, adapter_name=adapter_name, what=what)
    plan = plan.with_edits(of_experts).with_tied(tied_in_training)
    require_all_rows(source, plan, what)
    unadapted = merge_plan.find_unadapted(lora.config, targets, plan)
    if unadapted:
        source.notes.append(
            f"the adapter has nothing for {len(unadapted)} modules that its target_modules name: "
            f"{abbreviate(unadapted)} {'is' if len(unadapted) == 1 else 'are'} as in the base"
        )
    # 5. One index and one reader of both, over which the outputs are expressions.
    joined_executor = merge_steps.create_executor(CombinedReader(reader, lora.executor.reader, ADAPTER), joined)
    changed = {edit.module for name in head for edit in plan.tensors[name]}
    content = get_config_content(folder, config, options, built.model, has_new_head=bool(head))
    to_save = TensorsToSave(merge_tensors(source, outputs, plan, expressions, changed), joined_executor)
    source.notes += lora.notes
    if vocab_size is not None:
        source.notes.append(f"the vocabulary has {vocab_size} tokens, as the adapter")
    return _PlannedEdits(source, plan, to_save, changed, vocab_size, content)
