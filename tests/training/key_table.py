"""Makes the tables of keys: TRL's as a file, ours for the documentation. ``python -m tests.training.key_table``.

``shardwise train`` checks names, types and choices against this table before it imports torch; a test compares the
table with the dataclasses.
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import trl
from trl.scripts.utils import DatasetConfig

import shardwise.training
from shardwise.training.arguments import METHODS, ShardwiseArguments
from shardwise.training.keys import make_specs

FILE = Path(shardwise.training.__path__[0]) / "trl_keys.json"
CONFIGS = ("SFTConfig", "DPOConfig", "KTOConfig", "GRPOConfig", "RewardConfig")


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """By method its keys; what all methods share is under "all", entries of ``datasets`` under "datasets"."""
    script = importlib.import_module("trl.scripts.grpo")
    by_method = {
        method: make_specs(
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
        "datasets": make_specs(DatasetConfig),
    }


def text() -> str:
    """The table as it is shipped: a line for each key."""
    sections = [
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(key)}: {json.dumps(spec)}" for key, spec in sorted(keys.items()))
        + "\n}"
        for name, keys in table().items()
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


def page() -> str:
    """The table of our keys in ``docs/train.md``."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key in dataclasses.fields(ShardwiseArguments):
        default = "" if key.default is None else f"`{json.dumps(key.default).strip(chr(34))}`"
        rows.append(f"| `{key.name}` | {default} | {key.metadata['help']} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    sys.stdout.write(f"{FILE}\n{page()}")
