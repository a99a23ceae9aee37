"""Tensors of a model's state by their names in files, and the deltas of PEFT adapters."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.errors import ConfigError, ShardingError
from shardwise.layout import ModelLayout
from shardwise.models.torch_api import parameters_of
from shardwise.models.view import TensorRef, canonical, saved_names


@dataclass(frozen=True, slots=True)
class AdapterOnly:
    """One adapter of a PEFT model, by the names that PEFT's files have, in which the adapter's own is left out.

    PEFT decides which tensors belong to it: LoRA matrices, ``modules_to_save``, resized embeddings.
    """

    adapter: str = "default"


Selection: TypeAlias = AdapterOnly | None
"""Tensors of a state: one adapter, or all parameters and persistent buffers (None)."""

_IN_PEFT_MODEL = "base_model.model."


def names_outside(model: nn.Module, held: Sequence[TensorRef], selection: Selection) -> dict[str, str]:
    """Every name of the state, to the canonical FQN of its tensor, in order.

    ``AdapterOnly`` may have PEFT query the hub for the vocabulary size of the base model.

    Raises:
        ConfigError: the model has no such adapter.
        ShardingError: PEFT changes tensors, rather than choosing and renaming them.
    """
    inside = saved_names(model, held)
    if selection is None:
        return _plain({name: canonical(name) for name in inside})
    return _as_peft_names_them(model, inside, selection.adapter)


def _as_peft_names_them(model: nn.Module, inside: Mapping[str, TensorRef], adapter: str) -> dict[str, str]:
    """PEFT is called with stand-ins, which are recognized in its result by identity."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or adapter not in adapters:
        has = f"Adapters: {', '.join(adapters) or 'none'}" if isinstance(adapters, Mapping) else "It has none"
        raise ConfigError(f"AdapterOnly(adapter={adapter!r}): {type(model).__name__} has no such adapter. {has}")
    stand_ins = {
        name: torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device="meta")
        for name, item in inside.items()
    }
    known = {id(stand_in): canonical(name) for name, stand_in in stand_ins.items()}
    chosen = _ask_peft(model, stand_ins, adapter)
    changed = [name for name, tensor in chosen.items() if id(tensor) not in known]
    if changed:
        raise ShardingError(
            f"PEFT computes {changed[0]} ({len(changed)} in all) when it saves adapter {adapter!r}: it is not "
            "a tensor of the model. Pass only=None for the whole state"
        )
    # PEFT's files have names as in PEFT's model, also where transformers has added the adapter to its own.
    prefix = "" if hasattr(model, "get_base_model") else _IN_PEFT_MODEL
    return _plain({prefix + name: known[id(tensor)] for name, tensor in chosen.items()})


def _plain(names: Mapping[str, str]) -> dict[str, str]:
    """The same by canonical names.

    Raises:
        ShardingError: two names are equal without wrapper prefixes.
    """
    found: dict[str, str] = {}
    for name, fqn in names.items():
        plain = canonical(name)
        if plain in found:
            raise ShardingError(
                f"{name}: another tensor is named {plain} without the parts of wrappers. Rename a module, since a "
                "state has one tensor for a name"
            )
        found[plain] = fqn
    return found


def _ask_peft(model: Any, state: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict  # optional, and slow to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
        # PEFT 0.20 looks for the config of a base that has no name, too.
        warnings.filterwarnings("ignore", message="Could not find a config file in  - will assume")
        chosen: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    return chosen


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters, so that its tensors differ from its class's checkpoints."""
    return hasattr(model, "peft_config")


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """The base of a PEFT model, under its own names, with one LoRA of linear layers merged in.

    Attributes:
        adapter: which one.
    """

    adapter: str = "default"


@dataclass(frozen=True, slots=True)
class Factors:
    """The matrices of one adapted weight, by FQN: ``weight + scaling * (lora_B @ lora_A)``."""

    lora_A: str
    lora_B: str
    scaling: float

    def delta(self, lora_A: torch.Tensor, lora_B: torch.Tensor) -> torch.Tensor:
        """Return the delta of a part of the weight, from rows of ``lora_B`` and columns of ``lora_A``.

        As ``get_delta_weight`` of PEFT has it: products of 16-bit numbers are summed up in float32 on a CPU.
        """
        dtype = lora_B.dtype
        if dtype in (torch.float16, torch.bfloat16) and lora_B.device.type == "cpu":
            lora_A, lora_B = lora_A.float(), lora_B.float()
        return ((lora_B @ lora_A) * self.scaling).to(dtype)


@dataclass(frozen=True)
class Adapted:
    """A model without its adapter.

    Attributes:
        base: the model that was adapted.
        inside: by name in ``base``, the FQN that the tensor has in the adapted model.
        factors: by name in ``base``, of the weights that the adapter changes.
    """

    base: nn.Module
    inside: dict[str, str]
    factors: dict[str, Factors]

    def layout(self, layout: ModelLayout) -> ModelLayout:
        """Return the layout of the base under its own names."""
        outside: dict[str, list[str]] = {}
        for name, fqn in self.inside.items():
            outside.setdefault(fqn, []).append(name)
        tensors = []
        for item in layout.tensors:
            names = tuple(name for fqn in item.names for name in outside.get(fqn, ()))
            if names:
                tensors.append(replace(item, names=names))
        return ModelLayout(tuple(tensors))


def without_adapter(model: Any, names: Sequence[str], adapter: str) -> Adapted:
    """Return the base of a PEFT model, and the delta of its LoRA. ``names`` are all of the model's tensors.

    Raises:
        ConfigError: there is no such adapter, or it has parts other than LoRA matrices of linear layers.
    """
    from peft.tuners.lora import Linear  # optional, and slow to import
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if adapter not in getattr(model, "peft_config", {}):
        raise ConfigError(f"{type(model).__name__} has no adapter {adapter!r} of PEFT's")
    base = model.get_base_model()
    modules = {canonical(name): module for name, module in model.named_modules()}
    prefix = next(f"{name}." for name, module in modules.items() if module is base)
    layers: dict[str, Any] = {}
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in parameters_of(module).values():
            owners.setdefault(id(parameter), []).append(name)
    for name, module in modules.items():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ConfigError(f"{name} is trained whole (modules_to_save), and cannot be merged. Use PEFT's merge")
        if isinstance(module, BaseTunerLayer):
            layers[name] = module
            if why := _why_not(module, adapter, Linear):
                raise ConfigError(f"{name} {why}, which cannot be merged here. Merge the adapter with PEFT first")
            tied = [other for other in owners[id(module.get_base_layer().weight)] if other != f"{name}.base_layer"]
            if tied and adapter in layers[name].lora_A:
                raise ConfigError(
                    f"{name} is tied to {tied[0]}, which a merge would change, too. Take it out of target_modules, "
                    "or merge the saved adapter with shardwise.merge_adapter, which changes both"
                )
    inside: dict[str, str] = {}
    for name in names:
        parts = name.split(".")
        parents = (".".join(parts[:count]) for count in range(1, len(parts)))
        owner = next((parent for parent in parents if parent in layers), None)
        if owner is None:
            inside[name.removeprefix(prefix)] = name
        elif name.startswith(f"{owner}.base_layer."):
            inside[f"{owner}.{name.removeprefix(f'{owner}.base_layer.')}".removeprefix(prefix)] = name
    factors = {
        f"{name}.weight".removeprefix(prefix): Factors(
            f"{name}.lora_A.{adapter}.weight", f"{name}.lora_B.{adapter}.weight", layer.scaling[adapter]
        )
        for name, layer in layers.items()
        if adapter in layer.lora_A
    }
    return Adapted(base, inside, factors)


def _why_not(layer: Any, adapter: str, linear: Any) -> str:
    """Return the reason why a layer's adapter is not a plain LoRA of a linear layer, or ""."""
    from shardwise.models.four_bit_layers import is_in_four_bits  # for a base in four bits alone

    base = layer.get_base_layer()
    is_linear = isinstance(layer, linear) or (hasattr(layer, "lora_A") and is_in_four_bits(base))
    if not is_linear or not isinstance(base, nn.Linear):
        return f"is adapted as {type(layer).__name__} of {type(layer.get_base_layer()).__name__}"
    if layer.merged:
        return f"has {', '.join(layer.merged_adapters)} merged in already"
    if adapter in getattr(layer, "lora_variant", {}) or layer.use_dora.get(adapter):
        return "is adapted by a variant of LoRA"
    if layer.lora_bias.get(adapter):
        return "has a bias of LoRA's"
    return ""


def parameters_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The parameters that sit in each module itself, in its order, by the module's name."""
    return {
        canonical(prefix): tuple(name for name, parameter in parameters_of(module).items() if parameter is not None)
        for prefix, module in model.named_modules(remove_duplicate=False)
    }


def modules_of_columns(model: nn.Module) -> frozenset[str]:
    """Return the modules whose weights are (in, out) or (experts, in, out) instead of (out, in), for PEFT."""
    return frozenset(
        canonical(prefix)
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True
    )
