"""Options of ``shardwise plan`` that are text, parsed without torch, so that a fault is named at once."""

import re
from pathlib import Path
from typing import Any, Literal, cast, get_args

from shardwise.core.errors import ConfigError
from shardwise.core.layout import NamedPolicy
from shardwise.files.peft_adapter import ADAPTER_CONFIG

_DTYPE = re.compile(r"bfloat16|half|float|double|float(16|32|64)|float[48]_\w+")


def require_floating_dtype(option: str, name: str) -> None:
    """Raise ConfigError if no floating dtype of torch has this name. Torch checks the rare ones again."""
    if not _DTYPE.fullmatch(name):
        raise ConfigError(f"{option}={name!r} is not a floating dtype of torch. Pass one such as bfloat16")


def parse_wrap(text: str) -> NamedPolicy | tuple[str, ...] | int:
    """Return the name of a policy, the names of ``classes=NAME,NAME``, or the elements of ``min-size=ELEMENTS``.

    Raises:
        ConfigError: the text is none of these.
    """
    word, _, value = text.partition("=")
    if word == "classes" and all(value.split(",")):
        return tuple(value.split(","))
    if word == "min-size" and value.isdecimal() and int(value):
        return int(value)
    if text in get_args(NamedPolicy):
        return cast(NamedPolicy, text)
    choices = ", ".join([*get_args(NamedPolicy), "classes=NAME,NAME", "min-size=ELEMENTS"])
    raise ConfigError(f"wrap={text!r} is not known. Pass one of {choices}")


def parse_tuning(text: str) -> tuple[Literal["full", "freeze", "lora", "adapter"], dict[str, Any]]:
    """Return the kind of a tuning and its settings from text, as the command line has it.

    ``full``, ``freeze=N`` with ``,modules=A+B`` and ``,extra=A+B``, ``lora=R`` with ``,alpha=X`` and
    ``,targets=A+B`` (default ``all-linear``), or a folder with an ``adapter_config.json``.

    Raises:
        ConfigError: the text is none of these.
    """
    if (Path(text) / ADAPTER_CONFIG).is_file():
        return "adapter", {"directory": text}
    # "lora=16,targets=q_proj+v_proj" is {"lora": "16", "targets": "q_proj+v_proj"}.
    values = dict(item.partition("=")[::2] for item in text.split(","))
    names: dict[str, tuple[str, ...]] = {}
    for name in ("modules", "extra", "targets"):
        names[name] = tuple(filter(None, values.get(name, "").split("+")))
    try:
        match [*values]:
            case ["full"] if text == "full":
                return "full", {}
            case ["freeze", *others] if {"modules", "extra"}.issuperset(others):
                layers = int(values["freeze"] or 0)
                if layers or (names["extra"] and not names["modules"]):
                    settings = {"trainable_modules": names["modules"], "extra_modules": names["extra"]}
                    return "freeze", {"trainable_layers": layers, **settings}
            case ["lora", *others] if {"alpha", "targets"}.issuperset(others):
                r, targets = int(values["lora"]), values.get("targets", "all-linear")
                if r > 0:
                    modules = targets if targets == "all-linear" else list(names["targets"])
                    return "lora", {
                        "r": r,
                        "lora_alpha": int(values.get("alpha", r)),
                        "target_modules": modules,
                    }
    except ValueError:  # a number that is none
        pass
    raise ConfigError(
        f"tuning={text!r} is not known. Pass full, freeze=N[,modules=A+B][,extra=A+B], "
        "lora=R[,alpha=X][,targets=A+B], or a folder with an adapter of PEFT."
    )
