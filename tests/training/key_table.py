"""Makes the tables of keys: all as a file, ours for the documentation. ``python -m tests.training.key_table``.

``shardwise train`` checks names, types and choices against this table before it imports torch; a test compares the
table with the dataclasses.
"""

import ast
import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

import trl
from trl.scripts.utils import DatasetConfig

import shardwise.training
from shardwise.training import former_keys
from shardwise.training.arguments import METHODS, ShardwiseArguments
from shardwise.training.keys import MISTAKEN, REJECTED
from shardwise.training.trl_objects import script_class, trl_class

FILE = Path(shardwise.training.__path__[0]) / "trl_keys.json"

CONVERTED = {
    "`warmup_ratio`": "`warmup_steps`, a fraction of the steps",
    "`dataset_name: {NAME: SHARE}`": "`dataset_mixer`",
    "`dataset_configs: [NAME]`, without `dataset_mixer`": "`dataset_config`",
    "`dataset_splits: [TRAIN, TEST]`, without `dataset_mixer`": "`dataset_train_split`, `dataset_test_split`",
    "`eval_dataset_names: [NAME]`": "`eval_dataset_name`",
    "`gamma_beta_ratio`": "`loss_type: simpo`, `cpo_alpha: 0.0`, `simpo_gamma` (times `beta`), `beta: 2.0` unless "
    "it is set, for `cpo`",
    "`model_init_kwargs`": "`dtype`, `attn_implementation`, `model_revision`, `trust_remote_code`, "
    "`use_kernels`, `config_overrides`",
    "`unsloth_lora_r`": "`lora_r`, with `use_peft: true`",
}
"""Keys that ``former_keys._translate_key`` converts beside those in its tables."""

COMPARED = (
    *("f_divergence_type", "importance_sampling_level", "loss_type", "multi_objective_aggregation"),
    *("scale_rewards", "vllm_importance_sampling_mode"),
)
"""Keys that are any text in the dataclasses. Trainers compare them with each of their choices."""


def make_specs(*kinds: type) -> dict[str, dict[str, Any]]:
    """Return, by name, the types and choices of the fields of dataclasses."""
    specs: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                specs[field.name] = _make_spec(hints[field.name], field)
    return specs


def _make_spec(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    names: set[str] = set()
    # Fields that take a class of choices or another string (paths of generation configs) say so by both.
    choices = {str(choice) for choice in field.metadata.get("choices") or ()}
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for one in typing.get_args(hint) if is_union else (hint,):
        kind = typing.get_origin(one) or one
        if kind is typing.Literal:
            names.update(type(choice).__name__ for choice in typing.get_args(one))
            choices.update(choice for choice in typing.get_args(one) if isinstance(choice, str))
        elif isinstance(kind, type) and issubclass(kind, enum.Enum):
            choices.update(str(member.value) for member in kind)
            names.add("str")
        elif kind is types.NoneType:
            names.add("null")
        else:
            names.add(kind.__name__ if kind in (int, float, bool, str, list, dict) else "any")
    if field.default in (None, dataclasses.MISSING):
        names.add("null")  # TRL's own examples write null for what is left out
    spec: dict[str, Any] = {"types": sorted(names)}
    if choices:
        spec["choices"] = sorted(choices)
    return spec


def find_compared(trainer: type) -> dict[str, set[str]]:
    """Return, by name, the texts that the module of a trainer compares it with.

    Those of a base are not returned: GMPO's trainer inherits keys of GRPO that its loss ignores.
    """
    texts: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[trainer.__module__]))):
        if isinstance(node, ast.Compare):  # loss_type == "ipo", self.loss_type in ["grpo", "sapo"]
            name = ast.unparse(node.left).removeprefix("self.")
            constants = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            texts.setdefault(name, set()).update(one for one in constants if isinstance(one, str))
    return texts


def table() -> dict[str, dict[str, dict[str, Any]]]:
    """By method its keys; what all methods share is under "all", entries of ``datasets`` under "datasets".

    Our own keys are under "shardwise".
    """
    by_method = {
        method: make_specs(
            script_class(method),
            trl.ModelConfig,
            trl.DatasetMixtureConfig,
            trl_class(method, "Config"),
        )
        for method in METHODS
    }
    for method, specs in by_method.items():
        texts = find_compared(trl_class(method, "Trainer"))
        for key in COMPARED:
            if key in specs and "choices" not in specs[key] and key in texts:
                specs[key]["choices"] = sorted(texts[key])
    first, *others = by_method.values()
    common = {key: spec for key, spec in first.items() if all(other.get(key) == spec for other in others)}
    return {
        "all": common,
        **{method: {k: v for k, v in found.items() if k not in common} for method, found in by_method.items()},
        "datasets": make_specs(DatasetConfig),
        "shardwise": make_specs(ShardwiseArguments),
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


def former_page() -> str:
    """``docs/former_keys.md``: keys that are read as others, left out or refused."""
    lines = [
        "# Keys of older files",
        "",
        "Published configurations were written for older versions of TRL and transformers, and for scripts that",
        "extend them, such as the alignment handbook and open-r1. `shardwise train` reads their keys as follows,",
        "and prints a line for each. `--strict` refuses them instead. All others that TRL does not have are",
        "errors, listed at once.",
        "",
        "## Read as another key",
        "",
        "| key | read as |",
        "|---|---|",
        *(f"| `{old}` | `{new}` |" for old, new in former_keys.RENAMED.items()),
        *(f"| `{old}: true` | `{key}: {value}` |" for old, (key, value) in former_keys.SWITCHES.items()),
        *(f"| `{old}` | `{key}: {{{name}: ...}}` |" for old, (key, name) in former_keys.NESTED.items()),
        *(f"| {old} | {new} |" for old, new in CONVERTED.items()),
        *(
            f"| `{key}: {old}` | `{key}: {new}` |"
            for key, values in former_keys.VALUES.items()
            for old, new in values.items()
        ),
        "",
        "## Left out",
        "",
        "None of these changes the loss, the data or where results go. Switches that are off are left out, too: "
        + ", ".join(f"`{key}`" for key in sorted(former_keys.OFF))
        + ".",
        "",
        "| key | why |",
        "|---|---|",
        *(f"| `{key}` | {why} |" for key, why in former_keys.INERT.items()),
        "",
        "## Refused",
        "",
        "| key | why, and what to do |",
        "|---|---|",
        *(f"| `{key}` | {why} |" for key, why in {**REJECTED, **MISTAKEN}.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
    (Path(__file__).parents[2] / "docs" / "former_keys.md").write_text(former_page(), "utf-8")
    sys.stdout.write(f"{FILE}\n{page()}")
