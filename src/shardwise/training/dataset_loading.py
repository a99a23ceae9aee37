"""Data sets of a training: loaded, mixed and, where TRL cannot mask assistant tokens, tokenized with masks.

``datasets`` and TRL read, shuffle, mix and cache. This module adds names of local files, conversion to
``messages``, and assistant masks.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import datasets
from transformers import PreTrainedTokenizerBase
from trl.data_utils import get_dataset_column_names
from trl.scripts.utils import get_dataset
from trl.trainer.utils import remove_none_values

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.execution.world import World
from shardwise.storage.names import redacted
from shardwise.training.chat_masks import AssistantMasks

T = TypeVar("T")

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset


def on_first_of_each_node(prepare: Callable[[], T], local_rank: int) -> T:
    """Call a function on the first rank of each node, which fills its cache, and then on all others.

    Collective: yes, over the default process group.

    Raises:
        ShardwiseError: the same on every rank.
    """
    with World.current(call="data sets") as world:
        first = world.run_all(lambda: prepare() if local_rank == 0 else None)
        rest = world.run_all(lambda: None if local_rank == 0 else prepare())
    found = first if local_rank == 0 else rest
    assert found is not None
    return found


def load(script: Any, mixture: Any) -> Mapping[str, AnyDataset]:
    """Load the data sets that TRL's ``ScriptArguments`` and ``DatasetMixtureConfig`` name, by split.

    Args:
        script: ``dataset_name``, ``dataset_config``, ``dataset_streaming``. A name may also be a local file.
        mixture: ``datasets``, which replaces ``dataset_name``, ``streaming``, ``test_split_size``.

    Raises:
        ConfigError: a data set cannot be loaded, or settings contradict each other. The message names them.
    """
    found: Mapping[str, AnyDataset]
    if mixture.datasets:
        for entry in mixture.datasets:
            if (file := Path(entry.path).absolute()).is_file():
                entry.path, entry.data_files = str(file.parent), file.name
        whole = copy.copy(mixture)
        whole.test_split_size = None  # TRL's split has no seed, so each rank would have another
        found = _checked("datasets", get_dataset, whole)
    elif name := script.dataset_name:
        options: dict[str, Any] = {"path": name, "name": script.dataset_config}
        if (file := Path(name).absolute()).is_file():
            options = {"path": str(file.parent), "data_files": file.name}
        found = _checked(name, datasets.load_dataset, **options, streaming=script.dataset_streaming)
    else:
        raise ConfigError("dataset_name: is missing. Set it, or datasets.")
    train = found.get("train")
    if mixture.test_split_size is None or "test" in found or train is None:
        return found
    if isinstance(train, datasets.IterableDataset):
        raise ConfigError(
            "test_split_size: cannot split a streamed data set. Set dataset_test_split, or do not stream."
        )
    parts: Mapping[str, AnyDataset] = train.train_test_split(test_size=mixture.test_split_size, seed=0)
    return parts


def _checked(name_: str, read: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    try:
        return read(*args, **keywords)
    except ShardwiseError:
        raise
    except Exception as error:  # of datasets, pyarrow, the hub: any
        cause = error.__cause__ or error
        message = redacted(f"{name_}: cannot be loaded as a data set, {cause}", name_, {})
        raise ConfigError(f"{message}. Check the name and the rows.") from error


# Rows

_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
}
"""Roles of chat templates by ShareGPT's names."""


def as_messages(found: AnyDataset, *, num_proc: int | None) -> AnyDataset:
    """Convert rows of ShareGPT and Alpaca to ``messages``. Other data sets are returned unchanged."""
    names = set(get_dataset_column_names(found))
    is_foreign = "conversations" in names or {"instruction", "output"} <= names
    return _mapped(found, _converted, num_proc) if is_foreign else found


def with_masks(found: AnyDataset, tokenizer: PreTrainedTokenizerBase, *, num_proc: int | None) -> AnyDataset:
    """Tokenize chats to ``input_ids`` and ``assistant_masks``. See [Note: Assistant masks].

    Rows have ``messages``, or ``prompt`` and ``completion`` as messages, of which the completion is trained on.

    Raises:
        ConfigError: a chat cannot be used. The message has the number of the row.
    """
    return _mapped(found, partial(_tokenized, AssistantMasks(tokenizer)), num_proc)


Examples: TypeAlias = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""Makes one or more examples of a row."""


def _mapped(found: Any, examples_of: Examples, num_proc: int | None) -> AnyDataset:
    options: dict[str, Any] = {"num_proc": num_proc} if isinstance(found, datasets.Dataset) else {}
    mapped: AnyDataset = found.map(
        partial(_batch, examples_of),
        batched=True,
        with_indices=True,
        remove_columns=get_dataset_column_names(found),
        **options,
    )
    return mapped


def _batch(
    examples_of: Examples, batch: Mapping[str, Sequence[Any]], indices: Sequence[int]
) -> dict[str, list[Any]]:
    made: list[Mapping[str, Any]] = []
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        try:
            made += examples_of(dict(zip(batch, values, strict=True)))
        except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error) if isinstance(error, ConfigError) else repr(error)
            raise ConfigError(f"row {index + 1} of the data set: {reason}") from error
    return {name: [one.get(name) for one in made] for name in dict.fromkeys(key for one in made for key in one)}


def _converted(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [to_messages(row)]


def _tokenized(masks: AssistantMasks, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    chat = to_messages(row)
    if "messages" not in chat:
        context = [{**message, "weight": 0} for message in chat.get("prompt", ())]
        chat["messages"] = [*context, *chat.get("completion", ())]
    if not any(message["role"] == "assistant" for message in chat["messages"]):
        raise ConfigError("messages: none has the role 'assistant'. Add one, or remove the row.")
    return masks(chat["messages"], chat.get("tools"), chat.get("chat_template_kwargs"))


def to_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of ShareGPT or Alpaca to ``messages``, and parse ``tools`` in JSON.

    Null values at any depth are removed: Arrow fills the structs of a column with the keys of all of them.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the row is malformed.
    """
    found = dict(remove_none_values(row))
    if isinstance(found.get("tools"), str):
        found["tools"] = json.loads(found["tools"])
    if "conversations" in found:
        turns = [(turn["from"], turn["value"]) for turn in found.pop("conversations")]
    elif "instruction" in found and "messages" not in found:
        asked = "\n".join(filter(None, (found.pop("instruction"), found.pop("input", ""))))
        turns = [("human", asked), ("gpt", found.pop("output"))]
    else:
        return found
    if system := found.pop("system", ""):
        turns.insert(0, ("system", system))
    return {**found, "messages": [{"role": _ROLES[speaker], "content": content} for speaker, content in turns]}
