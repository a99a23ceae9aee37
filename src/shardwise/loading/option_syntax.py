"""Options of ``shardwise plan`` that are text."""

from pathlib import Path
from typing import Any, Literal

from shardwise.core.errors import ConfigError
from shardwise.files.peft_adapter import ADAPTER_CONFIG


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
