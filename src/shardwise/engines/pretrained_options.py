"""What a model that is brought up may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from shardwise.engines.load_options import LoadOptions
from shardwise.engines.tuning_arguments import TunedOptions
from shardwise.models.initialize import BufferRules
from shardwise.models.wrapping.wrap import Sharding
from shardwise.planning.loads.load_plan import Consent, OnMissing, OnUnexpected, Refuse


@dataclass(frozen=True, slots=True)
class FromFiles:
    """The weights are read from the files of the model."""


@dataclass(frozen=True, slots=True)
class Later:
    """No weights are read: the model is built, tied and sharded, and stays on meta.

    ``Checkpointer.restore`` brings it up, and has the gradients of whole parameters averaged.
    """


Weights: TypeAlias = FromFiles | Later


class FilledOptions(TunedOptions, total=False):
    """How a model is wrapped and filled from a checkpoint. Each is optional; also those of :class:`TunedOptions`.

    Attributes:
        sharding: mesh, wrap policy, mixed precision and offload; see
        :class:`~shardwise.models.wrapping.wrap.Sharding`. buffers, on_missing, on_mismatched, on_unexpected: as for
        :func:`~shardwise.verbs.load.load`.
    """

    sharding: Sharding
    buffers: BufferRules
    on_missing: OnMissing
    on_mismatched: OnMissing
    on_unexpected: OnUnexpected


def consent_of(options: FilledOptions) -> Consent:
    """What may be missing, of another shape, or unexpected."""
    return Consent(
        options.get("on_missing", Refuse()),
        options.get("on_mismatched", Refuse()),
        options.get("on_unexpected", Refuse()),
    )


class PretrainedOptions(FilledOptions, total=False):
    """Keyword arguments of :func:`from_pretrained`, each optional; also those of :class:`FilledOptions`.

    Attributes:
        weights: ``FromFiles()``, or ``Later()`` for a run that restores them from a checkpoint of its own.
        options: as for :func:`~shardwise.verbs.load.load`.
    """

    weights: Weights
    options: LoadOptions
