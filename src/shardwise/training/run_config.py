"""Configurations of ``shardwise train``, read and checked before torch is imported.

A configuration is a YAML file as for ``trl sft --config``, with overrides ``--key value``. Its keys: ``keys.py``.
Keys of older versions and of published scripts are translated first: ``former_keys.py``.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from shardwise.core.errors import ConfigError
from shardwise.core.untrusted import parse_yaml
from shardwise.training.arguments import METHODS, ShardwiseArguments, TrainMethod
from shardwise.training.former_keys import NESTED, RENAMED, translate
from shardwise.training.keys import (
    find_conflicts,
    find_faults,
    get_keys,
    get_types,
    normalize_values,
    own_keys,
)
from shardwise.training.other_formats import explain_other_format


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A configuration whose names, types and choices are valid.

    Attributes:
        source: its file, for messages.
        values: keys of TRL that are set.
        own: keys of shardwise.
        notes: a line for each key of the file that was translated or left out.
    """

    source: str
    values: Mapping[str, Any]
    own: ShardwiseArguments
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> TrainMethod:
        """Name of the TRL trainer."""
        return self.own.method


def read_run_config(arguments: Sequence[str], *, strict: bool = False) -> RunConfig:
    """Read ``[METHOD] [CONFIG.yaml] [--key value ...]``.

    Args:
        arguments: words of the command line.
        strict: refuse former keys and inert ones instead of translating and leaving them out.

    Raises:
        ConfigError: the file cannot be read, or keys are unknown or have invalid values. The message has all of
            them.
    """
    # [METHOD] and [CONFIG.yaml] are optional. All other words are overrides of the file.
    words = list(arguments)
    method = words.pop(0) if words and words[0] in METHODS else None
    file = words.pop(0) if words and not words[0].startswith("--") else None
    if file is not None and not Path(file).suffix and not Path(file).exists():
        raise ConfigError(f"{file}: is not supported. Use one of {', '.join(METHODS)}, or a YAML file")
    overrides = dict(_parse_overrides(words))
    if file is None and "config" in overrides:  # as for TRL's own command
        file = str(overrides.pop("config"))
    values = {} if file is None else read_yaml(Path(file))
    values |= overrides
    if method is not None:
        values["method"] = method
    source = file or "the command line"
    if explanation := explain_other_format(values):
        raise ConfigError(f"{source}: {explanation}")
    values = expand_home(values)
    # The method decides which keys exist, so it is needed before keys are translated and checked.
    named: Any = values.get("loss") or values.get("method", "sft")  # "loss" is the default method of many LoRAs
    valid_method: TrainMethod = named if named in METHODS else "sft"  # an unknown method is one of the faults
    translation = translate(values, get_keys(valid_method))
    faults = list(translation.faults)
    if strict:
        faults += translation.notes
    values = normalize_values(translation.values, valid_method)
    values = {key: [value] if _is_single(key, value) else value for key, value in values.items()}
    if values.get("resume_from_checkpoint") is True:  # as is the default here
        del values["resume_from_checkpoint"]
    # First all keys one by one, and only if all are valid those that contradict each other.
    for key, value in values.items():
        former = translation.former_keys.get(key)
        prefix = f"{former}, read as " if former else ""
        faults += [f"{prefix}{fault}" for fault in find_faults(key, value, valid_method)]
    raise_faults(source, faults)
    trl_values = {key: value for key, value in values.items() if key not in own_keys()}
    config = RunConfig(source, trl_values, _parse_own(values), translation.notes)
    if not config.own.has_adapters:  # their keys are complete with those of each adapter only
        raise_faults(source, list(find_conflicts(config.values, config.own)))
    return config


def expand_home(value: Any) -> Any:
    """Expand paths that begin with ``~/``, also in lists and mappings: libraries take them as they are."""
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [expand_home(item) for item in value]
    if isinstance(value, dict):
        return {expand_home(key): expand_home(item) for key, item in value.items()}
    return value


def raise_faults(source: str, faults: Sequence[str]) -> None:
    """Raise one error with all faults of a configuration, if there are any.

    Raises:
        ConfigError: there are.
    """
    if faults:
        raise ConfigError("\n  ".join([f"{source}: invalid keys ({len(faults)}).", *faults]))


def _is_single(key: str, value: Any) -> bool:
    """Return whether TRL's command would read a value as the only element of a list."""
    types = get_types(key)
    is_list = key not in own_keys() and "list" in types and "str" not in types
    return is_list and not isinstance(value, list | dict | None)


def _parse_own(values: Mapping[str, Any]) -> ShardwiseArguments:
    """Return the keys of shardwise. Their lists and numbers may be written as strings, as on the command line."""
    keywords: dict[str, Any] = {}
    for key, spec in own_keys().items():
        if (value := values.get(key)) is None:
            continue
        if isinstance(value, str) and "str" not in spec["types"]:
            value = [word.strip() for word in value.split(",")] if "list" in spec["types"] else int(value)
        keywords[key] = value
    return ShardwiseArguments(**keywords)


def trl_accelerate_config(name: str) -> Path:
    """Return the path of an accelerate config: a path, or the name of one that TRL ships (``fsdp2``)."""
    trl = find_spec("trl")  # does not import it
    if Path(name).is_file() or trl is None or trl.origin is None:
        return Path(name)
    shipped = Path(trl.origin).parent / "accelerate_configs" / f"{name}.yaml"
    return shipped if shipped.is_file() else Path(name)


def read_yaml(file: Path) -> dict[str, Any]:
    """Read a YAML file of keys and values.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    try:
        values = parse_yaml(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read, {error.strerror}. Check the path") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, a date or a number
        raise ConfigError(f"{file}: is not valid YAML. {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file}: is not a mapping of keys to values. Write lines KEY: VALUE")
    return values


def _parse_value(key: str, text: str) -> Any:
    """Parse a value of the command line: as it is for keys that take only text, as YAML for all others."""
    types = get_types(RENAMED.get(key, key))
    if key in NESTED and NESTED[key][0] == "env":
        types = {"null", "str"}
    # Text of these keys is a path or a choice; these two words are booleans, as in YAML.
    if key in ("resume_from_checkpoint", "scale_rewards") and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if types and types <= {"null", "str"}:
        return None if text in ("", "null") else text
    value = parse_yaml(text)
    # YAML reads ``no`` as False, which is a string for ``report_to``.
    return text if isinstance(value, bool) and types and "bool" not in types else value


def _parse_overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Parse ``--key value``, ``--key=value``, ``--key v1 v2`` and ``--flag``, as TRL's parser does."""
    # ["--lr", "1", "--betas", "0.9", "0.99"] is grouped to [["lr", "1"], ["betas", "0.9", "0.99"]].
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append(word.removeprefix("--").split("=", 1))
        elif not groups:
            raise ConfigError(f"{word}: is not a key. Write --key value after the configuration file")
        else:
            groups[-1].append(word)
    for key, *texts in groups:
        name = key.replace("-", "_")
        if not texts:
            is_negated = name.startswith("no_")
            yield name.removeprefix("no_"), not is_negated
            continue
        try:
            parsed = [_parse_value(name, text) for text in texts]
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"--{key}: is not a valid value. {error}") from error
        yield name, parsed[0] if len(parsed) == 1 else parsed
