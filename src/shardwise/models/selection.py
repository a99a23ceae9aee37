"""Names of a model's tensors in state dicts and files, and the deltas of PEFT adapters."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.formatting import canonical_name
from shardwise.core.layout import LoraFactors, ModelLayout
from shardwise.fsdp.named_tensors import TensorRef, map_saved_names
from shardwise.fsdp.torch_private import get_parameters, original_class


@dataclass(frozen=True, slots=True)
class AdapterOnly:
    """One adapter of a PEFT model, under the names in PEFT's files, which do not contain the adapter's name.

    PEFT decides which tensors belong to it: LoRA matrices, ``modules_to_save``, resized embeddings.
    """

    adapter: str = "default"


Selection: TypeAlias = AdapterOnly | None
"""Tensors of a state dict: one adapter, or all parameters and persistent buffers (None)."""

_IN_PEFT_MODEL = "base_model.model."


def names_outside(model: nn.Module, tensors: Sequence[TensorRef], selection: Selection) -> dict[str, str]:
    """Return the canonical FQNs of the selected tensors by their names in the state dict, in order.

    For ``AdapterOnly``, PEFT may query the hub for the vocabulary size of the base model.

    Raises:
        ConfigError: the model has no such adapter.
        ShardingError: PEFT computes tensors instead of selecting and renaming them.
    """
    inside = map_saved_names(model, tensors)
    if selection is None:
        return _to_canonical_keys({name: canonical_name(name) for name in inside})
    return _names_in_peft(model, inside, selection.adapter)


def _names_in_peft(model: nn.Module, inside: Mapping[str, TensorRef], adapter: str) -> dict[str, str]:
    """Call PEFT with meta tensors, and find these in its result by identity."""
    adapters = getattr(model, "peft_config", None)
    if not isinstance(adapters, Mapping) or adapter not in adapters:
        has = f"Adapters: {', '.join(adapters) or 'none'}" if isinstance(adapters, Mapping) else "It has none"
        raise ConfigError(f"AdapterOnly(adapter={adapter!r}): {type(model).__name__} has no such adapter. {has}")
    if adapters[adapter].is_prompt_learning:
        # Before PEFT computes it, which fails on shards.
        raise _computed_by_peft("prompt_embeddings", 1, adapter)
    stand_ins = {
        name: torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device="meta")
        for name, item in inside.items()
    }
    # PEFT puts the tensors that it selects into its result as they are. It has computed any other object.
    known = {id(stand_in): canonical_name(name) for name, stand_in in stand_ins.items()}
    chosen = _peft_state_dict(model, stand_ins, adapter)
    changed = [name for name, tensor in chosen.items() if id(tensor) not in known]
    if changed:
        raise _computed_by_peft(changed[0], len(changed), adapter)
    # Files have the names of PEFT's model, even if transformers has added the adapter to its own model.
    prefix = "" if hasattr(model, "get_base_model") else _IN_PEFT_MODEL
    return _to_canonical_keys({prefix + name: known[id(tensor)] for name, tensor in chosen.items()})


def _computed_by_peft(name: str, count: int, adapter: str) -> ShardingError:
    return ShardingError(
        f"{name} ({count} in all): is not a tensor of the model, but computed by PEFT when it saves adapter "
        f"{adapter!r}. Save the whole model: shardwise.save(model, folder, names='internal'), or pass only=None"
    )


def _to_canonical_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Make the keys canonical.

    Raises:
        ShardingError: two names are equal without wrapper prefixes.
    """
    fqns: dict[str, str] = {}
    for name, fqn in names.items():
        plain = canonical_name(name)
        if plain in fqns:
            raise ShardingError(
                f"{name}: another tensor is named {plain} without wrapper prefixes, too. Rename one of the modules"
            )
        fqns[plain] = fqn
    return fqns


def _peft_state_dict(model: Any, state: dict[str, torch.Tensor], adapter: str) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict  # optional, and slow to import

    # On a model under tensor parallelism PEFT gathers all tensors of the state, as it does not know stand-ins.
    with warnings.catch_warnings(), mock.patch.object(model, "_tp_size", None, create=True):
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers` to `True`")
        # PEFT 0.20 also looks for the config of a base without a name.
        warnings.filterwarnings("ignore", message="Could not find a config file in  - will assume")
        chosen: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    return chosen


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has PEFT adapters, so that its tensors differ from its class's checkpoints."""
    return hasattr(model, "peft_config")


@dataclass(frozen=True, slots=True)
class MergedAdapter:
    """The base of a PEFT model, under its own names, with one LoRA of linear layers merged into it."""

    adapter: str = "default"


@dataclass(frozen=True)
class Adapted:
    """A model without its adapter.

    Attributes:
        base: the model that was adapted.
        inside: FQNs in the adapted model by names in ``base``.
        factors: matrices of adapted weights by names in ``base``.
    """

    base: nn.Module
    inside: dict[str, str]
    factors: dict[str, LoraFactors]

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


MERGE_FILES = "Save the adapter with shardwise.save_adapter, and merge the files with shardwise.merge_adapter"
"""Remedy for an adapter that a sharded or a 4-bit model cannot merge."""


def without_adapter(model: Any, names: Sequence[str], adapter: str) -> Adapted:
    """Return the base of a PEFT model, and the matrices of its LoRA. ``names`` are those of the model's tensors.

    Raises:
        ConfigError: there is no such adapter, or it has other parts than LoRA matrices of linear layers.
    """
    from peft.tuners.lora import Linear, ParamWrapper  # optional, and slow to import
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if adapter not in getattr(model, "peft_config", {}):
        raise ConfigError(f"{type(model).__name__} has no adapter {adapter!r} of PEFT's")
    # The base, by its place in PEFT's model, and the modules that own each parameter: a tied one has several.
    base = model.get_base_model()
    modules = {canonical_name(name): module for name, module in model.named_modules()}
    prefix = next(f"{name}." for name, module in modules.items() if module is base)
    layers: dict[str, Any] = {}
    owners: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in get_parameters(module).values():
            owners.setdefault(id(parameter), []).append(name)
    # Only pairs of matrices are merged, and only into weights that nothing else uses.
    for name, module in modules.items():
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ConfigError(f"{name} is in modules_to_save, which cannot be merged here. {MERGE_FILES}")
        if isinstance(module, BaseTunerLayer):
            layers[name] = module
            if why := _merge_obstacle(module, adapter, Linear, ParamWrapper):
                raise ConfigError(
                    f"{name} {why}, which cannot be merged here. {MERGE_FILES} (lora_bias: with PEFT)"
                )
            weight = getattr(module.get_base_layer(), _adapted_parameter(module))
            tied = [other for other in owners[id(weight)] if modules[other] is not module.get_base_layer()]
            if tied and adapter in layers[name].lora_A:
                raise ConfigError(
                    f"{name} is tied to {tied[0]}, which a merge would change, too. Take it out of target_modules, "
                    "or merge the saved adapter with shardwise.merge_adapter, which unties them"
                )
    # In an adapted layer, q_proj.base_layer.weight is q_proj.weight in the base, and q_proj.lora_A is not in it.
    # Layers of several parameters of a module are in each other (experts.base_layer.base_layer.down_proj), and the
    # innermost owns a tensor. Other tensors keep their names.
    inside: dict[str, str] = {}
    for name in names:
        path = name.split(".")
        parents = (".".join(path[:count]) for count in range(len(path) - 1, 0, -1))
        owner = next((parent for parent in parents if parent in layers), None)
        if owner is None:
            inside[name.removeprefix(prefix)] = name
        elif name.startswith(f"{owner}.base_layer."):
            inside[name.replace(".base_layer", "").removeprefix(prefix)] = name
    # For each adapted weight, by its name in the base, the names of its matrices in PEFT's model.
    factors: dict[str, LoraFactors] = {}
    for name, layer in layers.items():
        if adapter in layer.lora_A:
            lora_A, lora_B = (f"{name}.{half}.{adapter}.weight" for half in ("lora_A", "lora_B"))
            base_layer, parameter = layer.get_base_layer(), _adapted_parameter(layer)
            # PEFT computes a stack of one expert as a matrix.
            experts = count if (count := getattr(layer, "num_experts", 0)) > 1 else 0
            is_transposed = experts > 0 and getattr(base_layer, "is_transposed", False) is True
            owner = name.replace(".base_layer", "").removeprefix(prefix)
            factors[f"{owner}.{parameter}"] = LoraFactors(
                lora_A, lora_B, layer.scaling[adapter], experts, is_transposed
            )
    return Adapted(base, inside, factors)


def _adapted_parameter(layer: Any) -> str:
    """Return the local name of the parameter that one of PEFT's layers adapts."""
    return getattr(layer, "parameter_name", "weight")


def _merge_obstacle(layer: Any, adapter: str, linear: Any, of_parameter: Any) -> str:
    """Return the reason why a layer's adapter is not a plain LoRA of a linear layer or of experts, or ""."""
    from shardwise.models.four_bit.layers import is_in_four_bits  # only for a base in four bits

    base = layer.get_base_layer()
    is_linear = isinstance(layer, linear) or (hasattr(layer, "lora_A") and is_in_four_bits(base))
    if not isinstance(layer, of_parameter) and not (is_linear and isinstance(base, nn.Linear)):
        return f"is an adapted {original_class(base).__name__}"
    if layer.merged:
        return f"has {', '.join(layer.merged_adapters)} merged in already"
    if adapter in getattr(layer, "lora_variant", {}) or layer.use_dora.get(adapter):
        return "is adapted by a variant of LoRA"
    if layer.lora_bias.get(adapter):
        return "has a bias (lora_bias)"
    return ""


def parameters_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the local names of each module's own parameters, by the module's name."""
    names: dict[str, tuple[str, ...]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        parameters = get_parameters(module).items()
        names[canonical_name(prefix)] = tuple(name for name, parameter in parameters if parameter is not None)
    return names


def find_transposed_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of modules whose weights are (in, out) or (experts, in, out) instead of (out, in)."""
    names: set[str] = set()
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False) is True:
            names.add(canonical_name(prefix))
    return frozenset(names)
