"""``shardwise train``'s configuration: how a YAML file and overrides become one value.

They are merged first and looked at afterwards, so that every fault is named at once, with its path, before anything
else is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from shardwise.errors import ConfigError
from shardwise.training.configuration.config_sections import Section, TrainConfig
from shardwise.training.configuration.other_names import NoCounterpart, counterpart

_SHORT = {"model": "name", "tuning": "method", "data": "train", "output": "directory"}
_SHORT |= {"optimizer": "name", "schedule": "name"}
"""Sections that may be given as the value of one of their keys: ``model: Qwen/Qwen3-0.6B``."""


def read_config(file: str | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A YAML file and ``key=value`` overrides, merged; the later override counts.

    Raises:
        ConfigError: the file cannot be read; or naming every key that is unknown, missing or wrong.
    """
    return config_of(*read_values(file, overrides))


def read_values(file: str | None, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """The same as plain values, which may have any keys; and what errors call them.

    Raises:
        ConfigError: the file cannot be read.
    """
    told = file or "the configuration"
    merged: Any = OmegaConf.create()
    try:
        if file is not None:
            merged = OmegaConf.load(file)
            if not isinstance(merged, DictConfig):
                raise ConfigError(f"{file}: it is a list, not keys with values")
            merged = _in_full(merged)
        for override in overrides:
            key, separator, _ = override.partition("=")
            if not separator or not key.strip("."):
                raise ConfigError(
                    f"{override!r}: overrides are written key=value, such as optimizer.learning_rate=1e-4"
                )
            merged = _with_override(merged, override)
        value: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except OSError as error:
        raise ConfigError(f"{file}: the configuration cannot be read ({error.strerror or error})") from error
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:
        raise ConfigError(f"{told}: the configuration cannot be read ({error})") from error
    return value, told


def _with_override(config: DictConfig, override: str) -> Any:
    try:
        return OmegaConf.merge(config, _in_full(OmegaConf.from_dotlist([override])))
    except TypeError as error:  # a list is no keys with values
        raise ConfigError(f"{override!r}: an override replaces a list as a whole; give all of it") from error


def config_of(value: object, told: str = "the configuration") -> TrainConfig:
    """Plain values as a configuration.

    Raises:
        ConfigError: naming every key that is unknown, missing or wrong.
    """
    try:
        return TrainConfig.model_validate(value)
    except ValidationError as error:
        raise refused(told, faults_of(error)) from error


def faults_of(error: ValidationError, root: type[Section] = TrainConfig) -> dict[str, str]:
    """What is wrong with values that were to be a section: by the path of the key, in words."""
    faults: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        path, wanted = _explained(dict(fault), root)
        if wanted not in (known := faults.setdefault(path, [])):
            known.append(wanted)
    # Where a key may be a word or a section, and the section has a fault, that it is no word is not the news.
    near = [path for path in faults if not any(other.startswith(f"{path}.") for other in faults)]
    return {path: ", or ".join(faults[path]) for path in near}


def refused(told: str, faults: Mapping[str, str]) -> ConfigError:
    """The error that names every fault."""
    lines = [f"  {path}: {wanted}" for path, wanted in faults.items()]
    return ConfigError("\n".join([f"{told}: the training cannot be set up so", *lines]))


def _in_full(config: DictConfig) -> DictConfig:
    expanded: DictConfig = OmegaConf.create(in_full(OmegaConf.to_container(config, resolve=False)))
    return expanded


def in_full(values: Any) -> dict[str, Any]:
    """Plain values with sections where one of their keys was given for them."""
    shortened = [section for section in _SHORT if isinstance(values.get(section), str)]
    return {**values, **{section: {_SHORT[section]: values[section]} for section in shortened}}


def _explained(fault: Mapping[str, Any], root: type[Section]) -> tuple[str, str]:
    """The path of the key that a fault of pydantic's is about, and what is wrong or wanted."""
    keys, at = _keys_of(fault["loc"], root, is_unknown=fault["type"] in ("extra_forbidden", "invalid_key"))
    path = ".".join(keys) or "the whole"
    value = fault["input"]
    shown = path if isinstance(value, dict | list) else f"{path}={value!r}"
    match fault["type"]:
        case "extra_forbidden":
            return path, f"no such key{_answer(keys, at)}"
        case "missing":
            return path, "it must be given"
        case "invalid_key":
            return path, "no such key"
        case "union_tag_invalid":
            return f"{path}.method={fault['ctx']['tag']!r}", f"it must be one of {fault['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"{path}.method", "it must be given: full, freeze or lora"
        case "model_type" | "model_attributes_type":
            known = ", ".join(at.model_fields) if at is not None else ""
            return shown, f"it must be keys with values{f', of {known}' if known else ''}"
        case "value_error":
            return path, str(fault["ctx"]["error"])
        case _:
            message = str(fault["msg"]).replace("Input should be", "it must be")
            return shown, message[:1].lower() + message[1:]


def _keys_of(
    loc: Sequence[object], root: type[Section], *, is_unknown: bool
) -> tuple[list[str], type[Section] | None]:
    """The keys among pydantic's location, without the branches of unions, and the section the last one is in.

    Where the last key is itself a section, it is that one.
    """
    keys: list[str] = []
    sections: list[type[Section]] = [root]
    is_of_user = False
    for number, part in enumerate(loc):
        if is_of_user and part != "[key]":
            keys.append(str(part))
            is_of_user = False
        elif isinstance(part, int):
            keys[-1:] = [f"{keys[-1]}[{part}]" if keys else str(part)]
            continue
        found = [section for section in sections if part in section.model_fields]
        if found:
            keys.append(str(part))
            annotation = found[0].model_fields[str(part)].annotation
            sections = list(sections_of(annotation))
            is_of_user = dict in (get_origin(annotation), *map(get_origin, get_args(annotation)))
        elif tagged := [s for s in sections if s.__name__ == part or tag_of(s) == part]:
            sections = tagged
        elif is_unknown and number == len(loc) - 1:
            keys.append(str(part) or "''")
    return keys, sections[0] if len(sections) == 1 else None


def sections_of(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a key's type allows."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list):
        for member in get_args(annotation):
            yield from sections_of(member)


def tag_of(section: type[Section]) -> str | None:
    """What one of several sections is told by."""
    field = section.model_fields.get("method")
    return None if field is None else str(get_args(field.annotation)[0])


def _answer(keys: Sequence[str], section: type[Section] | None) -> str:
    """What to write in place of a key that there is none of, or why there is nothing."""
    known = counterpart(keys[-1])
    if isinstance(known, NoCounterpart):
        return f"; {known.why}"
    near = known or _nearest(keys, section)
    return f"; did you mean {near}?" if near else ""


def _nearest(keys: Sequence[str], section: type[Section] | None) -> str | None:
    """The key most likely meant: of the same section, else of the same name in another, else the nearest."""
    before, last = ".".join(keys[:-1]), keys[-1]
    known = [] if section is None else [*section.model_fields, *(_OF_MANY if section is TrainConfig else ())]
    if near := difflib.get_close_matches(last, known, 1, 0.7):
        return f"{before}.{near[0]}" if before else near[0]
    paths = list(known_keys())
    same = [path for path in paths if path.rpartition(".")[2] == last]
    return next(iter(same or difflib.get_close_matches(".".join(keys), paths, 1, 0.7)), None)


_OF_MANY = ("bank", "sweep", "tenants")
"""What stands beside these keys where many are trained at once; see ``shardwise.tenants``."""


def known_keys(section: type[Section] = TrainConfig, prefix: str = "") -> Iterator[str]:
    """The paths of all keys."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        for inner in sections_of(field.annotation):
            yield from known_keys(inner, f"{prefix}{name}.")
