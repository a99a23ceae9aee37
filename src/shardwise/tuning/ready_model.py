"""A model that has been made ready to be trained, on meta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from shardwise.conversion import Bindings
from shardwise.models.additions import Additions


@dataclass(frozen=True)
class Tuned:
    """A model on meta that is ready to be sharded, and what is known of how it will be filled.

    Attributes:
        model: what the user gets; PEFT's model, where there is an adapter.
        base: the model of transformers, to which ``fully_shard`` is applied.
        bindings: what the checkpoint offers, under the names that tensors have in ``model``.
        additions: what was put in.
        stays_whole: names of parameters that are to stay whole on every rank, with the reason.
        whole: these parameters themselves, once their dtypes are settled.
        notes: sentences for the report.
    """

    model: nn.Module
    base: PreTrainedModel
    bindings: Bindings
    additions: Additions = field(default_factory=Additions)
    stays_whole: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[nn.Parameter, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
