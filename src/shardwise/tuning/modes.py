"""What of a model is trained, as types: all of it, some of its layers, or an adapter beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from shardwise.conversion import Bindings
    from shardwise.models.selection import Selection
    from shardwise.tuning.lora import Adapter
    from shardwise.tuning.ready_model import Tuned


@runtime_checkable
class Tuning(Protocol):
    """What of a model is trained, and what is put into it for that; carried out on meta, before it is sharded.

    An object of one's own class that answers this may be passed as ``tuning``. What it imports that is slow, it
    imports when it is asked.
    """

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        """Adapters that are read beside the checkpoint: by name in the model, the folder that each is in."""
        ...

    def saves(self) -> Selection:
        """What is saved of a model that was trained so."""
        ...

    def in_words(self, adapters: Mapping[str, Adapter]) -> str:
        """What ranks must have in common, also what no plan shows, such as the scaling of a LoRA."""
        ...

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:
        """Put in what is added, and let only that have gradients which is trained.

        Args:
            base: on meta, tied, not sharded; it is changed.
            bindings: what the checkpoint offers for it.
            adapters: those of :meth:`folders`, opened.

        Raises:
            ConfigError: something named matches nothing, or cannot be honoured.
            CoverageError: an adapter does not fit the model.
        """
        ...


class _OfTheModel:
    """What a tuning answers that adds nothing."""

    __slots__ = ()

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        return {}

    def saves(self) -> Selection:
        from shardwise.models.selection import Everything

        return Everything()

    def in_words(self, _adapters: Mapping[str, Adapter]) -> str:
        return repr(self)


@dataclass(frozen=True, slots=True)
class Full(_OfTheModel):
    """All that the model's class trains."""

    def prepare(self, base: PreTrainedModel, bindings: Bindings, _adapters: Mapping[str, Adapter]) -> Tuned:
        from shardwise.tuning.ready_model import Tuned

        return Tuned(base, base, bindings)


@dataclass(frozen=True, slots=True)
class Freeze(_OfTheModel):
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
        from shardwise.tuning.ready_model import Tuned
        from shardwise.tuning.selecting import freeze

        freeze(base, self)
        return Tuned(base, base, bindings)


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
        _require_placed(self.adapter, self.adapters)

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        return {}

    def saves(self) -> Selection:
        return _adapter_only(self.adapter)

    def in_words(self, _adapters: Mapping[str, Adapter]) -> str:
        from shardwise.tuning import peft_compat

        return repr((peft_compat.in_words(self.config), self.adapter, self.adapters))

    def prepare(self, base: PreTrainedModel, bindings: Bindings, _adapters: Mapping[str, Adapter]) -> Tuned:
        from shardwise.tuning import lora, peft_compat

        peft_compat.require_supported(self.config, starts_anew=True)
        made = lora.with_lora(base, bindings, self.config, self.adapter, None)
        return lora.replicated(made) if isinstance(self.adapters, Replicated) else made


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
        _require_placed(self.adapter, self.adapters)

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        return {self.adapter: self.directory}

    def saves(self) -> Selection:
        return _adapter_only(self.adapter)

    def in_words(self, adapters: Mapping[str, Adapter]) -> str:
        from shardwise.tuning import peft_compat

        config = adapters[self.adapter].config
        return repr((peft_compat.in_words(config), self.adapter, self.adapters))

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:
        from shardwise.tuning import lora, peft_compat

        found = adapters[self.adapter]
        peft_compat.require_supported(found.config, starts_anew=False)
        made = lora.with_lora(base, bindings, found.config, self.adapter, found)
        return lora.replicated(made) if isinstance(self.adapters, Replicated) else made


AnyTuning: TypeAlias = Full | Freeze | Lora | ExistingLora | Tuning
"""Those that there are, and any other."""


def _adapter_only(adapter: str) -> Selection:
    from shardwise.models.selection import AdapterOnly

    return AdapterOnly(adapter)


def _require_placed(adapter: object, placement: object) -> None:
    if not isinstance(placement, (InBlocks, Replicated)):
        raise ConfigError(f"adapters={placement!r} is neither InBlocks() nor Replicated(); pass one of these")
    if not isinstance(adapter, str) or not adapter or "." in adapter or "/" in adapter or "lora_" in adapter:
        raise ConfigError(
            f"adapter={adapter!r} cannot name an adapter: it becomes a part of its tensors' names, so it is not "
            "empty and has neither a dot, a slash nor lora_ in it"
        )
