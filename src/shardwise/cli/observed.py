"""Whether a training is observed, and its curves are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from shardwise.pictures.curves import Curves

if TYPE_CHECKING:
    from shardwise.observing.sampler import RankObserver
    from shardwise.training.configuration.config_sections import TrainConfig


def observed(config: TrainConfig, directory: str) -> AbstractContextManager[RankObserver | None]:
    """What writes down memory and phases of this rank, where that is asked for. Collective: yes, on entering."""
    if config.observe is False:
        return nullcontext()
    from shardwise.verbs.observe import observe

    return observe(directory) if config.observe is True else observe(directory, samples_per_second=config.observe)


def curves_of(environment: Mapping[str, str]) -> Curves:
    """What draws curves; not where ``SHARDWISE_CURVES`` is 0."""
    return Curves(are_wanted=environment.get("SHARDWISE_CURVES") != "0")
