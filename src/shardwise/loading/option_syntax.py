"""Options of ``shardwise plan`` that are text."""

import os

from shardwise.core.errors import ConfigError
from shardwise.files.peft_adapter import ADAPTER_CONFIG
from shardwise.models.lora import peft_private
from shardwise.models.tunings import ExistingLora, Freeze, Full, Lora, Tuning


def build_tuning(text: str) -> Tuning:
    """Return a tuning from text, as the command line has it.

    ``full``, ``freeze=N`` with ``,modules=A+B`` and ``,extra=A+B``, ``lora=R`` with ``,alpha=X`` and
    ``,targets=A+B`` (default ``all-linear``), or a folder with an ``adapter_config.json``.

    Raises:
        ConfigError: the text is none of these, or PEFT is not installed.
    """
    # False also for text that is too long for a path. The method of Path raises an error then.
    if os.path.isfile(os.path.join(text, ADAPTER_CONFIG)):
        return ExistingLora(text)
    # "lora=16,targets=q_proj+v_proj" is {"lora": "16", "targets": "q_proj+v_proj"}.
    values = dict(item.partition("=")[::2] for item in text.split(","))
    names: dict[str, tuple[str, ...]] = {}
    for name in ("modules", "extra", "targets"):
        names[name] = tuple(filter(None, values.get(name, "").split("+")))
    try:
        match [*values]:
            case ["full"] if text == "full":
                return Full()
            case ["freeze", *others] if {"modules", "extra"}.issuperset(others):
                layers = int(values["freeze"] or 0)
                if layers or (names["extra"] and not names["modules"]):
                    return Freeze(layers, names["modules"], names["extra"])
            case ["lora", *others] if {"alpha", "targets"}.issuperset(others):
                r, targets = int(values["lora"]), values.get("targets", "all-linear")
                if r > 0:
                    modules = targets if targets == "all-linear" else list(names["targets"])
                    alpha = int(values.get("alpha", r))
                    return Lora(peft_private.lora_config(r=r, lora_alpha=alpha, target_modules=modules))
    except ValueError:  # a number that is none
        pass
    raise ConfigError(
        f"tuning={text!r} is not known. Pass full, freeze=N[,modules=A+B][,extra=A+B], "
        "lora=R[,alpha=X][,targets=A+B], or a folder with an adapter of PEFT."
    )
