"""What a configuration of many tenants has beside the keys of one training, as types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shardwise.training.configuration.config_sections import Section, TrainConfig, as_yaml
from shardwise.training.configuration.config_types import Count


class BankSection(Section):
    """How tenants share the base.

    ``tokens_per_pass`` is the most tokens, padding included, that a rank takes through the base at once, whosever
    they are. Rows are padded to a multiple of ``pad_to``. ``backend`` is how adapters are computed. What optimizers
    keep is whole on every rank, or a slice on each.
    """

    tokens_per_pass: Count = 4096
    pad_to: Count = 64
    backend: Literal["fewest_products", "looped", "grouped"] = "fewest_products"
    optimizer_state: Literal["whole", "sharded"] = "whole"


class ManySection(Section):
    """Who is trained: ``tenants``, each with a name and what it has otherwise; or one for each point of a sweep."""

    bank: BankSection = BankSection()
    tenants: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    sweep: Annotated[dict[str, Any], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> ManySection:
        if (self.tenants is None) == (self.sweep is None):
            raise ValueError("give one of tenants (a list) and sweep (keys with lists of values)")
        return self


@dataclass(frozen=True)
class TenantsConfig:
    """Many trainings on one base."""

    bank: BankSection
    tenants: Mapping[str, TrainConfig]
    """By name: each is a whole training, as it could be had alone, into the folder of this name."""
    output: str
    values: Mapping[str, Any]
    """As they were given, for the next run."""

    @property
    def shared(self) -> TrainConfig:
        """Any of them, for what is the same in all: model, sharding, checkpoints, log."""
        return next(iter(self.tenants.values()))

    def to_yaml(self) -> str:
        """What was given, overrides included."""
        return as_yaml(self.values)
