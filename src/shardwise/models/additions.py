"""What has been put into a model on meta, by a tuning or as tokens of a vocabulary, and how that begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import nn
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


@dataclass(frozen=True, slots=True)
class RowNorms:
    """A vector that begins as the norm of each row of a matrix (the magnitude of DoRA).

    ``of`` maps some whole rows to their values; any rows give what all of them would give there.
    """

    matrix: str
    of: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class DrawnWhole:
    """A tensor that begins as ``draw`` returns it, whole, with torch's random state seeded from (seed, ``layer``).

    Tensors of one layer that depend on each other see the same random numbers.
    """

    layer: str
    draw: Callable[[], torch.Tensor]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Additions:
    """What was added to a model; by default nothing.

    Attributes:
        base: the model of transformers inside, whose class's rules count; None for the model itself.
        known_as: names in the model to those in the base, by which users and the base's class know the tensors. A
            copy is known as what it is a copy of. What was added has no such name.
        initialised: names of what ``initialise`` writes.
        initialise: runs the initialisers of what was added, on whatever tensors are in its place.
        copies: names of parameters that begin with the values of others, to the others' names.
        norms: names of vectors that begin as the norms of a matrix' rows.
        drawn_whole: names of tensors whose first values are no matter of single elements.
        new_rows: how rows begin that the checkpoint lacks, of tensors of which it has the others.
        nested: names of what scales of weights in four bits become, once these have been read whole.
    """

    base: nn.Module | None = None
    known_as: Mapping[str, str] = field(default_factory=dict)
    initialised: frozenset[str] = frozenset()
    initialise: Callable[[], None] = _nothing
    copies: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, RowNorms] = field(default_factory=dict)
    drawn_whole: Mapping[str, DrawnWhole] = field(default_factory=dict)
    new_rows: NewRows = field(default_factory=Drawn)
    nested: frozenset[str] = frozenset()

    @property
    def begun(self) -> frozenset[str]:
        """Names of the tensors whose values come from the tuning, rather than from a checkpoint or the base."""
        return self.initialised.union(self.norms, self.drawn_whole, self.nested)

    def begun_elsewhere(self) -> Additions:
        """The same, where all values of what was added come from a checkpoint."""
        return replace(self, initialised=frozenset(), norms={}, drawn_whole={})


NOTHING_ADDED = Additions()
