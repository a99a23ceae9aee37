"""What of a model is trained, as types: all of it, some of its layers, or an adapter beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from shardwise.conversion.computed import Bindings
    from shardwise.models.selection import Selection
    from shardwise.tuning.lora import Adapter
    from shardwise.tuning.selecting import Tuned


class Tuning:
    """Base class: what is trained of a model, and what is added for it. By default all that its class trains.

    A subclass of one's own may be passed as ``tuning``. It is carried out on meta, before the model is sharded.
    """

    __slots__ = ()

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        """Return the folders of adapters that are read with the checkpoint, by the adapter's name in the model."""
        return {}

    def saves(self) -> Selection:
        """Return the part of a model trained so that is saved."""
        return None

    def in_words(self, _adapters: Mapping[str, Adapter]) -> str:
        """Return what ranks must have in common, also what no plan shows, such as the scaling of a LoRA."""
        return repr(self)

    def prepare(self, base: PreTrainedModel, bindings: Bindings, _adapters: Mapping[str, Adapter]) -> Tuned:
        """Add modules, and let only that have gradients which is trained.

        Args:
            base: on meta, tied, not sharded; it is changed.
            bindings: what the checkpoint offers for it.
            adapters: those of :meth:`folders`, opened.

        Raises:
            ConfigError: something named matches nothing, or cannot be honoured.
            CoverageError: an adapter does not fit the model.
        """
        from shardwise.tuning.selecting import Tuned

        return Tuned(base, base, bindings)


@dataclass(frozen=True, slots=True)
class Full(Tuning):
    """All that the model's class trains."""


@dataclass(frozen=True, slots=True)
class Freeze(Tuning):
    """Some layers, and modules outside of them; all else is frozen.

    Attributes:
        trainable_layers: the last n of the model's layers, or the first n as ``-n``; 0 for none. Of a
            vision-language model, the language model's layers.
        trainable_modules: names of modules inside these layers, as in ``("self_attn", "mlp.down_proj")``; none for
            the layers whole.
        extra_modules: names of modules outside of the layers, as in ``("embed_tokens", "lm_head")``. What is tied
            is trained under all of its names.
    """

    trainable_layers: int = 0
    trainable_modules: tuple[str, ...] = ()
    extra_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count: object = self.trainable_layers
        if not isinstance(count, int) or isinstance(count, bool):
            raise ConfigError(f"trainable_layers={count!r} must be a number of layers, as in trainable_layers=2")
        for name in ("trainable_modules", "extra_modules"):
            value: object = getattr(self, name)
            if not isinstance(value, (tuple, list)) or not all(isinstance(item, str) for item in value):
                example = value if isinstance(value, str) else "lm_head"
                raise ConfigError(f"{name}={value!r} must be a tuple of names: {name}=({example!r},)")
        if self.trainable_modules and not self.trainable_layers:
            raise ConfigError(
                f"trainable_modules={self.trainable_modules!r} are inside of trainable layers, of which there are "
                "none; pass trainable_layers=n, or name what is outside of layers as extra_modules"
            )
        if not self.trainable_layers and not self.extra_modules:
            raise ConfigError("Freeze() trains nothing; pass trainable_layers=n (the last n), or extra_modules")

    def prepare(self, base: PreTrainedModel, bindings: Bindings, _adapters: Mapping[str, Adapter]) -> Tuned:
        from shardwise.tuning.selecting import Tuned, freeze

        freeze(base, self)
        return Tuned(base, base, bindings)


AdapterPlacement: TypeAlias = Literal["sharded", "replicated"]
"""Placement of an adapter's matrices.

``"sharded"``: each in the FSDP2 group of its block, gathered with it. ``"replicated"``: whole on every rank, with
gradients averaged after backward; more memory and less communication, for small adapters and those that change
hands at run time.
"""


class _LoraTuning(Tuning):
    """A LoRA of PEFT's under the name ``adapter``, whose matrices are placed as ``adapters`` says."""

    __slots__ = ()

    adapter: str
    adapters: AdapterPlacement

    def __post_init__(self) -> None:
        if self.adapters not in ("sharded", "replicated"):
            raise ConfigError(
                f"adapters={self.adapters!r} is neither 'sharded' nor 'replicated'; pass one of these"
            )
        name: object = self.adapter
        if not isinstance(name, str) or not name or any(part in name for part in (".", "/", "lora_")):
            raise ConfigError(
                f"adapter={name!r} cannot name an adapter: it becomes a part of its tensors' names, so it is not "
                "empty and has neither a dot, a slash nor lora_ in it"
            )

    def saves(self) -> Selection:
        from shardwise.models.selection import AdapterOnly

        return AdapterOnly(self.adapter)

    def in_words(self, adapters: Mapping[str, Adapter]) -> str:
        from shardwise.tuning import peft_compat

        return repr((peft_compat.in_words(self._config(adapters)), self.adapter, self.adapters))

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:
        from shardwise.tuning import lora, peft_compat

        found, config = adapters.get(self.adapter), self._config(adapters)
        peft_compat.require_supported(config, starts_anew=found is None)
        made = lora.with_lora(base, bindings, config, self.adapter, found)
        return lora.replicated(made) if self.adapters == "replicated" else made

    def _config(self, adapters: Mapping[str, Adapter]) -> LoraConfig:
        return adapters[self.adapter].config


@dataclass(frozen=True, slots=True)
class Lora(_LoraTuning):
    """A new LoRA of PEFT's, and what its config trains beside it (``modules_to_save``, ``bias``).

    Attributes:
        config: PEFT's own; it is copied, and not changed.
        adapter: the adapter's name.
        adapters: where its matrices are.
    """

    config: LoraConfig
    adapter: str = "default"
    adapters: AdapterPlacement = "sharded"

    def _config(self, _adapters: Mapping[str, Adapter]) -> LoraConfig:
        return self.config


@dataclass(frozen=True, slots=True)
class ExistingLora(_LoraTuning):
    """The LoRA in a folder of PEFT's (``adapter_config.json`` and its tensors), to be trained on.

    Attributes:
        directory: the folder. Its config is the adapter's.
        adapter: the name it is to have in the model.
        adapters: where its matrices are.
    """

    directory: str | os.PathLike[str]
    adapter: str = "default"
    adapters: AdapterPlacement = "sharded"

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        return {self.adapter: self.directory}
