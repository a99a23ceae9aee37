"""What of a model is trained, as types: all of it, some of its layers, or an adapter beside it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True, slots=True)
class Full:
    """All that the model's class trains."""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Some layers, and modules outside of them; all else is frozen.

    Attributes:
        trainable_layers: the last n of the model's layers, or the first n as ``-n``; 0 for none.
        trainable_modules: names of modules inside these layers, as in ``("self_attn", "mlp.down_proj")``; none for
            the layers whole.
        extra_modules: names of modules outside of the layers, as in ``("embed_tokens", "lm_head")``. What is tied
            is trained under all of its names.
    """

    trainable_layers: int = 0
    trainable_modules: tuple[str, ...] = ()
    extra_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("trainable_modules", "extra_modules"):
            value: object = getattr(self, name)
            if isinstance(value, str):
                raise ConfigError(f"{name}={value!r} must be a tuple of names: {name}=({value!r},)")
        if self.trainable_modules and not self.trainable_layers:
            raise ConfigError(
                f"trainable_modules={self.trainable_modules!r} are inside of trainable layers, of which there are "
                "none; pass trainable_layers=n, or name what is outside of layers as extra_modules"
            )
        if not self.trainable_layers and not self.extra_modules:
            raise ConfigError("Freeze() trains nothing; pass trainable_layers=n (the last n), or extra_modules")


@dataclass(frozen=True, slots=True)
class InBlocks:
    """Adapters are sharded, each in the group of the block it is in, and gathered with it."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Adapters are whole on every rank, in no group; their gradients are averaged over the ranks after backward.

    More memory, and less to gather: for small adapters, and for those that change hands at run time.
    """


AdapterPlacement: TypeAlias = InBlocks | Replicated


@dataclass(frozen=True, slots=True)
class Lora:
    """A new LoRA of PEFT's, and what its config trains beside it (``modules_to_save``, ``bias``).

    Attributes:
        config: PEFT's own; it is copied, and not changed.
        adapter: the adapter's name.
        adapters: where its matrices are.
    """

    config: LoraConfig
    adapter: str = "default"
    adapters: AdapterPlacement = field(default_factory=InBlocks)

    def __post_init__(self) -> None:
        _require_name(self.adapter)


@dataclass(frozen=True, slots=True)
class ExistingLora:
    """The LoRA in a folder of PEFT's (``adapter_config.json`` and its tensors), to be trained on.

    Attributes:
        directory: the folder. Its config is the adapter's.
        adapter: the name it is to have in the model.
        adapters: where its matrices are.
    """

    directory: str | os.PathLike[str]
    adapter: str = "default"
    adapters: AdapterPlacement = field(default_factory=InBlocks)

    def __post_init__(self) -> None:
        _require_name(self.adapter)


Tuning: TypeAlias = Full | Freeze | Lora | ExistingLora


def _require_name(adapter: str) -> None:
    if not adapter or "." in adapter or "lora_" in adapter:
        raise ConfigError(
            f"adapter={adapter!r} cannot name an adapter: it becomes a part of its tensors' names, so it is not "
            "empty and has neither a dot nor lora_ in it"
        )
