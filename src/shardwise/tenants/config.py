"""Makes whole trainings of what is said once for all tenants, of what each has otherwise, and of grids.

A configuration of many tenants is that of one training, with ``tenants`` or a ``sweep`` beside it. So every key,
its default, and what is said of a wrong one are those of a training.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from pydantic import ValidationError

from shardwise.bank.tenant import require_name
from shardwise.errors import ConfigError
from shardwise.tenants.sections import ManySection, TenantsConfig
from shardwise.training.configuration.config import faults_of, in_full, refused
from shardwise.training.configuration.config_sections import LoraTuning, TrainConfig, TrainingSection

_SHORT = {"learning_rate": "lr", "lora_alpha": "alpha", "lora_dropout": "dropout", "weight_decay": "wd"}
"""What keys are called in names; others by the last of their words."""


def grid(sweep: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """All combinations of values, by name: the last key changes quickest. Each has a value for every key.

    Combinations of one name are one: the caller compares their number with :func:`points`.
    """
    keys = list(sweep)
    named = [[(_word(key, value, number), value) for number, value in enumerate(sweep[key], 1)] for key in keys]
    return {
        "-".join(word for word, _ in point): {key: value for key, (_, value) in zip(keys, point, strict=True)}
        for point in itertools.product(*named)
    }


def points(sweep: Mapping[str, Sequence[Any]]) -> int:
    """How many combinations there are."""
    count = 1
    for values in sweep.values():
        count *= len(values)
    return count


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested keys as ``tuning.r``, with what is not nested any more."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        *sections, last = path.split(".")
        place = whole
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return whole


def _word(key: str, value: object, number: int) -> str:
    """A value in a name: ``r8``, ``lr1e-4``, ``linear``; what is no short word by its place in the list."""
    last = key.rpartition(".")[2]
    short = _SHORT.get(last, last)
    match value:
        case bool():
            return f"{short}-{str(value).lower()}"
        case int() | float():
            return f"{short}{_shortest(value)}"
        case str() if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}", value):
            return value
        case _:
            return f"{short}{number}"


def _shortest(value: float) -> str:
    """The shorter of two ways to write a number."""
    exact = Decimal(repr(value)).normalize()
    if not exact.is_finite():
        return str(value)
    plain = f"{exact:f}"
    _, digits, exponent = exact.as_tuple()
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    power = int(exponent) + len(rest)
    scientific = f"{'-' if exact < 0 else ''}{first}{'.' if rest else ''}{rest}e{power}"
    return scientific if len(scientific) < len(plain) else plain


_OWN = ("data", "tuning", "optimizer", "schedule", "training", "evaluation")
"""What a tenant may have otherwise than the others."""

_EITHER = {"training": {"epochs", "max_steps"}, "schedule": {"warmup_ratio", "warmup_steps"}}
"""Keys of which a tenant's own takes the place of the others' other one."""

_MOST = 1024


def is_of_many(values: object) -> bool:
    """Whether plain values are a configuration of many tenants, not of one training."""
    return isinstance(values, Mapping) and not {"tenants", "sweep"}.isdisjoint(values)


def tenants_of(values: Mapping[str, Any], told: str = "the configuration") -> TenantsConfig:
    """Plain values as many trainings.

    Raises:
        ConfigError: naming every key that is unknown, missing or wrong, and whose it is; or what a bank cannot do.
    """
    beside = {key: values[key] for key in ManySection.model_fields if key in values}
    shared = in_full({key: value for key, value in values.items() if key not in beside})
    try:
        many = ManySection.model_validate(beside)
    except ValidationError as error:
        raise refused(told, faults_of(error, ManySection)) from error
    entries = _entries(many, told)
    if isinstance(shared.get("tuning", {}), Mapping):
        shared["tuning"] = {"method": "lora", **shared.get("tuning", {})}
    asks = [shared, *(own for _, own in entries.values())]
    is_evaluated = any(
        isinstance(each.get("evaluation"), Mapping) and "data" in each["evaluation"] for each in asks
    )
    faulty: dict[str, dict[str, str]] = {}
    made: dict[str, TrainConfig] = {}
    for name, (_, own) in entries.items():
        merged = _placed(_over(shared, own), name)
        if is_evaluated:
            _settle_evaluation(merged)
        try:
            made[name] = TrainConfig.model_validate(merged)
        except ValidationError as error:
            faulty[name] = faults_of(error)
        else:
            faulty[name] = dict(_beyond_a_bank(made[name]))
    if faults := _named(faulty, entries):
        raise refused(told, faults)
    return TenantsConfig(many.bank, made, shared["output"]["directory"], dict(values))


def _entries(many: ManySection, told: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: where a tenant is in the configuration, and what it has otherwise."""
    return _of_sweep(many.sweep, told) if many.sweep is not None else _of_list(many.tenants or [], told)


def _of_list(tenants: list[dict[str, Any]], told: str) -> dict[str, tuple[str, dict[str, Any]]]:
    faults: dict[str, str] = {}
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for number, entry in enumerate(tenants):
        place, own = f"tenants[{number}]", in_full(entry)
        name = own.pop("name", None)
        try:
            require_name(name)
        except ConfigError as error:
            faults[f"{place}.name"] = str(error) if name is not None else "it must be given"
            continue
        if name in found:
            faults[f"{place}.name"] = f"{name!r} is the name of {found[name][0]}, too"
        for key in own:
            if key in TrainConfig.model_fields and key not in _OWN:
                faults[f"{place}.{key}"] = "it is the same for all tenants; give it once, beside them"
        found[str(name)] = place, own
    if faults:
        raise refused(told, faults)
    return found


def _of_sweep(sweep: Mapping[str, Any], told: str) -> dict[str, tuple[str, dict[str, Any]]]:
    lists = dict(dotted(sweep))
    faults: dict[str, str] = {}
    for path, values in lists.items():
        if (section := path.partition(".")[0]) in TrainConfig.model_fields and section not in _OWN:
            faults[f"sweep.{path}"] = "it is the same for all tenants; give it once, beside the sweep"
        elif not (isinstance(values, list) and values):
            faults[f"sweep.{path}"] = "it must be a list of one or more values"
    if not faults and (count := points(lists)) > _MOST:
        faults["sweep"] = f"it has {count} combinations; {_MOST} are the most"
    if faults:
        raise refused(told, faults)
    tenants = grid(lists)
    if len(tenants) < points(lists):
        raise refused(told, {"sweep": "values come twice, or have the same names; give tenants names of their own"})
    return {require_name(name): ("sweep", nested(values)) for name, values in tenants.items()}


def _over(shared: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What is said for all, with what a tenant has otherwise in its place."""
    merged = {**shared}
    for key, value in own.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and "adapter" in value:
            merged[key] = {"method": before.get("method"), **value}  # an adapter has a config of its own
        elif isinstance(before, Mapping) and isinstance(value, Mapping):
            either = _EITHER.get(key, set())
            dropped = either if either & value.keys() else set()
            merged[key] = _over({name: each for name, each in before.items() if name not in dropped}, value)
        else:
            merged[key] = value
    return merged


def _placed(merged: dict[str, Any], name: str) -> dict[str, Any]:
    """With a folder of its own in that of all."""
    output = merged.get("output")
    if isinstance(output, Mapping) and isinstance(directory := output.get("directory"), str) and directory:
        return {**merged, "output": {**output, "directory": os.path.join(directory, name)}}
    return merged


def _settle_evaluation(merged: dict[str, Any]) -> None:
    """Of a tenant that has no data to be evaluated on, that others are evaluated is not wrong."""
    section = merged.get("evaluation")
    data = merged.get("data")
    is_split = isinstance(data, Mapping) and data.get("validation_fraction") is not None
    if isinstance(section, Mapping) and "data" not in section and not is_split:
        merged["evaluation"] = {key: value for key, value in section.items() if key != "every"}


def _named(
    faulty: Mapping[str, Mapping[str, str]], entries: Mapping[str, tuple[str, Mapping[str, Any]]]
) -> dict[str, str]:
    """Faults, with the place of the tenant where it said so itself, or others have no such fault."""
    named: dict[str, str] = {}
    for name, found in faulty.items():
        place, own = entries[name]
        for path, wanted in found.items():
            is_alike = all(path in others for others in faulty.values())
            named[path if is_alike and not _says(path, own) else f"{place}.{path}"] = wanted
    return named


def _says(path: str, own: Mapping[str, Any]) -> bool:
    """Whether the key of a path is among what a tenant has otherwise."""
    inner: Any = own
    for word in path.partition("=")[0].split("."):
        key = word.partition("[")[0]
        if not isinstance(inner, Mapping) or key not in inner:
            return False
        inner = inner[key]
    return True


def _beyond_a_bank(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """What one training can be asked for, and many at once cannot."""
    training, sharding, default = config.training, config.sharding, TrainingSection()
    if not isinstance(config.tuning, LoraTuning):
        yield f"tuning.method={config.tuning.method!r}", "tenants share one base, so each is a lora"
    if config.data.packing:
        yield "data.packing", "rows of tenants are not packed; short ones share passes by bank.tokens_per_pass"
    if config.data.streaming:
        yield "data.streaming", "rows of tenants are read before their first step; leave it out"
    if training.accumulate != default.accumulate:
        yield "training.accumulate", "adapters are whole on every rank, and so are their gradients; leave it out"
    if config.optimizer.lora_plus_ratio is not None:
        yield "optimizer.lora_plus_ratio", "a tenant's matrices are stepped at one rate; leave it out"
    if config.optimizer.allow_import:
        yield "optimizer.allow_import", "tenants take optimizers that are known to step each element for itself"
    if training.loss_chunk_tokens not in (default.loss_chunk_tokens, None):
        yield "training.loss_chunk_tokens", "logits are of a whole pass; bank.tokens_per_pass bounds them"
    if sharding.precision == "float16":
        yield "sharding.precision='float16'", "tenants have no gradient scaler; take bfloat16"
    if sharding.compile:
        yield "sharding.compile", "blocks that are compiled would not notice adapters that come later"
    if sharding.replicas > 1:
        yield "sharding.replicas", "the base of tenants is sharded over all ranks, in one axis"
    if config.checkpoints.mode != "synchronous":
        yield "checkpoints.mode", "what tenants keep is small, and written at once; leave it out"
    if config.output.push_to_hub is not None:
        yield "output.push_to_hub", "tenants would be pushed over each other; push their last/ folders afterwards"
    if config.log.trackers:
        yield "log.trackers", "trackers know one training; each tenant has a metrics.jsonl"
