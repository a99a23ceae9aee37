"""Steps that merges share: bind a checkpoint to a model in one process without ranks, and write the output."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedConfig

from shardwise.core.computed import computes
from shardwise.core.consents import Consent, Ignore, Initialize, OnMissing
from shardwise.core.errors import ConfigError, FormatError, StorageError
from shardwise.core.expression import Expression, iter_stored_leaves, substitute
from shardwise.core.layout import ModelLayout, Origin, TensorKind
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import CheckpointIndex, parse_object, wrapper_notes
from shardwise.files.local_reader import OpenStorage
from shardwise.files.open_checkpoint import dequantize_index, open_checkpoint
from shardwise.files.storage import StorageReader, StorageWriter
from shardwise.files.stored_tensors import stored_tensors
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import build_layout, collect_tensors
from shardwise.fsdp.torch_private import from_torch
from shardwise.loading.meta_model import MetaModel, compare_ties
from shardwise.loading.plan import REMEDIES, LoadPlan, Tie, plan_load
from shardwise.loading.prepare import get_rules
from shardwise.models import pretrained
from shardwise.models.revert import Output, revert
from shardwise.ranks.world import World
from shardwise.saving.commit import TEMPLATES_FOLDER, begin_save, commit_save, undo_save
from shardwise.saving.plan import plan_save
from shardwise.saving.saving_lock import new_save_id
from shardwise.saving.stream_out import BLOCK_BYTES, TensorsToSave, plan_blocks, write_blocks
from shardwise.saving.write import LocalFiles, WrittenTensors
from shardwise.transfer.progress import progress_bar
from shardwise.transfer.read import ReadExecutor

BUDGET_BYTES: Final = 32 << 20
"""Memory budget for the staging of reads."""


@dataclass
class OfflineModel:
    """A checkpoint and its model on meta, before tensors are read.

    Attributes:
        stored: the checkpoint's tensors, by key.
        expressions: the model's tensors as expressions over stored tensors, by FQN.
        carried: keys of tensors that the model does not have.
        untied: names declared tied that have values of their own.
        notes: notes for the report.
    """

    config: PreTrainedConfig
    index: CheckpointIndex
    built: MetaModel
    layout: ModelLayout
    stored: Mapping[str, Expression]
    expressions: dict[str, Expression]
    carried: tuple[str, ...]
    untied: tuple[str, ...]
    notes: list[str]

    def is_untied(self) -> bool:
        """Return whether the output's config says that nothing is tied, which it only can of all ties at once."""
        # T5 and its kin scale the decoder's output if the config is tied, so the field stays. transformers unties
        # names that are stored with separate values.
        model = self.built.model
        return (
            bool(self.untied)
            and not pretrained.get_declared_ties(model)
            and not pretrained.is_encoder_decoder(model)
        )

    def as_stored(self) -> OfflineModel:
        """Return the model with the stored dtype for every tensor that is not computed."""
        stored_dtypes = {fqn: item.dtype for fqn, item in self.expressions.items() if not computes(item)}
        tensors = (replace(item, dtype=stored_dtypes.get(item.fqn, item.dtype)) for item in self.layout.tensors)
        return replace(self, layout=ModelLayout(tuple(tensors)))

    def revert(self) -> dict[str, Output]:
        """Return the model's tensors in the checkpoint's form, without those that need absent tensors."""
        # An output that needs an absent tensor is left out: the checkpoint does not have it in the first place.
        names = {name for tensor in self.layout.saved() for name in tensor.names}
        absent = names - self.by_every_name().keys()

        def is_complete(output: Output) -> bool:
            return absent.isdisjoint(leaf.key for leaf in iter_stored_leaves(output.expression))

        outputs = revert(self.built.model, self.layout)
        return {key: output for key, output in outputs.items() if is_complete(output)}

    def by_every_name(self) -> dict[str, Expression]:
        """Return ``expressions`` under all names of each tensor."""
        expressions: dict[str, Expression] = {}
        for tensor in self.layout.saved():
            if tensor.fqn in self.expressions:
                expressions |= dict.fromkeys(tensor.names, self.expressions[tensor.fqn])
        return expressions


def create_executor(reader: StorageReader, index: CheckpointIndex) -> ReadExecutor:
    """Return an executor that reads a checkpoint's tensors in this process only, without a progress bar."""
    return ReadExecutor(reader, index, BUDGET_BYTES, World(0, 1))


def bind_offline(
    config: PreTrainedConfig,
    index: CheckpointIndex,
    built: MetaModel,
    executor: ReadExecutor,
    untied: Collection[str] = (),
    provided: Collection[str] = (),
) -> OfflineModel:
    """Bind a checkpoint's tensors to a model on meta, and settle its ties.

    ``untied`` are declared ties that get separate values, although the checkpoint does not store them. ``provided``
    are tensors that the checkpoint lacks, whose expressions the caller adds.

    Raises:
        KeyMismatchError: with every tensor that is missing or does not fit. Tensors that the model does not have
            are carried along.
    """
    # Ties come before the layout: a name that loses its tie is a tensor of its own in it.
    separate = tuple(sorted(_resolve_ties(built, executor, untied)))
    layout = build_layout(collect_tensors(built.model), Origin.INIT_WEIGHTS)
    # Unexpected tensors are allowed, and carried along. Missing ones are errors, except for provided ones.
    missing: OnMissing = Initialize(only=tuple(provided)) if provided else "error"
    consent = Consent(missing, "error", Ignore(only=("*",)))
    # A merge takes no consents, by which it would write random numbers.
    holders = "a checkpoint that has them, or to merge_adapter an adapter that has them (PEFT's modules_to_save)"
    remedies = REMEDIES | {"missing": holders, "mismatched": "a checkpoint of this model"}
    bindings = built.bindings_less_ties()
    plan = plan_load(index, layout, bindings, get_rules(built.model), consent, remedies=remedies)
    expressions = {name: read.expression for name, read in plan.reads().items()}
    notes = [
        *wrapper_notes(built.bindings.wrapped),
        *_list_notes(plan, index),
        *(f"{name} is not tied any more: it has its own values" for name in separate),
    ]
    stored = stored_tensors(index)
    return OfflineModel(config, index, built, layout, stored, expressions, plan.ignored_keys, separate, notes)


def _resolve_ties(built: MetaModel, executor: ReadExecutor, untied: Collection[str]) -> set[str]:
    """Tie declared ties with equal values. Return the names with values of their own."""
    matched, twice = built.bindings.matched, built.ties_stored_twice()
    # Only values tell whether a tie that is stored under both names is one: fine-tuning may have separated them.
    differing = set(compare_ties(built, twice, executor))
    built.equal_ties = frozenset(name for name, _ in twice) - differing
    separate = differing | set(untied)
    sources = pretrained.get_declared_ties(built.model)
    # A name that loses its tie starts as a copy of the tensor that it was tied to.
    copies = {}
    for name in separate:
        if offered := matched.get(name) or matched.get(sources.get(name, name)):
            copies[name] = offered
    built.bindings = replace(built.bindings, matched={**matched, **copies})
    built.equal_ties -= separate
    built.tie(separate)
    return separate


def _list_notes(plan: LoadPlan, index: CheckpointIndex) -> list[str]:
    # Ties of buffers are not worth a line.
    tied = [(name, fill.source) for name, fill in plan.fills.items() if isinstance(fill, Tie)]
    kinds = {name: tensor.kind for name, tensor in plan.layout.by_name.items()}
    parameters = [pair for pair in tied if kinds[pair[0]] is TensorKind.PARAMETER]
    notes = [f"{name} is tied to {source}: one tensor" for name, source in parameters]
    if plan.ignored_keys:
        notes.append(
            f"{len(plan.ignored_keys)} tensors that the model does not have are carried along, such as "
            f"{shown(plan.ignored_keys[0])}"
        )
    if ignored := plan.not_loaded(index):
        notes.append(f"not taken along: {', '.join(shown(item) for item in ignored[:5])}")
    return notes


# Writing the output


def require_other_folder(out: Path, sources: Sequence[Path]) -> None:
    """Require that the output folder is none of the source folders, after resolving links.

    Raises:
        ConfigError: naming both.
    """
    for source in sources:
        folder = source if source.is_dir() else source.parent
        same = os.path.realpath(out) == os.path.realpath(folder)
        if same or (out.exists() and os.path.samefile(out, folder)):
            raise ConfigError(f"{out}: is the folder that is read ({folder}). Pass another output folder")


@contextmanager
def write_out(
    writer: StorageWriter,
    to_save: TensorsToSave,
    parameters: int,
    *,
    max_shard_bytes: int,
    companions: Mapping[str, bytes],
) -> Iterator[tuple[WrittenTensors, tuple[str, ...]]]:
    """Plan the files and write them. Yield the written tensors and the file names. Commit after the block.

    ``companions`` are small files that belong to the save. The older checkpoint stays valid until the commit
    ([Note: One commit] in ``saving/commit_plan.py``). A save that fails, or whose block raises, removes its files.

    Raises:
        StorageError: something could not be written.
    """
    to_save.require_bounded()
    plan = plan_save(
        to_save.tensors(), max_shard_bytes=max_shard_bytes, parameters=parameters, save_id=new_save_id()
    )
    with progress_bar("Merging", plan.nbytes, enabled=True) as bar:
        out = LocalFiles(World(0, 1), writer, plan.files, bar)
        # The lock comes first: from here on, no other save removes or creates files in this folder.
        state = begin_save(writer, plan, companions)
        try:
            write_blocks(out, plan_blocks(plan, BLOCK_BYTES), to_save)
            yield out.written, plan.names
            commit_save(state, out.written.fingerprints)
        except BaseException:  # Ctrl-C, too: the next save of this process must not find the lock of this one
            undo_save(state)
            raise


def open_index(opened: OpenStorage, config: PreTrainedConfig) -> CheckpointIndex:
    """Return the index of the checkpoint in a model's folder."""
    index = open_checkpoint(
        opened.reader,
        weights_name=opened.file or getattr(config, "transformers_weights", None),
        extra_files=getattr(type(config), "extra_files", ()),
    )
    return dequantize_index(opened.reader, index)


def substitute_outputs(
    source: OfflineModel, outputs: Mapping[str, Output], expressions: Mapping[str, Expression]
) -> dict[str, tuple[DType, Expression]]:
    """Return a save's tensors: the model's, with ``expressions`` substituted by name, and those carried along."""
    tensors: dict[str, tuple[DType, Expression]] = {}
    for key, output in outputs.items():
        tensors[key] = output.dtype, substitute(output.expression, expressions)
    # Tensors that the model does not have are written unchanged, or dequantized, unless an output has their key.
    stored = {item.key: item for item in source.index.tensors()}
    model_dtype: Any = source.config.dtype
    for key in source.carried:
        if key not in outputs and key in stored:
            dtype = from_torch(model_dtype, key) if computes(source.stored[key]) else stored[key].dtype
            tensors[key] = dtype, source.stored[key]
    return tensors


_CONFIG = "config.json"
_TOKENIZER: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "*vocab.json",
    "vocab-*.json",
    "vocab.txt",
    "dict.txt",
    "merges.txt",
    "byte_maps.json",
    "emoji.json",
    "normalizer.json",
    "word_*.json",
    "*tekken*.json",
    "*.model",
    "*.spm",
    "*.codes",
    "*.tiktoken",
    "*.tokenizer",
    "chat_template.*",
)
_MAIN_TOKENIZER_FILES: Final = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "tekken.json")
_MAX_COMPANION_BYTES = 256 << 20


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MAIN_TOKENIZER_FILES)


def read_companions(
    base: Path, tokenizer_folders: Sequence[Path]
) -> tuple[dict[str, bytes], dict[str, bytes] | None]:
    """Return the small files of a model by name: configs, tokenizer, chat template, and the code they refer to.

    Those of the tokenizer are all of the first folder that has one, or else of the last: a mix of files of two
    tokenizers is neither. Return also its additional chat templates, or None without a tokenizer.
    """
    tokenizer = next(filter(_has_tokenizer, tokenizer_folders), tokenizer_folders[-1])
    files = read_files(base, ("generation_config.json", "*processor_config.json"))
    files |= read_files(tokenizer, _TOKENIZER) | _read_code(base) | _read_code(tokenizer)
    if not _has_tokenizer(tokenizer):
        return files, None
    return files, read_files(tokenizer / TEMPLATES_FOLDER, ("*.jinja",))


def _read_code(folder: Path) -> dict[str, bytes]:
    """Return the Python files of a folder if its model, tokenizer or processor has code of its own."""
    configs = read_files(folder, (_CONFIG, "tokenizer_config.json", "*processor_config.json"))
    refers_to_code = any(b'"auto_map"' in content for content in configs.values())
    return read_files(folder, ("*.py",)) if refers_to_code else {}


def config_content(
    config: Mapping[str, object], *, dtype: str | None, untied: bool, vocab_size: int | None = None
) -> bytes:
    """Return the output's ``config.json``: its dtype, ties and a new number of tokens, and no quantization.

    It has all other fields of ``config``, and names no other files of weights (``transformers_weights``).
    """
    content = copy.deepcopy(dict(config))
    content.pop("transformers_weights", None)
    # A config of several parts (text, vision) has these fields in each of them.
    sections = [content, *(value for value in content.values() if isinstance(value, dict))]
    for section in sections:
        section.pop("quantization_config", None)  # the output is not quantized
        for name in ("dtype", "torch_dtype"):
            if dtype is not None and name in section:
                section[name] = dtype
        if untied and "tie_word_embeddings" in section:
            section["tie_word_embeddings"] = False
    if dtype is not None and "torch_dtype" not in content:
        content["dtype"] = dtype
    if untied:
        content["tie_word_embeddings"] = False
    # The number of tokens is a field of the text part, if there is one.
    if vocab_size is not None:
        text = content.get("text_config")
        if isinstance(text, dict):
            text["vocab_size"] = vocab_size
        if not isinstance(text, dict) or "vocab_size" in content:
            content["vocab_size"] = vocab_size
    return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def parse_config(folder: Path) -> dict[str, object]:
    """Return the content of a folder's ``config.json``, empty if there is none."""
    content = read_files(folder, (_CONFIG,)).get(_CONFIG)
    # transformers has written Infinity into the configs of state space models.
    return {} if content is None else parse_object(content, what=f"{_CONFIG} in {folder}", allow_constants=True)


def read_files(folder: Path, patterns: Sequence[str]) -> dict[str, bytes]:
    """Return the content of files in a folder with matching names. Links are followed, as in the hub's cache."""
    if not folder.is_dir():
        return {}
    contents: dict[str, bytes] = {}
    try:
        for path in sorted(folder.iterdir()):
            if any(fnmatchcase(path.name, pattern) for pattern in patterns) and path.is_file():
                if path.stat().st_size > _MAX_COMPANION_BYTES:
                    raise FormatError(f"{path}: is larger than any config or tokenizer. Move it away")
                contents[path.name] = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{folder}: reading it failed, {error.strerror}. Make it readable") from error
    return contents
