"""Prepares datasets for TRL: converts and checks rows, and tokenizes chats whose answers TRL cannot mask.

The rows themselves are those of ``training/chat_rows.py``.
"""

import copy
import hashlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Final
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets.features.features import register_feature
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.files.urls import redact
from shardwise.ranks.outcomes import Failure
from shardwise.ranks.world import World
from shardwise.training.arguments import SAMPLING, TrainMethod
from shardwise.training.chat_masks import AssistantMasks
from shardwise.training.chat_rendering import ChatError
from shardwise.training.chat_rows import (
    ALPACA_COLUMNS,
    SHAREGPT_COLUMNS,
    MalformedRowError,
    convert_turn,
    is_foreign,
    require_message,
    require_no_media_parts,
    require_turns,
    to_messages,
    without_nulls,
)
from shardwise.training.dataset_loading import AnyDataset

_CHAT_COLUMNS: Final = ("messages", "prompt", "completion", "chosen", "rejected")

_ANSWER_COLUMNS: Final = ("completion", "chosen", "rejected", "reference")

_TOKEN_PARTS: Final = ("prompt", "completion", "chosen", "rejected", "reference", "KL_completion")

_TOKEN_COLUMNS: Final = frozenset(
    {"input_ids", *(f"{part}_{kind}" for part in _TOKEN_PARTS for kind in ("ids", "input_ids"))}
)
"""Columns of tokens in the rows that TRL's trainers prepare."""


@dataclass
class ExactJson(datasets.Json):  # type: ignore[misc]
    """Values stored as JSON by the standard library, which keeps all digits.

    That of ``datasets`` rounds to 10 decimals, and reads no integers beyond 64 bits.
    """

    _type: str = field(default="ExactJson", init=False, repr=False)

    def encode_example(self, example_data: Any) -> str | None:
        """Return the JSON of a value. What JSON lacks, such as times, is text."""
        return None if example_data is None else json.dumps(example_data, default=str)

    def decode_example(self, example_data: str | None, token_per_repo_id: Any = None) -> Any:  # noqa: ARG002
        if example_data is None:
            return None
        value = json.loads(example_data)
        # Objects that datasets could not read have become JSON in a string, when it wrote them.
        if isinstance(value, str) and value.startswith(("{", "[")):
            return json.loads(value)
        return value

    def cast_storage(self, storage: pa.Array) -> pa.Array:
        if pa.types.is_string(storage.type):  # without a look at whether datasets can read it
            return self.pa_type.wrap_array(storage)
        return super().cast_storage(storage)


with warnings.catch_warnings(action="ignore", category=UserWarning):  # it is experimental
    register_feature(ExactJson, "ExactJson")


@contextmanager
def first_local_rank_first(local_rank: int) -> Iterator[None]:
    """Run the block on the first rank of each node, which fills its cache, and then on all others.

    Collective: yes, over the default process group.

    Raises:
        ConfigError: the same on every rank, if a text of a row is not UTF-8, which datasets sees when it is read.
        ShardwiseError: any other, the same on every rank.
    """
    with World.current(call="datasets") as world:
        # Two exchanges: all ranks but the first of a node wait in the first one, so the caches are filled when they
        # begin. Each has the outcomes of one half, so a failure in either half is raised on all ranks.
        if local_rank:
            world.all_gather_object(None)
        failure = None
        try:
            yield
        except UnicodeDecodeError as error:
            text = error.object[max(0, error.start - 20) : error.end + 20]
            fault = ConfigError(f"the dataset: a text is not UTF-8, {text!r}. Save the file that has it as UTF-8")
            failure = Failure.from_error(fault)
        except Exception as error:
            failure = Failure.from_error(error)
        if not local_rank:
            world.all_gather_object(failure)
        world.all_gather_object(failure)


@contextmanager
def preparing_together(
    trainer: type, local_rank: int, rows: Sequence[AnyDataset | None], method: TrainMethod, training: Any
) -> Iterator[None]:
    """Have a class of TRL prepare datasets within the block on the first rank of each node first.

    TRL does so, too, but has the other ranks wait for a first one that has failed. Collective: yes.

    Args:
        trainer: the class.
        local_rank: of this process on its node.
        rows: the datasets.
        method: of the class.
        training: its arguments.

    Raises:
        ConfigError: the same on every rank, if a row cannot be prepared. It names the row if that is malformed.
    """

    @contextmanager
    def first_rank_first() -> Iterator[None]:
        with first_local_rank_first(local_rank):
            try:
                yield
            except ShardwiseError:
                raise
            except Exception as error:  # of datasets, pyarrow, Jinja: any
                # Only after TRL has failed, because it is a pass over all rows.
                for dataset in rows:
                    # Rows with images are checked in image_rows.
                    if isinstance(dataset, datasets.Dataset) and find_image_column(dataset) is None:
                        _require_usable_rows(
                            dataset,
                            _text_columns(dataset, getattr(training, "dataset_text_field", "text")),
                            is_masked=getattr(training, "assistant_only_loss", False),
                            is_labeled=method == "kto" and "label" in get_column_names(dataset),
                        )
                why = redact(f"{type(error).__name__}: {error}", "", {})
                raise ConfigError(f"the dataset cannot be prepared, {why}. Check its rows") from error

    # Classes of methods that sample prepare no datasets, and their modules lack the name.
    module, name = sys.modules[trainer.__module__], "global_then_local_main_first"
    with ExitStack() as stack:
        if hasattr(module, name):
            stack.enter_context(mock.patch.object(module, name, first_rank_first))
        yield


def convert_to_messages(dataset: AnyDataset, method: TrainMethod, *, num_proc: int | None) -> AnyDataset:
    """Convert rows of ShareGPT, Alpaca and JSON to ``messages``, and null ``chat_template_kwargs`` to empty ones.

    A text ``system`` becomes the first of ``messages`` that have no system or developer message.

    Nulls that Arrow has added to tools and their calls are removed, except in streamed rows. Other datasets are
    returned unchanged.
    """
    names = get_column_names(dataset)
    # Also a text beside messages that becomes the first of them. All of a stream are not read for one.
    has_chats = is_foreign(names) or (
        "messages" in names
        and (method == "sft" or "prompt" not in names)
        and (
            isinstance(_first_row_with("messages", dataset).get("messages"), str)
            or (isinstance(dataset, datasets.IterableDataset) and "system" in names)
            or isinstance(_first_row_with("system", dataset).get("system"), str)
        )
    )
    widened = _find_widened_columns(dataset) if isinstance(dataset, datasets.Dataset) else []
    if not has_chats and "chat_template_kwargs" not in names:
        if not widened:
            return dataset
        as_json = dict.fromkeys(widened, datasets.List(ExactJson()))
        return _map_rows(dataset, partial(_remove_nulls, widened), num_proc, {**dataset.features, **as_json})
    features = None
    if isinstance(dataset, datasets.Dataset):
        used = SHAREGPT_COLUMNS if set(names) & {"conversations", "conversation"} else ALPACA_COLUMNS
        features = {name: dataset.features[name] for name in names if not has_chats or name not in used}
        # Of JSON: an Arrow struct gives each tool the parameters of all, and each batch has one of its own.
        features.update(dict.fromkeys(widened, datasets.List(ExactJson())))
        if has_chats or "messages" in names:
            features["messages"] = datasets.List(ExactJson())
        if "tools" in names:
            features["tools"] = datasets.List(ExactJson())
        if "chat_template_kwargs" in names:
            features["chat_template_kwargs"] = ExactJson()
    return _map_rows(dataset, _convert_row, num_proc, features)


def _convert_row(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    chat = to_messages(row)
    return [{"chat_template_kwargs": {}, **chat} if "chat_template_kwargs" in row else chat]


def _remove_nulls(columns: Sequence[str], row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [{**row, **{name: without_nulls(row[name]) for name in columns}}]


def _find_widened_columns(dataset: datasets.Dataset) -> list[str]:
    """Return the columns of tools, or of messages with calls, in which Arrow has added keys of other rows.

    Both columns of a pair if one has them.
    """
    widened, pair = [], []
    for name, feature in dataset.features.items():
        column, fields = dataset.data.column(name), getattr(feature, "feature", None)  # of each message or tool
        if name in ("chosen", "rejected") and isinstance(fields, dict):
            pair.append(name)
        if name in _CHAT_COLUMNS and isinstance(fields, dict) and "tool_calls" in fields:
            column = pc.struct_field(pc.list_flatten(column), "tool_calls")
        elif name != "tools":
            continue
        if _has_added_nulls(column):
            widened.append(name)
    # TRL takes the messages with which both begin for their prompt, so they have to stay equal.
    return widened if set(widened).isdisjoint(pair) else list(dict.fromkeys([*widened, *pair]))


def _has_added_nulls(values: Any) -> bool:
    """Return whether structs in lists of Arrow have nulls. A key that is null in all of them was not added."""
    if pa.types.is_struct(values.type):
        fields = [field for field in values.flatten() if not pa.types.is_null(field.type)]
        return any(field.null_count or _has_added_nulls(field) for field in fields)
    return pa.types.is_nested(values.type) and _has_added_nulls(pc.list_flatten(values))


def drop_other_chats(dataset: AnyDataset, method: TrainMethod) -> AnyDataset:
    """Remove columns that TRL would take for a part of the chats that a method trains on.

    These are texts beside the whole chat (ultrachat_200k, ultrafeedback_binarized), a prompt without a completion
    beside ``messages``, and ``messages`` beside pairs or completions. Methods that sample keep all, for rewards.
    Messages that wait for the answers beside them are their ``prompt``.
    """
    if method in SAMPLING:
        return dataset
    names = get_column_names(dataset)
    dropped = []
    if method != "sft" and "messages" in names and not {"chosen", "completion"}.isdisjoint(names):
        if "prompt" not in names and _has_prompt_in_messages(dataset):
            return dataset.rename_column("messages", "prompt")
        dropped.append("messages")
    chats = "messages" if method == "sft" else "chosen"
    first = _first_row_with(chats, dataset)
    messages = first.get(chats)
    opening = messages[0] if isinstance(messages, list) and messages else None
    # An answer alone needs its prompt.
    if isinstance(opening, Mapping) and opening.get("role") != "assistant":
        is_prompt_alone = method == "sft" and "completion" not in names
        for name in ("prompt", "completion"):
            # By the column, too: in a mixture the text may be null in this row.
            feature = (dataset.features or {}).get(name)
            is_text = isinstance(feature, datasets.Value) or isinstance(first.get(name), str)
            if name in names and (is_text or is_prompt_alone):
                dropped.append(name)
    return dataset.remove_columns(dropped) if dropped else dataset


def _has_prompt_in_messages(dataset: AnyDataset) -> bool:
    """Return whether messages end before an answer, and the answers beside them do not begin with messages."""
    first = _first_row_with("messages", dataset)
    messages, answer = first.get("messages"), first.get("chosen", first.get("completion"))
    last = messages[-1] if isinstance(messages, list) and messages else None
    opening = answer[0] if isinstance(answer, list) and answer else None
    is_whole = isinstance(opening, Mapping) and opening.get("role") != "assistant"
    return isinstance(last, Mapping) and last.get("role") != "assistant" and not is_whole


def convert_answers(dataset: AnyDataset, *, num_proc: int | None) -> AnyDataset:
    """Make messages of answers that are text, or one turn, to a prompt of messages. Others are returned unchanged.

    Raises:
        ConfigError: naming the row whose answer is malformed.
    """
    first = _first_row_with("prompt", dataset)
    answers = [name for name in _ANSWER_COLUMNS if isinstance(first.get(name), str | Mapping)]
    if not answers or not isinstance(first["prompt"], list):
        return dataset
    features = None
    if isinstance(dataset, datasets.Dataset):
        features = {**dataset.features, **dict.fromkeys(answers, datasets.List(ExactJson()))}
    return _map_rows(dataset, partial(_convert_answers, answers), num_proc, features)


def _convert_answers(columns: Sequence[str], row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    chat = dict(row)
    for name in columns:
        if isinstance(answer := row[name], str):
            chat[name] = [{"role": "assistant", "content": answer}]
        elif isinstance(answer, Mapping):
            chat[name] = [convert_turn(without_nulls(answer), name)]
    return [chat]


def require_columns(dataset: AnyDataset, method: TrainMethod, text_field: str) -> None:
    """Check that rows have the columns that a method trains on, which does not sample, or tokens.

    Raises:
        ConfigError: they have not.
    """
    layouts: list[tuple[str, ...]] = [("chosen", "rejected")]
    if method == "sft":
        layouts = [("messages",), ("prompt", "completion"), (text_field,)]
    elif method == "kto":
        layouts.insert(0, ("prompt", "completion", "label"))
    elif method == "tpo":
        layouts = [("chosen", "rejected", "reference")]
    names = get_column_names(dataset)
    if _TOKEN_COLUMNS.isdisjoint(names) and not any(set(names).issuperset(layout) for layout in layouts):
        raise ConfigError(
            f"the dataset: has the columns {', '.join(names)}, and {method} needs "
            f"{', or '.join(' and '.join(layout) for layout in layouts)}. Rename them"
        )


def require_prompts(dataset: AnyDataset, method: TrainMethod) -> None:
    """Check that pairs without a ``prompt`` begin alike, as TRL takes what they share for it.

    The first ten rows are read, because texts without a prompt begin alike by chance.

    Raises:
        ConfigError: naming a row of these whose answers do not.
    """
    names = get_column_names(dataset)
    if method in ("sft", "reward", *SAMPLING) or "prompt" in names or not {"chosen", "rejected"} <= {*names}:
        return
    for index, row in enumerate(islice(without_decoding(dataset), 10)):
        with naming_row(index):
            answers = [row[name] for name in ("chosen", "rejected")]
            first, other = [answer[:1] if isinstance(answer, str | list) else answer for answer in answers]
            if first and other and first != other:
                raise MalformedRowError(
                    "prompt: is missing, and chosen and rejected do not begin alike. Write prompt, or set "
                    "dataset_prompt_column"
                )


def _first_row_with(column: str, dataset: AnyDataset) -> Mapping[str, Any]:
    """Return the first row that has a value in a column, as not all rows of a mixture do, or an empty one."""
    if column not in get_column_names(dataset):
        return {}
    if isinstance(dataset, datasets.Dataset):
        # By Arrow, without decoding rows, of which a mixture may begin with many others.
        batches = dataset.select_columns([column]).with_format("arrow").iter(batch_size=1000)
        without = takewhile(lambda batch: batch[column].null_count == len(batch), batches)
        skipped = sum(map(len, without))
        if skipped == len(dataset):
            return {}
        dataset = dataset.skip(skipped)
    return next((row for row in without_decoding(dataset) if row.get(column) is not None), {})


def add_system_prompt(
    dataset: AnyDataset, system_prompt: str | None, prompt_column: str | None, *, num_proc: int | None
) -> AnyDataset:
    """Make messages of a column of prompts, and put the system prompt before chats that begin without one.

    Raises:
        ConfigError: a row has no chat.
    """
    if system_prompt is None and prompt_column is None:
        return dataset
    return _map_rows(dataset, partial(_add_system_prompt, system_prompt, prompt_column), num_proc)


def _add_system_prompt(
    system_prompt: str | None, prompt_column: str | None, row: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    chat = dict(row)
    if prompt_column is not None:
        if not isinstance(chat.get(prompt_column), str):
            raise MalformedRowError(
                f"{prompt_column}: is not text. Set dataset_prompt_column to a column of prompts"
            )
        chat["prompt"] = [{"role": "user", "content": chat.pop(prompt_column)}]
    # The first that is there: a completion follows its prompt, and a pair without one begins each of its answers.
    columns = next((one for one in (["prompt"], ["messages"], ["chosen", "rejected"]) if one[0] in chat), [])
    if not columns:
        raise MalformedRowError("has no messages, prompt or chosen for system_prompt. Remove that key")
    if system_prompt is None:
        return [chat]
    for column in columns:
        if isinstance(chat[column], str):
            raise MalformedRowError(f"{column}: is text, which has no system message. Set dataset_prompt_column")
        messages = require_turns(column, chat[column])
        if messages[0].get("role") not in ("system", "developer"):
            content: Any = system_prompt
            if any(isinstance(message.get("content"), list) for message in messages):  # a column has one type
                content = [{"type": "text", "text": system_prompt}]
            chat[column] = [{"role": "system", "content": content}, *messages]
    return [chat]


def tokenize_with_masks(
    dataset: AnyDataset, tokenizer: PreTrainedTokenizerBase, *, completion_only: bool = True, num_proc: int | None
) -> AnyDataset:
    """Tokenize chats to ``input_ids`` and ``assistant_masks``.

    See [Note: Assistant masks] in ``training/chat_masks.py``.

    Rows have ``messages``, or ``prompt`` and ``completion`` as messages. Answers in a prompt are not trained on if
    ``completion_only``.

    Raises:
        ConfigError: naming the row whose chat cannot be used.
    """
    of_prompt = {"weight": 0} if completion_only else {}
    return _map_rows(dataset, partial(_tokenize, AssistantMasks(tokenizer), of_prompt), num_proc)


def check_when_read(
    dataset: AnyDataset, text_field: str, method: TrainMethod, *, num_proc: int | None
) -> AnyDataset:
    """Have a streamed dataset name a malformed row when it is read. Others are returned unchanged, after a search.

    Prompts of methods that sample are searched for a malformed row, because TRL reads them only when it trains.
    Other rows are searched for one only if TRL fails (``preparing_together``), and here for images inside of
    messages, which TRL would leave out. That search is cached.

    Raises:
        ConfigError: naming the first such row.
    """
    columns = ["prompt"] if method in SAMPLING else _text_columns(dataset, text_field)
    if "prompt" in columns and "prompt" not in get_column_names(dataset):
        raise ConfigError("prompt: is no column of the dataset. Set dataset_prompt_column to a column of prompts")
    if isinstance(dataset, datasets.Dataset):
        if method in SAMPLING:
            _require_usable_rows(dataset, columns)
        else:
            if searched := [name for name in columns if not _is_text(dataset.features[name])]:
                # A filter that keeps all rows, because datasets caches filters.
                is_usable = partial(_require_no_media, _digest_code(), searched)
                dataset.select_columns(searched).filter(is_usable, with_indices=True, num_proc=num_proc)
        return dataset
    check = partial(_require_usable, columns)
    checked: AnyDataset = dataset.map(check, with_indices=True, features=dataset.features)
    return checked


def _is_text(feature: Any) -> bool:
    """Return whether a column has text, or messages whose contents are text."""
    fields = getattr(feature, "feature", None)  # of each message
    return isinstance(fields.get("content") if isinstance(fields, dict) else feature, datasets.Value)


def _require_no_media(
    digest: str,  # noqa: ARG001
    columns: Sequence[str],
    row: Mapping[str, Any],
    index: int,
) -> bool:
    with naming_row(index):
        for name in columns:
            for number, message in enumerate(row[name] if isinstance(row[name], list) else ()):
                if isinstance(message, Mapping):
                    require_no_media_parts(message.get("content"), f"{name}[{number}]")
    return True


def _require_usable_rows(
    dataset: datasets.Dataset, columns: Sequence[str], *, is_masked: bool = False, is_labeled: bool = False
) -> None:
    for index, row in enumerate(dataset.select_columns([*columns, *(["label"] if is_labeled else [])])):
        _require_usable(columns, row, index)
        with naming_row(index):
            chats = [row[name] for name in columns if isinstance(row[name], list)]
            if is_masked and chats:
                _require_answer([message for chat in chats for message in chat])
            if is_labeled and not isinstance(label := row["label"], bool | int | float):
                kind = "null" if label is None else type(label).__name__
                raise MalformedRowError(f"label: is {kind}, not a boolean. Write true or false")


def _require_answer(messages: Sequence[Mapping[str, Any]]) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        raise MalformedRowError("messages: none has the role 'assistant'. Add one, or remove the row")


def _text_columns(dataset: AnyDataset, text_field: str) -> list[str]:
    """Return the columns with text or messages that the first row has, or all if it has none."""
    first: Mapping[str, Any] = next(iter(dataset))
    names = [text_field, *_CHAT_COLUMNS]
    columns = [name for name in names if name in first]
    return [name for name in columns if first[name] is not None] or columns


def _require_usable(columns: Sequence[str], row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return a row with text, or messages with text, in these columns.

    Raises:
        ConfigError: naming the row and the column.
    """
    with naming_row(index):
        for name in columns:
            value = row[name]
            if value is None:
                raise MalformedRowError(f"{name}: is null. Write text, or remove the row")
            if isinstance(value, str):
                continue
            if name not in _CHAT_COLUMNS:
                raise MalformedRowError(f"{name}: is {type(value).__name__}, not text. Write text")
            for number, message in enumerate(require_turns(name, value)):
                require_message(message, f"{name}[{number}]")
                if message.get("content") is None and not message.get("tool_calls"):
                    raise MalformedRowError(f"{name}[{number}].content: is null. Write text, or remove the row")
    return row


def require_trainable_rows(dataset: AnyDataset, split: str, max_length: int | None) -> None:
    """Check that a prepared dataset has rows. TRL drops rows without a token to train on after truncation.

    Raises:
        ConfigError: there are none.
    """
    if next(iter(dataset), None) is None:
        if max_length is None:
            raise ConfigError(f"{split}: no row has a token to train on. Check its rows")
        raise ConfigError(
            f"max_length: {max_length} leaves no row of {split} with a token to train on. Raise it, or shorten the "
            "prompts"
        )


def require_embedded_tokens(dataset: AnyDataset, processor: Any, model: Any) -> AnyDataset:
    """Check that all tokens of a prepared dataset have embeddings. A streamed one is checked when it is read.

    Raises:
        ConfigError: naming a word of the tokenizer that has none.
    """
    tokenizer = get_tokenizer(processor)
    num_embeddings = int(model.get_input_embeddings().weight.shape[0])
    # Words of the tokenizer whose ids are beyond the last embedding.
    words = {token: word for word, token in tokenizer.get_vocab().items() if token >= num_embeddings}
    columns = [name for name in get_column_names(dataset) if name in _TOKEN_COLUMNS]
    if not words or not columns:  # most tokenizers have no such words: then rows are not read
        return dataset
    if isinstance(dataset, datasets.IterableDataset):
        checked: AnyDataset = dataset.map(partial(_require_embedded, words, columns, num_embeddings))
        return checked
    for batch in dataset.select_columns(columns).iter(1000):
        # By column, the highest id of each row.
        highest = {name: [max(ids, default=0) for ids in batch[name]] for name in columns}
        _require_embedded(words, columns, num_embeddings, highest)
    return dataset


def _require_embedded(
    words: Mapping[int, str], columns: Sequence[str], num_embeddings: int, row: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Check the tokens of one row, or the highest token of each of several."""
    token = max(max(row[name], default=0) for name in columns)
    if token >= num_embeddings:
        raise ConfigError(
            f"the dataset, or its chat template, uses {words.get(token)!r}. The tokenizer gives it the id {token}, "
            f"and the model has embeddings for 0 to {num_embeddings - 1}. Use the tokenizer of the model, or save "
            "the model with its vocabulary resized (resize_vocab)"
        )
    return row


def needs_masks(dataset: AnyDataset) -> bool:
    """Return whether TRL cannot mask rows: for a "weight" of a message, or tool calls that templates may omit.

    True for a streamed dataset, because its rows are not known in advance.

    Raises:
        ConfigError: naming a row that is malformed.
    """
    if isinstance(dataset, datasets.IterableDataset):
        return True
    for index, row in enumerate(dataset):
        with naming_row(index):
            chat = to_messages(row)
            for key in ("messages", "prompt", "completion"):
                messages = require_turns(key, chat[key]) if key in chat else []
                if any("weight" in message or message.get("tool_calls") for message in messages):
                    return True
    return False


@contextmanager
def naming_row(index: int) -> Iterator[None]:
    """Name the row in errors of the block."""
    try:
        yield
    except (MalformedRowError, ChatError) as error:
        raise ConfigError(f"row {index + 1} of the dataset: {error}") from error


def get_tokenizer(processor: Any) -> Any:
    """Return the tokenizer of a processor, or the tokenizer itself. Some have an attribute ``tokenizer``, too."""
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def get_column_names(dataset: AnyDataset) -> list[str]:
    """Return the names of the columns of a dataset, which may be streamed."""
    return list(dataset.column_names or next(iter(dataset), ()))


def find_image_column(dataset: AnyDataset) -> str | None:
    """Return the column of images that TRL reads, or None for rows of text."""
    return next((name for name in ("image", "images") if name in get_column_names(dataset)), None)


def without_decoding(dataset: AnyDataset) -> AnyDataset:
    """Return rows with images as they are stored: a path, or a mapping of ``path`` and ``bytes``."""
    column = find_image_column(dataset)
    if column is None or (isinstance(dataset, datasets.Dataset) and not len(dataset)):
        return dataset
    rows = dataset.to_iterable_dataset() if isinstance(dataset, datasets.Dataset) else dataset
    features = copy.deepcopy(rows.features or {})  # cast_column would change those of the dataset
    if isinstance(features.get(column), datasets.Image):
        features[column] = datasets.Image(decode=False)
    elif isinstance(getattr(features.get(column), "feature", None), datasets.Image):
        features[column] = datasets.List(datasets.Image(decode=False))
    # Not rows.decode(False), which leaves columns of JSON as text, too.
    return rows.cast(features) if features else rows


def _map_rows(
    dataset: Any,
    make_examples: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    num_proc: int | None,
    features: Mapping[str, Any] | None = None,
) -> AnyDataset:
    """Replace each row by its one or more examples. A row with stored images has one.

    Args:
        dataset: the rows.
        make_examples: returns the examples of a row.
        num_proc: number of processes.
        features: all columns of the examples, by default those of the first ones.
    """
    options: dict[str, Any] = {}
    as_json = datasets.Features()
    if isinstance(dataset, datasets.Dataset):
        options["num_proc"] = num_proc
        for name, feature in (features or dataset.features).items():
            if isinstance(getattr(feature, "feature", feature), ExactJson):
                as_json[name] = feature
        # Apart: as values of the new rows, images would be decoded and compressed again.
        if column := find_image_column(dataset):
            others = {name: feature for name, feature in (features or {}).items() if name != column}
            texts = _map_rows(dataset.remove_columns(column), make_examples, num_proc, others)
            return datasets.concatenate_datasets([texts, dataset.select_columns(column)], axis=1)
        options["features"] = datasets.Features(features) if features else None
    else:  # a batch of a stream would join rows of two datasets, which may have other columns
        options["batch_size"] = 1
    mapped: AnyDataset = dataset.map(
        partial(_make_batch, _digest_code(), tuple(features or ()), as_json, make_examples),
        batched=True,
        with_indices=True,
        remove_columns=get_column_names(dataset),
        **options,
    )
    return mapped


@cache
def _digest_code() -> str:
    """Return a digest of the code that makes and searches examples."""
    digest = hashlib.sha256()
    for name in ("dataset_preparation", "chat_rows", "chat_masks", "chat_rendering", "chat_checks"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


def _make_batch(
    digest: str,  # noqa: ARG001
    names: Sequence[str],
    as_json: datasets.Features,
    make_examples: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
) -> dict[str, list[Any]]:
    # The digest is for the cache of datasets, which knows a function by its name only.
    # From columns to rows, and back. A column that an example lacks is null there.
    examples: list[Mapping[str, Any]] = []
    for index, values in zip(indices, zip(*batch.values(), strict=True), strict=True):
        with naming_row(index):
            examples += make_examples(dict(zip(batch, values, strict=True)))
    # In order, each once.
    columns = names or dict.fromkeys(name for example in examples for name in example)
    written = {name: [example.get(name) for example in examples] for name in columns}
    # Here, because datasets would write these columns as JSON of its own.
    encoded = {name: feature for name, feature in as_json.items() if name in written}
    written |= datasets.Features(encoded).encode_batch({name: written[name] for name in encoded})
    return written


def _tokenize(
    masks: AssistantMasks, of_prompt: Mapping[str, int], row: Mapping[str, Any]
) -> Sequence[Mapping[str, Any]]:
    chat = {"messages": [], **to_messages(row)}
    if "prompt" in chat:
        context = [{**message, **of_prompt} for message in require_turns("prompt", chat["prompt"])]
        chat["messages"] = [*context, *require_turns("completion", chat.get("completion"))]
    if not isinstance(chat.get("chat_template_kwargs") or {}, Mapping):
        raise MalformedRowError("chat_template_kwargs: is not a mapping. Write {NAME: VALUE, ...}")
    for index, message in enumerate(chat["messages"]):
        require_message(message, f"messages[{index}]")
    _require_answer(chat["messages"])
    return masks(chat["messages"], chat.get("tools"), chat.get("chat_template_kwargs"))
