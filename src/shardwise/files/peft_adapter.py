"""Files of an adapter other than its tensors: ``adapter_config.json`` of PEFT, and the training state.

[Note: Named by the adapter] An adapter is committed by one file, ``adapter_model.safetensors``. The metadata in the
header of that file name the file with the training state, whose name is unique to the save. So the adapter and its
training state are committed in the same step. Another program that replaces the adapter names no training state, or
its own.
"""

import contextlib
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from shardwise.core.errors import ConfigError, FormatError
from shardwise.core.untrusted import Pattern
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.safetensors_files import FileHeader, read_header
from shardwise.files.storage import StorageReader
from shardwise.files.urls import shown

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")

WITHOUT_EFFECT: Final = frozenset(
    {
        # origin and purpose
        *("base_model_name_or_path", "revision", "inference_mode"),
        # targeted modules, which follow from the tensors
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        # training, and the initialization of factors
        *("lora_dropout", "megatron_core", "eva_config", "runtime_config", "qalora_group_size"),
        # a weight stored as (in, out), which follows from its module, as in PEFT
        "fan_in_fan_out",
        # options of the initializations that ``init_lora_weights`` selects
        *("loftq_config", "corda_config", "lora_ga_config"),
    }
)
CHANGES_THE_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What ``init_lora_weights``, in lower case, begins with if PEFT changes the base's weights."""

SAVE_AS_LORA: Final = (
    "Save it as a plain LoRA first (PEFT's save_pretrained with path_initial_model_for_weight_conversion)"
)
"""What to do with such an adapter."""

_MAX_RANK: Final = 1 << 20


@dataclass(frozen=True)
class LoraConfig:
    """Fields of an adapter's config that affect the merged model, under PEFT's names.

    ``target_parameters`` is empty if no parameters were targeted. ``adapted_names`` are those in a
    list of ``target_modules``, if no other field excludes modules with such a name.
    """

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    peft_version: str | None = None
    task_type: str | None = None
    auto_mapping: Mapping[str, Any] = field(default_factory=dict)
    adapted_names: tuple[str, ...] = ()

    def patterns(self) -> list[Pattern]:
        """Return the regular expressions that names are matched with."""
        options = {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}
        return [Pattern(option, text, _whole_name(text)) for option, texts in options.items() for text in texts]

    def rank(self, name: str) -> int:
        """Return the rank of the adapter of this module or parameter."""
        return self.rank_pattern.get(_pattern_for(self.rank_pattern, name), self.r)

    def scaling(self, name: str) -> float:
        """Return the factor of ``lora_B @ lora_A`` for this module or parameter."""
        # r=8, lora_alpha=16: 2, and 16 / sqrt(8) with use_rslora.
        alpha = self.alpha_pattern.get(_pattern_for(self.alpha_pattern, name), self.lora_alpha)
        rank = self.rank(name)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves_module(self, name: str) -> bool:
        """Return whether this module was trained as a full copy."""
        return any(name.endswith(module) for module in self.modules_to_save)


def parse_adapter_config(text: bytes, *, what: str) -> LoraConfig:
    """Return the config in ``text``. ``what`` names the file in messages.

    Raises:
        FormatError: the file is invalid, or has an invalid value.
        ConfigError: an adapter of this kind cannot be merged.
    """
    # Fields are taken out of `content` as they are checked. What is left at the end must be known to have no
    # effect.
    content = parse_object(text, what=what)
    kind = content.pop("peft_type", None)
    if kind != "LORA":
        raise ConfigError(f"{what}: peft_type is {shown(repr(kind))}, and only LORA adapters can be merged")
    init = content.pop("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(CHANGES_THE_BASE):
        raise ConfigError(
            f"{what}: init_lora_weights is {shown(repr(init))}, which changes the base's weights before training, "
            f"so that the adapter does not fit the base as it is stored. {SAVE_AS_LORA}"
        )
    # All invalid fields are reported together.
    faults: list[str] = []
    for name, (check, expected) in _FIELDS.items():
        if name not in content or (content[name] is None and name in _OPTIONAL):
            continue
        value = content[name]
        is_sound = isinstance(value, check) if isinstance(check, type) else check(value)
        if not is_sound:
            faults.append(f"{name} is {shown(repr(value))}, not {expected}")
    if faults:
        raise FormatError(f"{what}: {'; '.join(faults)}. Save the adapter again")
    fields: dict[str, Any] = {name: content.pop(name) for name in _FIELDS if content.get(name) is not None}
    for name in _OPTIONAL[:2]:
        fields[name] = tuple(fields.get(name, ()))
    adapted: Any = content.get("target_modules")
    excluding = [content.get(name) for name in ("exclude_modules", "layers_to_transform")]
    if _are_names(adapted) and all(value in (None, []) for value in excluding):
        fields["adapted_names"] = tuple(adapted)
    config = LoraConfig(**{"r": 8, "lora_alpha": 8, **fields})
    # What is left in ``content`` is not used here: it must have no effect on merged weights.
    if unknown := list_unknown_options(content, ()):
        raise ConfigError(
            f"{what}: the adapter uses {', '.join(unknown)}, with which it cannot "
            "be merged. Merge it with the version of PEFT that made it, or keep it apart from its base"
        )
    return config


def list_unknown_options(content: Mapping[str, object], known: Collection[str]) -> list[str]:
    """Return the options in an adapter's config that are used, not ``known``, and may change its model."""
    names = content.keys() - WITHOUT_EFFECT - set(known)
    return sorted(shown(name) for name in names if content[name] not in _UNUSED)


_UNUSED: Final[tuple[object, ...]] = (None, False, [], {}, "")
"""Values of a field that mean that its feature is not used."""


def _pattern_for(patterns: Mapping[str, Any], name: str) -> str:
    """Return the first pattern that matches the end of the name, else the name, as PEFT's ``get_pattern_key``."""
    return next((pattern for pattern in patterns if re.match(_whole_name(pattern), name)), name)


def _whole_name(pattern: str) -> str:
    return rf"(.*\.)?({pattern})$"


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_RANK


def _is_number(value: object) -> bool:
    # Not math.isfinite: an integer of a thousand digits does not fit into a float.
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_by_pattern(value: object, is_sound: Callable[[object], bool]) -> bool:
    if not isinstance(value, dict) or not all(map(is_sound, value.values())):
        return False
    with contextlib.suppress(re.error, OverflowError, RecursionError):
        return len([re.compile(_whole_name(name)) for name in value]) == len(value)
    return False


_OPTIONAL: Final = (
    *("modules_to_save", "target_parameters"),
    *("rank_pattern", "alpha_pattern", "peft_version", "task_type", "auto_mapping"),
)
"""Fields that may be null."""

_FIELDS: Final[dict[str, tuple[type | Callable[[object], bool], str]]] = {
    "r": (_is_rank, f"a rank from 1 to {_MAX_RANK}"),
    "lora_alpha": (_is_number, "a number"),
    "rank_pattern": (partial(_is_by_pattern, is_sound=_is_rank), "ranks by regular expression"),
    "alpha_pattern": (partial(_is_by_pattern, is_sound=_is_number), "numbers by regular expression"),
    "modules_to_save": (_are_names, "a list of names"),
    "target_parameters": (_are_names, "a list of names"),
    "bias": (("none", "all", "lora_only").__contains__, "one of none, all and lora_only"),
    "peft_version": (str, "a version"),
    "task_type": (str, "a task"),
    "auto_mapping": (dict, "an object"),
    **dict.fromkeys(("use_rslora", "use_dora", "ensure_weight_tying"), (bool, "true or false")),
}
"""The type or the check of each field that is used, and its description for messages."""


def read_peft_version(config: Path) -> str | None:
    """Return the version of PEFT in an adapter's config, or None if it has none. PEFT would fill in its own.

    Raises:
        FormatError: the config is invalid.
    """
    version = parse_object(config.read_bytes(), what=str(config)).get("peft_version")
    return None if version is None else str(version)


TRAINING_KEY: Final = "shardwise.training"
"""Metadata key: in an adapter's file, the name of its training file; in the training file, JSON."""

_NAME = re.compile(r"adapter_training\.[0-9a-f]{8}\.safetensors")


def training_file(save_id: str) -> str:
    """Return the file name of the training state of a save."""
    return f"adapter_training.{save_id}.safetensors"


def is_training_file(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def get_training_file(adapter: FileHeader) -> str | None:
    """Return the training file that an adapter's file names, or None.

    Raises:
        FormatError: the name is invalid.
    """
    name = adapter.metadata.get(TRAINING_KEY)
    if name is not None and not is_training_file(name):
        raise FormatError(
            f"{shown(adapter.file)}: its header names {shown(name)} as its training state, which is not a valid "
            "name. The file is damaged: save the adapter again"
        )
    return name


def find_training_file(reader: StorageReader, adapter: str) -> str | None:
    """Return the training file of the adapter in the file of this name, or None if it has none.

    Raises:
        FormatError: the adapter's file is invalid, or names a training file that does not exist.
        StorageError: it could not be read.
    """
    name = get_training_file(read_header(reader, adapter)) if adapter.endswith(".safetensors") else None
    if name is not None and name not in reader.list():
        raise FormatError(
            f"{name}: the training state of {shown(adapter)} is missing in {reader.root}. Copy it there, or load "
            "the matrices alone (into a bank: load(..., training_state=False))"
        )
    return name


def adapter_prefix(name: str) -> str:
    """Return the prefix of an adapter's files and keys if they are stored with those of its base."""
    return f"(adapter {name})"


def find_inner_adapters(folder: Path) -> list[str]:
    """Return the names of the adapters in folders of their own, where PEFT saves all but the default one."""
    return sorted(config.parent.name for config in folder.glob(f"*/{ADAPTER_CONFIG}"))


def find_adapter_weights(folder: Path) -> str:
    """Return the name of the file of tensors in the folder of an adapter.

    Raises:
        FormatError: it is not there, or no config is.
    """
    if not (folder / ADAPTER_CONFIG).is_file():
        inside = ", ".join(map(shown, find_inner_adapters(folder)))
        remedy = (
            f"Pass one of the folders in it: {inside}"
            if inside
            else "Pass the folder of an adapter that PEFT saved"
        )
        raise FormatError(f"{folder}: has no {ADAPTER_CONFIG}. {remedy}")
    file = next((name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise FormatError(f"{folder}: has neither {' nor '.join(ADAPTER_WEIGHTS)}. Save the adapter again")
    return file
