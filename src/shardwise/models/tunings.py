"""Tunings, which select the trained parameters: all of a model, some layers, or an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.errors import ConfigError
from shardwise.core.expression import Bindings
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.policies import find_listed_blocks
from shardwise.fsdp.torch_private import get_parameters
from shardwise.fsdp.wrap import TrainedDtype, get_trained_dtype
from shardwise.models import pretrained
from shardwise.models.lora import inject, peft_private
from shardwise.models.lora.former_adapters import rename_adapter
from shardwise.models.lora.inject import StoredAdapter, Tuned, matches, near

if TYPE_CHECKING:
    from peft import LoraConfig


class Tuning:
    """Base class of tunings. By default, all parameters that the model's class trains are trained.

    An object of a custom subclass may be passed as ``tuning``. It is applied on meta, before the model is sharded.
    """

    __slots__ = ()

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        """Return the folders of adapters that are read with the checkpoint, by the adapter's name in the model."""
        return {}

    def comparable_text(self, adapters: Mapping[str, StoredAdapter]) -> str:  # noqa: ARG002
        """Return the settings that must be equal on all ranks, such as the scaling of a LoRA, as text.

        By default ``repr``, or the name of the class if its ``repr`` has an address.
        """
        return type(self).__qualname__ if type(self).__repr__ is object.__repr__ else repr(self)

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, StoredAdapter]) -> Tuned:  # noqa: ARG002
        """Add modules, and set ``requires_grad`` of exactly the trained parameters.

        Args:
            base: the model on meta, tied and not sharded, which is changed.
            bindings: the checkpoint's expressions for it.
            adapters: the opened adapters of :meth:`folders`.

        Raises:
            ConfigError: a name matches nothing, or a setting is not supported.
            KeyMismatchError: an adapter does not fit the model.
        """
        return Tuned(base, base, bindings)


@dataclass(frozen=True, slots=True)
class Full(Tuning):
    """A tuning of all parameters that the model's class trains."""


@dataclass(frozen=True, slots=True)
class Freeze(Tuning):
    """A tuning of some layers, and of modules outside of them. Everything else is frozen.

    Attributes:
        trainable_layers: the last n of the model's layers, the first n if it is ``-n``, or none if it is 0. In a
            vision-language model, these are the language model's layers.
        trainable_modules: names of modules inside these layers, such as ``("self_attn", "mlp.down_proj")``. If
            empty, the complete layers are trained.
        extra_modules: names of modules outside of the layers, such as ``("embed_tokens", "lm_head")``. Tied weights
            are trained under all of their names.
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
                f"trainable_modules={self.trainable_modules!r}: are inside of trainable layers, and there are "
                "none. Pass trainable_layers=n, or extra_modules for modules outside of layers"
            )
        if not self.trainable_layers and not self.extra_modules:
            raise ConfigError("Freeze() trains nothing. Pass trainable_layers=n (the last n), or extra_modules")

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, StoredAdapter]) -> Tuned:  # noqa: ARG002
        # The modules to train: layers, or modules in them, and modules outside of all layers.
        blocks = _find_layers(base) if self.trainable_layers else []
        count = abs(self.trainable_layers)
        if count > len(blocks):
            raise ConfigError(f"trainable_layers={self.trainable_layers}: {type(base).__name__} has {len(blocks)}")
        trained_blocks = blocks[-count:] if self.trainable_layers > 0 else blocks[:count]
        modules = dict(base.named_modules())
        trained = [modules[name] for name in trained_blocks]
        if self.trainable_modules:
            trained = _find_in_layers(modules, trained_blocks, self.trainable_modules)
        everywhere = _find_layers(base, may_lack=True)
        trained += _find_outside(modules, everywhere, self.extra_modules)
        # Parameters that the model's class has frozen stay frozen.
        to_train = {parameter for module in trained for parameter in module.parameters() if parameter.requires_grad}
        for parameter in base.parameters():
            parameter.requires_grad_(parameter in to_train)
        if not to_train:
            raise ConfigError(f"{self} trains nothing of {type(base).__name__}: these modules have no parameters")
        return Tuned(base, base, bindings)


AdapterPlacement: TypeAlias = Literal["sharded", "replicated"]
"""Placement of an adapter's matrices.

``"sharded"``: each in the FSDP2 group of its block. ``"replicated"``: unsharded on every rank, with gradients
averaged after the backward pass. That takes more memory and less communication.
"""


class _LoraTuning(Tuning):
    """Base class of tunings of a PEFT LoRA."""

    __slots__ = ()

    adapter: str
    placement: AdapterPlacement

    def __post_init__(self) -> None:
        if self.placement not in ("sharded", "replicated"):
            raise ConfigError(f"placement={self.placement!r}: is not known. Pass 'sharded' or 'replicated'")
        name: object = self.adapter
        if not isinstance(name, str) or not name or any(token in name for token in (".", "/", "lora_")):
            raise ConfigError(
                f"adapter={name!r}: is not a name that can be part of tensor names. Pass one that is not empty, "
                "without a dot, a slash or lora_"
            )

    def comparable_text(self, adapters: Mapping[str, StoredAdapter]) -> str:
        return repr((peft_private.comparable_text(self._config(adapters)), self.adapter, self.placement))

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, StoredAdapter]) -> Tuned:
        stored, config = adapters.get(self.adapter), self._config(adapters)
        if stored is not None:
            stored = rename_adapter(base, stored)
            config = stored.config
        peft_private.require_supported(config, stored.directory if stored else None)
        is_new, is_replicated = stored is None, self.placement == "replicated"
        return inject.inject_lora(
            base, bindings, config, self.adapter, stored, is_new=is_new, is_replicated=is_replicated
        )

    def _config(self, adapters: Mapping[str, StoredAdapter]) -> LoraConfig:
        return adapters[self.adapter].config


@dataclass(frozen=True, slots=True)
class Lora(_LoraTuning):
    """A tuning of a new PEFT LoRA, including what else its config trains (``modules_to_save``, ``bias``).

    Attributes:
        config: PEFT's config, which is copied and not changed.
        adapter: the adapter's name.
        placement: of its matrices.
    """

    config: LoraConfig
    adapter: str = "default"
    placement: AdapterPlacement = "sharded"

    def _config(self, adapters: Mapping[str, StoredAdapter]) -> LoraConfig:  # noqa: ARG002
        return self.config


@dataclass(frozen=True, slots=True)
class ExistingLora(_LoraTuning):
    """A tuning that continues a LoRA from a PEFT folder (``adapter_config.json`` and its tensors).

    Attributes:
        directory: the folder.
        adapter: the adapter's name in the model.
        placement: of its matrices.
    """

    directory: str | os.PathLike[str]
    adapter: str = "default"
    placement: AdapterPlacement = "sharded"

    def folders(self) -> Mapping[str, str | os.PathLike[str]]:
        return {self.adapter: self.directory}


def _find_layers(model: nn.Module, *, may_lack: bool = False) -> list[str]:
    """Return the names of the model's layers in order. Among several lists, those of the text decoder are chosen.

    Raises:
        ConfigError: there is no list, or the choice is ambiguous. With ``may_lack`` all layers are returned
            instead.
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    count = pretrained.count_text_layers(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is decoder), "")
    lists: dict[str, list[str]] = {}
    for name in find_listed_blocks(model):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == count:  # a single layer, or layers of many classes
            lists.setdefault(prefix + name, [f"{prefix}{name}.{index}" for index in range(count)])
    # The lists of the decoder, and among them those that it has as its own attribute.
    of_decoder = {name: members for name, members in lists.items() if name.startswith(prefix)}
    children = {name: members for name, members in of_decoder.items() if "." not in name.removeprefix(prefix)}
    # Candidates from the narrowest to the widest. A list with as many layers as the config says comes before all.
    nearest = [children, of_decoder] if pretrained.has_other_models(model) else [children, of_decoder, lists]
    if pretrained.is_encoder_decoder(model):
        nearest = [lists]  # the encoder's layers are first, the decoder's last
    else:
        fitting = [{name: members for name, members in level.items() if len(members) == count} for level in nearest]
        nearest = fitting + nearest
    for candidates in nearest:
        if len(candidates) == 1:
            return next(iter(candidates.values()))
    if may_lack:
        return [name for members in lists.values() for name in members]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers. Pass extra_modules to train")
    raise ConfigError(
        f"{type(model).__name__} has several lists of layers ({', '.join(lists)}), and none is known to be the "
        "language model's. Pass those to train as extra_modules"
    )


def _find_in_layers(modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]) -> list[nn.Module]:
    candidates: list[tuple[str, nn.Module]] = []  # by name in the layer
    for name, module in modules.items():
        # layers.3.mlp.down_proj is mlp.down_proj in layers.3.
        inside = (name.removeprefix(f"{block}.") for block in blocks if name.startswith(f"{block}."))
        candidates += [(local, module) for local in inside]
    return _find_modules("trainable_modules: no module of the layers", candidates, names)


def _find_outside(modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]) -> list[nn.Module]:
    full = [name for name in names if name in modules]  # a full name is never ambiguous
    prefixes = tuple(f"{block}." for block in blocks)
    candidates = [(name, each) for name, each in modules.items() if name and not f"{name}.".startswith(prefixes)]
    others = [name for name in names if name not in modules]
    return [modules[name] for name in full] + _find_modules(
        "extra_modules: no module outside of the layers", candidates, others
    )


def _find_modules(none: str, candidates: Sequence[tuple[str, nn.Module]], names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names.

    Raises:
        ConfigError: a name matches nothing.
    """
    for pattern in names:
        if not any(matches(name, pattern) for name, _ in candidates):
            raise ConfigError(f"{none} is named {pattern!r}{near(pattern, [name for name, _ in candidates])}")
    return [module for name, module in candidates if any(matches(name, pattern) for pattern in names)]


def tune(
    base: PreTrainedModel,
    bindings: Bindings,
    tuning: Tuning,
    trained_dtype: TrainedDtype,
    *,
    adapters: Mapping[str, StoredAdapter],
    casts_to: torch.dtype | None,
) -> Tuned:
    """Prepare a model on meta, which is tied and not yet sharded, for training according to ``tuning``.

    Args:
        base: the model, which is changed.
        bindings: the checkpoint's expressions for it.
        tuning: the tuning to apply.
        trained_dtype: that of trained parameters.
        adapters: the adapters from which the tuning starts, by name.
        casts_to: the compute dtype of all parameters, or None for each parameter's own.

    Raises:
        ConfigError: a name matches nothing, or a setting is not supported.
        KeyMismatchError: an existing adapter does not fit the model.
    """
    tuned = tuning.prepare(base, bindings, adapters)
    _recast_trained(tuned.model, trained_dtype, casts_to)
    if not tuned.kept_whole_names:
        return tuned
    parameters = dict(tuned.model.named_parameters(remove_duplicate=False))
    return replace(tuned, kept_whole={parameters[name]: reason for name, reason in tuned.kept_whole_names.items()})


def _recast_trained(model: nn.Module, trained_dtype: TrainedDtype, casts_to: torch.dtype | None) -> None:
    """Change the dtypes of trained parameters, still on meta.

    Raises:
        ConfigError: a module would compute with parameters of two dtypes.
    """
    for item in collect_tensors(model):
        tensor = item.tensor
        if not isinstance(tensor, nn.Parameter):
            continue
        dtype = get_trained_dtype(trained_dtype, tensor.dtype, tensor.requires_grad)
        if dtype != tensor.dtype:
            item.recast(dtype)
    # Otherwise FSDP2 gathers all parameters in one dtype, whatever their own.
    if casts_to is None:
        _require_one_dtype(model)


def _require_one_dtype(model: nn.Module) -> None:
    for name, module in model.named_modules():
        # Codes and scales of 4-bit weights have no dtype to compute in.
        parameters = {
            local: parameter
            for local, parameter in get_parameters(module).items()
            if parameter is not None and parameter.is_floating_point()
        }
        kinds = {(parameter.dtype, parameter.requires_grad) for parameter in parameters.values()}
        if len({dtype for dtype, _ in kinds}) > 1 and len({is_trained for _, is_trained in kinds}) > 1:
            words = ", ".join(f"{local} {parameter.dtype}" for local, parameter in parameters.items())
            raise ConfigError(
                f"{name} would compute with parameters of two dtypes ({words}), and only some are trained. "
                "Pass trained_dtype='unchanged'. On several ranks, "
                "Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=...)) serves as well"
            )
