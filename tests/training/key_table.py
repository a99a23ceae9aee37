"""Makes the table of configuration keys from TRL's dataclasses: ``python -m tests.training.key_table``.

``shardwise train`` checks names, types and choices against this table before it imports torch; a test compares the
table with the dataclasses.
"""

import dataclasses
import enum
import importlib
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import trl
from trl.scripts.utils import DatasetConfig

import shardwise.training
from shardwise.training.run_config import METHODS

FILE = Path(shardwise.training.__path__[0]) / "keys.json"
CONFIGS = ("SFTConfig", "DPOConfig", "KTOConfig", "GRPOConfig", "RewardConfig")
NAMES = {int: "int", float: "float", bool: "bool", str: "str", list: "list", dict: "dict", type(None): "null"}


def spec_of(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The types and choices of a field, and its default if that is plain."""
    found: set[str] = set()
    choices: set[str] = set()

    def add(one: Any) -> None:
        origin = typing.get_origin(one)
        if origin in (typing.Union, types.UnionType):
            for part in typing.get_args(one):
                add(part)
        elif origin is typing.Literal:
            choices.update(typing.get_args(one))
            found.add("str")
        elif isinstance(one, type) and issubclass(one, enum.Enum):
            choices.update(str(member.value) for member in one)
            found.add("str")
        else:
            found.add(NAMES.get(origin or one, "any"))

    add(hint)
    default = field.default if field.default is not dataclasses.MISSING else None
    if isinstance(default, enum.Enum):
        default = default.value
    if default is None:
        found.add("null")  # TRL's own examples write null for what is left out
    # Fields that take a class of choices or another string (paths of generation configs) say so by both.
    choices.update(field.metadata.get("choices") or ())
    spec: dict[str, Any] = {"types": sorted(found)}
    if choices:
        spec["choices"] = sorted(choices)
    if isinstance(default, (int, float, str, bool)):
        spec["default"] = default
    return spec


def specs_of(*kinds: type) -> dict[str, dict[str, Any]]:
    """By name, all fields that a configuration can set."""
    found: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        found |= {field.name: spec_of(hints[field.name], field) for field in dataclasses.fields(kind) if field.init}
    return dict(sorted(found.items()))


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """By method its keys; what all methods share is under "all", entries of ``datasets`` under "datasets"."""
    script = importlib.import_module("trl.scripts.grpo")
    by_method = {
        method: specs_of(
            script.GRPOScriptArguments if method == "grpo" else trl.ScriptArguments,
            trl.ModelConfig,
            trl.DatasetMixtureConfig,
            getattr(trl, config),
        )
        for method, config in zip(METHODS, CONFIGS, strict=True)
    }
    first, *others = by_method.values()
    common = {key: spec for key, spec in first.items() if all(other.get(key) == spec for other in others)}
    return {
        "all": common,
        **{method: {k: v for k, v in found.items() if k not in common} for method, found in by_method.items()},
        "datasets": specs_of(DatasetConfig),
    }


def text() -> str:
    """The table as it is shipped: a line for each key."""
    sections = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(spec)}" for key, spec in keys.items())
        + "\n}"
        for name, keys in table().items()
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    sys.stdout.write(f"{FILE}\n")
