"""What a checkpoint offers for each tensor of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.conversion.expression import Expression


@dataclass(frozen=True, slots=True)
class Bindings:
    """The outcome of applying renames and conversions to the keys of a checkpoint.

    ``offers`` has, for a name of the model, every expression that claims to be it (more than one is a fault that
    a plan reports). ``unmatched`` maps the keys that lead to nothing the model has to the name they were given.
    ``leaders`` names, for a tensor made by a conversion, the first tensor that the conversion makes (transformers
    chooses the dtype of all by it). ``faults`` are conversions that could not be understood: a sentence for each,
    with the names that it leaves without a value. ``strays`` are expressions of what is unmatched, by the name it
    was given: the model may come to have it.
    """

    offers: Mapping[str, tuple[Expression, ...]]
    leaders: Mapping[str, str] = field(default_factory=dict)
    unmatched: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strays: Mapping[str, Expression] = field(default_factory=dict)
