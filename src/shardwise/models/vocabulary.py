"""A vocabulary of another size than the checkpoint's: tokens that were added, or taken away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from shardwise.conversion import Bindings, Expression, Hole, concat, slice_dim
from shardwise.errors import ConfigError
from shardwise.models.view import Held


@dataclass(frozen=True, slots=True)
class Drawn:
    """New rows are drawn as the model's class initialises such a tensor, from (seed, FQN)."""


@dataclass(frozen=True, slots=True)
class MeanOfRows:
    """Every new row is the mean of the stored ones, so that a new token begins as an average one."""


NewRows: TypeAlias = Drawn | MeanOfRows


@dataclass(frozen=True, slots=True)
class ResizeVocab:
    """The number of tokens a model is to have, and how those that the checkpoint lacks begin."""

    size: int
    rows: NewRows = field(default_factory=Drawn)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"resize_vocab={self.size}: a vocabulary has at least one token")


def set_vocab_size(config: PreTrainedConfig, size: int) -> None:
    """Have a model of this config built with so many tokens.

    Raises:
        ConfigError: the config has no vocabulary.
    """
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"{type(config).__name__} has no vocab_size; leave out resize_vocab")
    text.vocab_size = size
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = size


def vocabulary_tensors(model: PreTrainedModel, held: list[Held]) -> set[str]:
    """Names of what has a row for each token: the embedding of the input, the head, and the head's bias.

    Raises:
        ConfigError: the model's class does not tell its embedding.
    """
    try:
        modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError as error:
        raise ConfigError(f"{type(model).__name__} has no embedding of tokens; leave out resize_vocab") from error
    own = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    return {name for item in held if id(item.tensor) in own for name in item.names}


def resized(bindings: Bindings, names: set[str], size: int) -> Bindings:
    """The bindings of a model with ``size`` tokens: rows are left away, or left to be filled."""

    def fitted(expression: Expression) -> Expression:
        rows = expression.shape[0]
        if rows >= size:
            return slice_dim(expression, 0, 0, size)
        return concat([expression, Hole((size - rows, *expression.shape[1:]), expression.dtype)], 0)

    offers: Mapping[str, tuple[Expression, ...]] = {
        name: tuple(map(fitted, found)) if name in names else found for name, found in bindings.offers.items()
    }
    return replace(bindings, offers=offers)
