"""Rows with images, which TRL's collators tokenize when a batch is made.

They are checked before the model is loaded, because a row that fails in the collator fails in the middle of a
training, on one rank. The messages are paired with their images and rendered by the functions that the collators
call. Of each image only the header is read. What is wrong with the rest is found when the row is trained on.
"""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import datasets
import jinja2
import torch
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin, TrainerCallback
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages

from shardwise.core.errors import ConfigError
from shardwise.files.urls import redact, without_secrets
from shardwise.ranks.world import World
from shardwise.training.chat_rows import MalformedRowError
from shardwise.training.dataset_loading import AnyDataset
from shardwise.training.dataset_preparation import naming_row, without_decoding


def require_processor(column: str, method: str, processor: Any) -> None:
    """Check that rows with images can be trained on by a method, with the processor of the model.

    Raises:
        ConfigError: they cannot.
    """
    if method not in ("sft", "dpo"):
        raise ConfigError(f"{column}: images are trained on by sft and dpo, not by {method}. Remove the column")
    if not isinstance(processor, ProcessorMixin) or getattr(processor, "image_processor", None) is None:
        raise ConfigError(
            f"{column}: the model has no processor for images (preprocessor_config.json). Use a vision-language "
            "model, or remove the column"
        )


ROW = "row_index"
"""Column of :class:`ImageRows` with the index of a row."""


class ImageRowCheck:
    """A check of one row with images.

    Args:
        arguments: the configuration, as parsed by TRL.
        processor: of the model.
        column: the column of images.
    """

    def __init__(self, arguments: Any, processor: Any, column: str) -> None:
        self._processor = processor
        self._column = column
        self._is_dpo = arguments.own.method == "dpo"
        self._not_rendered = ["tools"] if self._is_dpo else ["tools", "chat_template_kwargs"]
        self._has_masks = bool(getattr(arguments.training, "assistant_only_loss", False))

    def __call__(self, row: Mapping[str, Any], index: int) -> Mapping[str, Any]:
        """Return a row that can be trained on.

        Raises:
            ConfigError: naming the row.
        """
        with naming_row(index):
            images = row.get(self._column)
            if self._column == "image" and images is not None:
                images = [images]
            # Ranks gather the weights of the vision tower together, so that none may have a batch without images.
            if not images:
                raise MalformedRowError(
                    f"{self._column}: has no image. Add one, or train on rows of text in a dataset of their own"
                )
            for number, image in enumerate(images):
                name = self._column if self._column == "image" else f"{self._column}[{number}]"
                _require_image(image, name)
            for name in self._not_rendered:
                if row.get(name):
                    raise MalformedRowError(f"{name}: TRL does not render it beside images. Remove it")
            self._require_placeholders(row, len(images))
        return row

    def _require_placeholders(self, row: Mapping[str, Any], num_images: int) -> None:
        """Check that the text of a row, as the chat template renders it, has a place for each image."""
        from PIL import Image

        if self._is_dpo:
            names = ["prompt", "chosen", "rejected"]
        else:
            names = ["messages"] if "messages" in row else ["prompt", "completion"]
        example: dict[str, Any] = {name: row.get(name) for name in names}
        if missing := [name for name, value in example.items() if not value]:
            raise MalformedRowError(f"{missing[0]}: is missing or empty. Write {', '.join(names)}")
        # Only the number of images matters here, so small ones stand in for them.
        stand_ins = [Image.new("RGB", (1, 1))] * num_images
        try:
            if self._has_masks and any(message.get("weight") is not None for message in example["messages"]):
                raise MalformedRowError(
                    "messages: have a weight, which TRL does not honor beside images. Remove it"
                )
            if is_conversational(example):
                paired = {
                    name: prepare_multimodal_messages(messages, stand_ins if name == names[0] else None)
                    for name, messages in example.items()
                }
                example = apply_chat_template(paired, self._processor)
            # Images are in the prompt, or in the only text. Answers have none.
            with_images = example.pop("prompt", None) or example.popitem()[1]
            self._processor.validate_inputs(images=[stand_ins], text=[with_images])
            if example:
                self._processor.validate_inputs(text=list(example.values()))
        except MalformedRowError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, jinja2.TemplateError) as error:
            why = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
            raise MalformedRowError(
                f"{names[0]}: does not fit {num_images} image{'s' * (num_images != 1)}. {why} Correct the row"
            ) from error


def _require_image(image: Any, name: str) -> None:
    """Check that a stored image is one: an image, a file, its bytes or a URL. URLs are not read.

    Raises:
        MalformedRowError: it is not.
    """
    from PIL import Image
    from transformers.image_utils import load_image

    source = image
    if isinstance(image, Mapping):  # as datasets store images
        source = image.get("path") if image.get("bytes") is None else io.BytesIO(image["bytes"])
    if isinstance(source, Image.Image) or (isinstance(source, str) and source.startswith(("http://", "https://"))):
        return
    # For messages: a path may be long, and a URL may have credentials.
    shown = without_secrets(source) if isinstance(source, str) else "its content"
    shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
    try:
        if isinstance(source, str) and not os.path.isfile(source):
            with suppress(Exception):  # base64
                load_image(source)
                return
            raise MalformedRowError(f"{name}: {shown} is not a file. Check the path")
        # This reads the header only.
        with Image.open(source):
            return
    except MalformedRowError:
        raise
    except Exception as error:  # of Pillow and its plugins: any
        raise MalformedRowError(f"{name}: {shown} is not an image that can be read, {error}. Replace it") from error


def require_usable(dataset: AnyDataset | None, check: ImageRowCheck) -> None:
    """Check all rows, of which each rank reads a share. A streamed dataset is checked as it is read.

    Collective: yes.

    Raises:
        ConfigError: naming the first row that cannot be trained on. The same on every rank.
    """
    if not isinstance(dataset, datasets.Dataset):
        return
    with World.current(call="train") as world:
        with world.all_gather("check the rows with images") as exchange:
            # Each rank stops at its first fault. The first of all rows is the first of these.
            share = range(world.rank, len(dataset), world.size)
            exchange.local = _find_fault(dataset, share, check, world)
        faults: list[tuple[int, str]] = [fault for fault in exchange.result if fault is not None]
    if faults:
        raise ConfigError(min(faults)[1])


def _find_fault(
    dataset: datasets.Dataset, indices: Sequence[int], check: ImageRowCheck, world: World
) -> tuple[int, str] | None:
    """Return the index and the fault of the first of these rows that cannot be trained on, or None."""
    for index, row in zip(indices, without_decoding(dataset.select(indices)), strict=True):
        world.check()
        try:
            check(row, index)
        except ConfigError as error:
            return index, str(error)
    return None


def check_when_read(dataset: AnyDataset, check: ImageRowCheck) -> AnyDataset:
    """Have a streamed dataset check its rows when they are read. Others are returned unchanged."""
    if isinstance(dataset, datasets.Dataset):
        return dataset
    checked: datasets.IterableDataset = without_decoding(dataset).map(check, with_indices=True)
    return checked.cast(dataset.features) if dataset.features else checked


class ImageRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows whose images are read with them, as the processor would read them: an error names the row.

    Args:
        dataset: the rows.
        column: of images.
        processor: of the model.
    """

    def __init__(self, dataset: datasets.Dataset, column: str, processor: Any) -> None:
        self._dataset = dataset
        self._column = column
        self._read = processor.image_processor.fetch_images

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row.

        Raises:
            ConfigError: an image cannot be read.
        """
        with naming_row(index):
            try:
                row: dict[str, Any] = self._dataset[index]  # which decodes stored images
                row[self._column] = self._read(row[self._column])  # files and URLs, one or a list
            except Exception as error:  # of Pillow and its plugins, of the network: any
                why = redact(f"{type(error).__name__}: {error}", "", {})
                raise MalformedRowError(f"{self._column}: cannot be read, {why}. Replace it") from error
        return {**row, ROW: index}


class ImageCollator:
    """TRL's collator, of rows of :class:`ImageRows`: an error names the row.

    Args:
        collator: of a trainer of TRL.
        max_length: of the training, in tokens.
    """

    def __init__(self, collator: Any, max_length: int) -> None:
        self._collator = collator
        self._max_length = max_length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return a batch.

        Raises:
            ConfigError: a row cannot be in one, such as one whose images are cut to ``max_length``.
        """
        try:
            return self._collator([{**row} for row in rows])  # copies, because TRL writes into them
        except ValueError:
            for row in rows:
                with naming_row(row[ROW]):
                    self._require_usable(row)
            raise

    def _require_usable(self, row: Mapping[str, Any]) -> None:
        try:
            self._collator([{**row}])
        except ValueError as error:
            limit = f"max_length: {self._max_length} may be less than its images and text need"
            raise MalformedRowError(f"{limit}, {error} Raise it, or use fewer or smaller images") from error


class TowerCallback(TrainerCallback):
    """Ends gradients at the text and at trained parameters, so that none run through a frozen vision tower.

    With activation checkpointing, TRL and transformers have the output of every embedding require gradients, also
    that of a tower's patches. Then a frozen tower would keep its activations, and compute gradients that nothing
    uses. Only reentrant checkpoints need them.

    Args:
        model: the model of a trainer that has been made.
        is_reentrant: whether checkpoints are reentrant.
    """

    def __init__(self, model: PreTrainedModel, *, is_reentrant: bool) -> None:
        self._is_reentrant = is_reentrant
        if not is_reentrant:
            model.disable_input_require_grads()  # of TRL, whose handles are lost when transformers adds its own

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Remove the hooks that transformers has added, except for that of the text."""
        if args.gradient_checkpointing and not self._is_reentrant:
            model: PreTrainedModel = kwargs["model"]
            model.disable_input_require_grads()
            embeddings: nn.Module = model.get_input_embeddings()
            embeddings.register_forward_hook(_require_gradients)


def _require_gradients(module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG001
    output.requires_grad_()
