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
    found = dict(item.partition("=")[::2] for item in text.split(","))
    names = {name: tuple(filter(None, found.get(name, "").split("+"))) for name in ("modules", "extra", "targets")}
    try:
        match [*found]:
            case ["full"] if text == "full":
                return "full", {}
            case ["freeze", *rest] if {"modules", "extra"}.issuperset(rest):
                layers = int(found["freeze"] or 0)
                if layers or (names["extra"] and not names["modules"]):
                    settings = {"trainable_modules": names["modules"], "extra_modules": names["extra"]}
                    return "freeze", {"trainable_layers": layers, **settings}
            case ["lora", *rest] if {"alpha", "targets"}.issuperset(rest):
                r, targets = int(found["lora"]), found.get("targets", "all-linear")
                if r > 0:
                    modules = targets if targets == "all-linear" else list(names["targets"])
                    return "lora", {"r": r, "lora_alpha": int(found.get("alpha", r)), "target_modules": modules}
    except ValueError:
        pass
    raise ConfigError(
        f"tuning={text!r} is not known. Pass full, freeze=N[,modules=A+B][,extra=A+B], "
        "lora=R[,alpha=X][,targets=A+B], or a folder with an adapter of PEFT."
    )
