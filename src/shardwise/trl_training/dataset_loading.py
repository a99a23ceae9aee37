"""Data sets of a training: loaded, mixed and, where TRL cannot mask assistant tokens, tokenized with masks.

``datasets`` reads, shuffles, mixes and caches. Ours are names of local files, weights of an interleaved mixture,
conversion to ``messages``, and assistant masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import datasets
from transformers import PreTrainedTokenizerBase

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.execution.ranks.world import World
from shardwise.trl_training.chat_formats import MalformedRowError, is_foreign, to_messages
from shardwise.trl_training.chat_masks import AssistantMasks, ChatError

T = TypeVar("T")

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset

_BUILDERS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Builders of ``datasets`` by the suffix of a file."""


def on_first_of_each_node(prepare: Callable[[], T], local_rank: int) -> T:
    """Call a function on the first rank of each node, which fills its cache, and then on all others.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: the same on every rank.
    """
    with World.current(call="data sets") as world:
        first = world.together(lambda: prepare() if local_rank == 0 else None)
        rest = world.together(lambda: None if local_rank == 0 else prepare())
    found = first if local_rank == 0 else rest
    assert found is not None
    return found


def load(script: Any, mixture: Any, weights: Sequence[float] | None, seed: int) -> Mapping[str, AnyDataset]:
    """Load the data sets that TRL's ``ScriptArguments`` and ``DatasetMixtureConfig`` name, by split.

    Args:
        script: ``dataset_name``, ``dataset_config``, ``dataset_streaming``. A name may also be a local file.
        mixture: ``datasets``, which replaces ``dataset_name``, ``streaming``, ``test_split_size``.
        weights: of the entries of ``datasets``, to interleave them; None to concatenate them as TRL does.
        seed: of the interleaving.

    Raises:
        ConfigError: a data set cannot be loaded, or naming what contradicts.
    """
    if mixture.datasets:
        for entry in mixture.datasets:
            _name_local_file(entry)
        if weights is not None:
            return _interleaved(mixture, weights, seed)
        from trl.scripts.utils import get_dataset

        mixed: Mapping[str, AnyDataset] = _checked("datasets", lambda: get_dataset(mixture))
        return mixed
    if weights is not None:
        raise ConfigError("interleave: needs datasets, whose weights it lists. Write datasets: [{path: ...}, ...].")
    name = script.dataset_name
    if not name:
        raise ConfigError("dataset_name: is missing. Set it, or datasets.")
    if builder := _builder_of(name):
        options = {"path": builder, "data_files": name}
    else:
        options = {"path": name, "name": script.dataset_config}
    found: Mapping[str, AnyDataset] = _checked(
        name, lambda: datasets.load_dataset(**options, streaming=script.dataset_streaming)
    )
    if mixture.test_split_size is not None and "test" not in found:
        return _split(found["train"], mixture.test_split_size)
    return found


def _builder_of(name: str) -> str | None:
    """The builder for a local file; None for a folder or a name on the hub."""
    file = Path(name)
    suffix = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    return _BUILDERS.get(suffix) if file.is_file() else None


def _name_local_file(entry: Any) -> None:
    if (builder := _builder_of(entry.path)) is not None:
        entry.path, entry.data_files = builder, entry.path


def _interleaved(mixture: Any, weights: Sequence[float], seed: int) -> Mapping[str, AnyDataset]:
    if len(weights) != len(mixture.datasets) or not all(weight > 0 for weight in weights):
        raise ConfigError(
            f"interleave: has {len(weights)} weights for {len(mixture.datasets)} datasets. Give each one above 0."
        )
    if any(entry.fraction is not None for entry in mixture.datasets):
        raise ConfigError("interleave: contradicts fraction of datasets. Remove one of them.")
    parts = []
    for entry in mixture.datasets:
        options = {key: getattr(entry, key) for key in ("path", "name", "data_dir", "data_files", "split")}
        read: Callable[[], Any] = partial(datasets.load_dataset, **options, streaming=mixture.streaming)
        part = _checked(entry.path, read)
        parts.append(part if entry.columns is None else part.select_columns(entry.columns))
    shares = [weight / sum(weights) for weight in weights]
    mixed = datasets.interleave_datasets(
        parts, probabilities=shares, seed=seed, stopping_strategy="all_exhausted_without_replacement"
    )
    return {"train": mixed} if mixture.test_split_size is None else _split(mixed, mixture.test_split_size)


def _split(found: AnyDataset, size: float) -> Mapping[str, AnyDataset]:
    if isinstance(found, datasets.IterableDataset):
        raise ConfigError(
            "test_split_size: cannot split a streamed data set. Set dataset_test_split, or do not stream."
        )
    parts: Mapping[str, AnyDataset] = found.train_test_split(test_size=size, seed=0)
    return parts


def _checked(name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except ShardwiseError:
        raise
    except Exception as error:  # of datasets, pyarrow, the hub: any
        cause = error.__cause__ or error
        raise ConfigError(
            f"{name}: cannot be loaded as a data set, {cause}. Check the name and the rows."
        ) from error


# Rows


def as_messages(found: AnyDataset, *, num_proc: int | None) -> AnyDataset:
    """Convert rows of ShareGPT and Alpaca to ``messages``; other data sets are returned as they are."""
    return _mapped(found, _converted, num_proc) if is_foreign(_columns(found)) else found


def with_masks(found: AnyDataset, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None) -> AnyDataset:
    """Tokenize chats to ``input_ids`` and ``assistant_masks``; see [Note: Assistant masks].

    Rows have ``messages``, or ``prompt`` and ``completion`` as messages, of which the completion is trained on.

    Raises:
        ConfigError: naming the row whose chat cannot be used.
    """
    return _mapped(found, partial(_tokenized, AssistantMasks(tokenizer)), num_proc)


def is_conversational(found: AnyDataset) -> bool:
    """Whether rows are chats: ``messages``, or a ``prompt`` and ``completion`` that are messages."""
    row: Mapping[str, Any] = next(iter(found))
    return "messages" in row or isinstance(row.get("prompt"), list)


def _columns(found: AnyDataset) -> list[str]:
    return list(found.column_names or next(iter(found)))


def _mapped(
    found: Any, examples_of: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]], num_proc: int | None
) -> AnyDataset:
    """Replace each row by its examples; a row has one or several."""
    options: dict[str, Any] = {"num_proc": num_proc} if isinstance(found, datasets.Dataset) else {}
    mapped: AnyDataset = found.map(
        partial(_batch, examples_of), batched=True, with_indices=True, remove_columns=_columns(found), **options
    )
    return mapped


def _batch(
    examples_of: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
) -> dict[str, list[Any]]:
    made: list[Mapping[str, Any]] = []
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        try:
            made += examples_of(dict(zip(batch, values, strict=True)))
        except (MalformedRowError, ChatError) as error:
            raise ConfigError(f"row {index + 1} of the data set: {error}") from error
    return {name: [one.get(name) for one in made] for name in dict.fromkeys(key for one in made for key in one)}


def _converted(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [to_messages(row)]


def _tokenized(masks: AssistantMasks, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    chat = to_messages(row)
    if "messages" not in chat:
        context = [{**message, "weight": 0} for message in chat.get("prompt", ())]
        chat["messages"] = [*context, *chat.get("completion", ())]
    if not any(message["role"] == "assistant" for message in chat["messages"]):
        raise MalformedRowError("messages: none has the role 'assistant'. Add one, or remove the row.")
    return masks(chat["messages"], chat.get("tools"), chat.get("chat_template_kwargs"))
