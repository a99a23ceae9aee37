"""Tunings, which select the trained parameters: all of a model, some layers, or an adapter."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.core.computed import Bindings
from shardwise.core.errors import ConfigError
from shardwise.fsdp.named_tensors import collect_tensors
from shardwise.fsdp.policies import listed_blocks
from shardwise.fsdp.torch_private import get_parameters
from shardwise.fsdp.wrap import TrainedDtype, get_trained_dtype
from shardwise.models import pretrained
from shardwise.models.lora import inject, peft_private
from shardwise.models.lora.former_adapters import rename_adapter
from shardwise.models.lora.inject import Adapter, Tuned, matches, near
from shardwise.models.selection import AdapterOnly, Selection

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

    def saves(self) -> Selection:
        """Return the part of the trained model that is saved."""
        return None

    def comparable_text(self, adapters: Mapping[str, Adapter]) -> str:  # noqa: ARG002
        """Return the settings that must be equal on all ranks, such as the scaling of a LoRA, as text."""
        return repr(self)

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:  # noqa: ARG002
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
                f"trainable_modules={self.trainable_modules!r} are inside of trainable layers, of which there are "
                "none. Pass trainable_layers=n, or name what is outside of layers as extra_modules"
            )
        if not self.trainable_layers and not self.extra_modules:
            raise ConfigError("Freeze() trains nothing. Pass trainable_layers=n (the last n), or extra_modules")

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:  # noqa: ARG002
        freeze(base, self)
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
            raise ConfigError(
                f"placement={self.placement!r} is neither 'sharded' nor 'replicated'. Pass one of these"
            )
        name: object = self.adapter
        if not isinstance(name, str) or not name or any(token in name for token in (".", "/", "lora_")):
            raise ConfigError(
                f"adapter={name!r} cannot name an adapter: it becomes a part of its tensors' names, so it must "
                "not be empty, and must not contain a dot, a slash or lora_"
            )

    def saves(self) -> Selection:
        return AdapterOnly(self.adapter)

    def comparable_text(self, adapters: Mapping[str, Adapter]) -> str:
        return repr((peft_private.comparable_text(self._config(adapters)), self.adapter, self.placement))

    def prepare(self, base: PreTrainedModel, bindings: Bindings, adapters: Mapping[str, Adapter]) -> Tuned:
        found, config = adapters.get(self.adapter), self._config(adapters)
        if found is not None:
            found = rename_adapter(base, found)
            config = found.config
        peft_private.require_supported(config, is_new=found is None)
        made = inject.with_lora(base, bindings, config, self.adapter, found, is_new=found is None)
        return inject.replicated(made) if self.placement == "replicated" else made

    def _config(self, adapters: Mapping[str, Adapter]) -> LoraConfig:
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

    def _config(self, adapters: Mapping[str, Adapter]) -> LoraConfig:  # noqa: ARG002
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


def freeze(model: nn.Module, mode: Freeze) -> None:
    """Set ``requires_grad`` of every parameter.

    Raises:
        ConfigError: a name matches nothing (the error contains the nearest names), or there are not enough layers.
    """
    blocks = _layers(model) if mode.trainable_layers else []
    count = abs(mode.trainable_layers)
    if count > len(blocks):
        raise ConfigError(f"trainable_layers={mode.trainable_layers}: {type(model).__name__} has {len(blocks)}")
    chosen = blocks[-count:] if mode.trainable_layers > 0 else blocks[:count]
    modules = dict(model.named_modules())
    trained = [modules[name] for name in chosen]
    if mode.trainable_modules:
        trained = _modules_in_layers(modules, chosen, mode.trainable_modules)
    everywhere = _layers(model, may_lack=True)
    trained += _outside(modules, everywhere, mode.extra_modules)
    # Parameters that the model's class has frozen stay frozen.
    wanted = {parameter for module in trained for parameter in module.parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in wanted)
    if not wanted:
        raise ConfigError(f"{mode} trains nothing of {type(model).__name__}: what it names has no parameters")


def _layers(model: nn.Module, *, may_lack: bool = False) -> list[str]:
    """Return the names of the model's layers in order. Among several lists, those of the text decoder are chosen.

    Raises:
        ConfigError: there is no list, or the choice is ambiguous. With ``may_lack`` all layers are returned
            instead.
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
    wanted = pretrained.text_layers(model)
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is decoder), "")
    lists: dict[str, list[str]] = {}
    for name in listed_blocks(model):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    for name, module in decoder.named_children():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:  # a single layer, or layers of many classes
            lists.setdefault(prefix + name, [f"{prefix}{name}.{index}" for index in range(wanted)])
    of_decoder = {name: members for name, members in lists.items() if name.startswith(prefix)}
    own = {name: members for name, members in of_decoder.items() if "." not in name.removeprefix(prefix)}
    nearest = [own, of_decoder] if pretrained.has_other_models(model) else [own, of_decoder, lists]
    if pretrained.is_encoder_decoder(model):
        nearest = [lists]  # the encoder's layers are first, the decoder's last
    else:
        nearest = [{name: near[name] for name in near if len(near[name]) == wanted} for near in nearest] + nearest
    for candidates in nearest:
        if len(candidates) == 1:
            return next(iter(candidates.values()))
    if may_lack:
        return [name for members in lists.values() for name in members]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of layers. Name what is trained as extra_modules")
    raise ConfigError(
        f"{type(model).__name__} has several lists of layers ({', '.join(lists)}), and it is not known which "
        "are the language model's. Name what is trained of them as extra_modules"
    )


def _modules_in_layers(
    modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]
) -> list[nn.Module]:
    candidates = [
        (name.removeprefix(f"{block}."), module)
        for name, module in modules.items()
        for block in blocks
        if name.startswith(f"{block}.")
    ]
    return _named("trainable_modules: no module of the layers", candidates, names)


def _outside(modules: dict[str, nn.Module], blocks: Sequence[str], names: Sequence[str]) -> list[nn.Module]:
    full = [name for name in names if name in modules]  # a full name is never ambiguous
    candidates = [
        (name, module)
        for name, module in modules.items()
        if name and not any(f"{name}.".startswith(f"{block}.") for block in blocks)
    ]
    others = [name for name in names if name not in modules]
    return [modules[name] for name in full] + _named(
        "extra_modules: no module outside of the layers", candidates, others
    )


def _named(none: str, candidates: Sequence[tuple[str, nn.Module]], names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names.

    Raises:
        ConfigError: a name matches nothing.
    """
    for wanted in names:
        if not any(matches(name, wanted) for name, _ in candidates):
            raise ConfigError(f"{none} is named {wanted!r}{near(wanted, [name for name, _ in candidates])}")
    return [module for name, module in candidates if any(matches(name, wanted) for wanted in names)]


def tune(
    base: PreTrainedModel,
    bindings: Bindings,
    tuning: Tuning,
    trained_dtype: TrainedDtype,
    *,
    adapters: Mapping[str, Adapter],
    casts_to: torch.dtype | None = None,
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
    made = tuning.prepare(base, bindings, adapters)
    _recast(made.model, trained_dtype, casts_to)
    if not made.stays_whole:
        return made
    parameters = dict(made.model.named_parameters(remove_duplicate=False))
    return replace(made, whole={parameters[name]: reason for name, reason in made.stays_whole.items()})


def _recast(model: nn.Module, trained_dtype: TrainedDtype, casts_to: torch.dtype | None) -> None:
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
    if casts_to is None:
        _require_one_dtype(model)


def _require_one_dtype(model: nn.Module) -> None:
    for name, module in model.named_modules():
        own = {local: parameter for local, parameter in get_parameters(module).items() if parameter is not None}
        kinds = {(parameter.dtype, parameter.requires_grad) for parameter in own.values()}
        if len({dtype for dtype, _ in kinds}) > 1 and len({is_trained for _, is_trained in kinds}) > 1:
            words = ", ".join(f"{local} {parameter.dtype}" for local, parameter in own.items())
            raise ConfigError(
                f"{name} would compute with parameters of two dtypes ({words}), and only some are trained. "
                "Pass Sharding(mp_policy=MixedPrecisionPolicy(param_dtype=...)), or trained_dtype='unchanged'"
            )
