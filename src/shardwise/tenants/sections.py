"""What a configuration of many tenants has beside the keys of one training, and every key of either, as types."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from shardwise.training.configuration.config import sections_of, tag_of
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


_KINDS = {int: "integer", float: "number", str: "text", bool: "true | false"}


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key. ``default`` is as YAML has it, ``required`` where there is none."""

    path: str
    type: str
    default: str


def config_keys() -> tuple[ConfigKey, ...]:
    """Every key of a training, and what stands beside these where many LoRAs are trained."""
    found: dict[str, ConfigKey] = {}
    for root in (TrainConfig, ManySection):
        for key in _keys(root, ""):
            found.setdefault(key.path, key)  # `tuning.method` is in three sections: the first has the default
    return tuple(found.values())


def _keys(section: type[Section], prefix: str) -> Iterator[ConfigKey]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        inner = list(sections_of(field.annotation))
        if (told := _in_words(field.annotation, field.metadata)) != "keys":
            yield ConfigKey(path, told, _default(field))
        choices = [tag_of(each) for each in inner]
        if all(choices) and choices:  # a union, told apart by one key
            first = inner[0].model_fields["method"]
            yield ConfigKey(f"{path}.method", " | ".join(map(str, choices)), _default(first))
        for each in inner:
            yield from _keys(each, f"{path}.")


def _in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """``integer >= 1``, ``auto | never | text``, ``list of text``; ``keys`` for a section."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _in_words(members[0], members[1:])
    if origin is Literal:
        return " | ".join(map(str, members))
    if origin in (Union, UnionType):
        told = [_in_words(member) for member in members if member is not NoneType]
        return " | ".join(dict.fromkeys(told))
    if origin is list:
        return f"list of {_in_words(members[0])}"
    if origin is dict:
        return "keys with values"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "keys"
    return " ".join([_KINDS[annotation], *_bounds(metadata)])


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Of numbers; how long a text has to be is not worth a word."""
    for each in metadata:
        for one in getattr(each, "metadata", (each,)):
            match one:
                case Ge(ge=bound):
                    yield f">= {bound}"
                case Gt(gt=bound):
                    yield f"> {bound}"
                case Le(le=bound):
                    yield f"<= {bound}"
                case Lt(lt=bound):
                    yield f"< {bound}"
                case _:
                    pass


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    return value if isinstance(value, str) else json.dumps(value)
