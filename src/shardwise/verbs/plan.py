"""``plan``: what a load will take on every rank, before a tensor is read and without any ranks."""

from __future__ import annotations

import os
from typing import Unpack

from shardwise.engines.arguments import hints_of, require_known, require_meant
from shardwise.engines.forecasting import forecast_of
from shardwise.engines.outline import settled
from shardwise.engines.plan_options import PlanOptions
from shardwise.engines.tuning_arguments import require_trainable
from shardwise.report.forecast import Forecast


def plan(name_or_path: str | os.PathLike[str], *, ranks: int, **options: Unpack[PlanOptions]) -> Forecast:
    """What :func:`~shardwise.verbs.pretrained.from_pretrained` would take on each of ``ranks`` ranks.

    The checkpoint is a directory, a hub id in the cache, or a URL. Only its config and the headers of its files are
    read, and nothing is downloaded. Neither ranks nor a process group are needed, nor the accelerator. Tied tensors
    that are stored twice are taken to be equal.

    Keyword arguments: see :class:`PlanOptions`.

    Collective: no.
    Memory: the names and places of the checkpoint's tensors.

    Raises:
        TypeError: a keyword that is not known.
        ConfigError: the config, the mesh or an argument cannot be honoured.
        PlacementError: the wrap policy matches nothing, or the model holds what ``fully_shard`` refuses.
        CoverageError: checkpoint and model do not cover each other, as a load would say.
        FormatError, StorageError: the checkpoint's files contradict their format, or cannot be read.
    """
    require_known("plan", options, hints_of(PlanOptions))
    options = settled(options)
    require_meant(hints_of(PlanOptions), options)
    require_trainable(options)
    return forecast_of(name_or_path, ranks, options)
