"""What a tuning has put into a model on meta, and how that begins: plain facts for whoever plans and fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from shardwise.models.vocabulary import Drawn, NewRows


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
