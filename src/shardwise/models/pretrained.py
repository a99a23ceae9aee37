"""The one file that knows transformers' unexported functions and attributes, and what transformers says of a model.

Checked with transformers 5.17 and 5.23. When a release moves one of these names, this file is what changes:
one that is gone is an error when it is imported, and what each means is asserted by ``tests/canary``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from shardwise.errors import ConfigError, KnownNames
from shardwise.models.torch_words import original_class, original_classes, parameters_of

with KnownNames("transformers", "5.17 to 5.23"):
    from transformers import initialization as hf_init
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        revert_weight_conversion,
    )
    from transformers.core_model_loading import rename_source_key as _rename_source_key
    from transformers.distributed.fsdp import is_fsdp_enabled
    from transformers.dynamic_module_utils import custom_object_save
    from transformers.modeling_utils import _get_tied_weight_keys
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_factory import _get_model_class
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.monkey_patching import patch_output_recorders
    from transformers.utils.loading_report import LoadStateDictInfo

    for _owner, _names in (
        (hf_init, ("TORCH_INIT_FUNCTIONS", "guard_torch_init_functions", "no_init_weights")),
        (PreTrainedModel, ("_from_config", "_get_dtype_plan", "_no_split_modules", "get_init_context")),
        (PreTrainedModel, ("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected")),
        (PreTrainedModel, ("_keys_to_ignore_on_save", "initialize_weights", "is_remote_code", "tie_weights")),
        (PreTrainedModel, ("_load_pretrained_model", "_move_missing_keys_from_meta_to_device")),
    ):
        for _name in _names:
            getattr(_owner, _name)

__all__ = ["dot_natural_key"]


def is_pretrained(module: nn.Module) -> bool:
    """Whether this is a model of transformers, to which its rules apply."""
    return isinstance(module, PreTrainedModel)


def base_model_prefix(model: nn.Module) -> str | None:
    """The prefix by which a head's checkpoint differs from its base model's."""
    return model.base_model_prefix if isinstance(model, PreTrainedModel) else None


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Name to name it is tied to, as the class and config declare; empty for other modules."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def settings_of(model: nn.Module) -> dict[str, str]:
    """What a model's config says, but for where it came from; by name, as text. Nothing for other modules."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {}
    told = {**config.to_dict(), "attn_implementation": attention_of(model)}
    return {name: repr(value) for name, value in sorted(told.items()) if name != "_name_or_path"}


def text_layers(model: nn.Module) -> int | None:
    """How many layers the model's text part has, by its config; None where that does not say."""
    found = getattr(_text_config(model), "num_hidden_layers", None)
    return found if isinstance(found, int) else None


def text_decoder(model: nn.Module) -> nn.Module:
    """The module that has the layers of the model's text part (``get_decoder``); other models are their own."""
    return model.get_decoder() if isinstance(model, PreTrainedModel) else model


def has_other_parts(model: nn.Module) -> bool:
    """Whether the config has parts beside the text, such as that of a vision tower."""
    return _text_config(model) is not getattr(model, "config", None)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the layers are those of an encoder and of a decoder."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def _text_config(model: nn.Module) -> object:
    """The config of the text part; None where there are several."""
    config = getattr(model, "config", None)
    try:
        return config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    except ValueError:
        return None


def kept_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """The dtype that a name is kept in, in a model of ``dtype``; None where nothing is said of it."""
    plan = dtype_plan(model, dtype)
    return lambda name: planned_dtype(plan, name)


def mark_loaded(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Leave the marks by which a later ``initialize_weights`` passes over what is loaded."""
    if outermost_pretrained(model):
        for tensor in tensors:
            mark_initialized(tensor)


def progress_bars_enabled() -> bool:
    """transformers' own switch (``transformers.utils.logging.disable_progress_bar``)."""
    return bool(hf_logging.is_progress_bar_enabled())


def conversion_transforms(model: nn.Module, key_mapping: Mapping[str, str] | None) -> list[Any]:
    """The renames and converters for a model, those of ``key_mapping`` (regex to replacement) first."""
    mapping = dict(key_mapping) if key_mapping else None
    if isinstance(model, PreTrainedModel):
        with original_classes(model):
            return list(get_model_conversion_mapping(model, mapping))
    return [WeightRenaming(source, target) for source, target in (mapping or {}).items()]


def split_transforms(transforms: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(renames, converters), each in order."""
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    return renamings, [item for item in transforms if isinstance(item, WeightConverter)]


def rename_source_key(
    key: str,
    renamings: list[Any],
    converters: list[Any],
    base_model_prefix: str | None,
    names: Mapping[str, object],
) -> tuple[str, str | None]:
    """The name a key leads to, and the source pattern of the converter that matched."""
    return _rename_source_key(
        source_key=key,
        weight_renamings=renamings,
        weight_converters=converters,
        base_model_prefix=base_model_prefix,
        meta_state_dict=cast("dict[str, Any]", names),
    )


def convert(converter: Any, target: str, sources: Mapping[str, list[torch.Tensor]], model: Any) -> dict[str, Any]:
    """Run a converter on whole tensors, by source pattern; the outcome by full name."""
    fresh = deepcopy(converter)
    for pattern, tensors in sources.items():
        for tensor in tensors:
            fresh.add_tensor(target, pattern, pattern, tensor)
    made = fresh.convert(target, model=model, config=getattr(model, "config", None))
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def models_of(auto_class: Any) -> Any:
    """The mapping from config classes to model classes of an Auto class; None for anything else."""
    return getattr(auto_class, "_model_mapping", None)


def ignore_patterns(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Regexes of (missing, unexpected) names that the model class passes over on purpose.

    The additions for rotary frequencies and position ids are those of ``_adjust_missing_and_unexpected_keys``.
    """
    if not isinstance(model, PreTrainedModel):
        return (), ()
    missing = tuple(sorted(model._keys_to_ignore_on_load_missing or ()))
    unexpected = tuple(sorted(model._keys_to_ignore_on_load_unexpected or ()))
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected += (r"rotary_emb\.inv_freq",)
    if any(name.endswith("position_ids") for name in buffers):
        unexpected += (r"(^|\.)position_ids$",)
    return missing, unexpected


# Building on meta


def own_config_class(model_class: Any, directory: Path) -> type[PreTrainedConfig] | None:
    """The config class of a model class, where it reads the config in a folder and not the class that Auto knows.

    Raises:
        OSError: there is no config.
    """
    if not (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)):
        return None
    kind = model_class.config_class
    if kind is None or kind is PreTrainedConfig:
        return None
    content, _ = PreTrainedConfig.get_config_dict(directory)
    named = content.get("model_type")
    return kind if named == kind.model_type or named not in CONFIG_MAPPING else None


def registered_model_class(config: PreTrainedConfig, names: Collection[str]) -> Any:
    """A class of one of these names that a user has registered for a config with an Auto class, if there is one."""
    for auto_class in list(vars(modeling_auto).values()):
        own = getattr(models_of(auto_class), "_extra_content", {})
        found = own.get(type(config)) if isinstance(own, dict) else None
        if found is not None and found.__name__ in names:
            return found
    return None


@contextlib.contextmanager
def building_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """The contexts in which ``from_pretrained`` builds a model: on meta, of this dtype, nothing tied yet."""
    with contextlib.ExitStack() as stack:
        for context in PreTrainedModel.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        yield


def auto_model_class(config: PreTrainedConfig, auto_class: Any) -> tuple[Any, PreTrainedConfig]:
    """The class an Auto class stands for with this config, and the config that class takes (as Auto does it).

    Raises:
        ConfigError: when the Auto class does not know the config.
    """
    mapping = auto_class._model_mapping
    if type(config) not in mapping:
        raise ConfigError(f"{auto_class.__name__} has no model for {type(config).__name__}")
    found = _get_model_class(config, mapping)
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(found, "config_class", None) == text:
        return found, config.get_text_config()
    return found, config


def remote_model_class(reference: str, name_or_path: str, **hub: Any) -> Any:
    """The class of a checkpoint that brings its own code. Runs that code: only with the user's consent."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, name_or_path, **hub)


def finish_building(model: PreTrainedModel) -> None:
    """What transformers does right after constructing a model."""
    patch_output_recorders(model)


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Glob of names to the dtype they are kept in, for a model of ``dtype``."""
    return dict(model._get_dtype_plan(dtype))


def planned_dtype(plan: Mapping[str, torch.dtype], name: str) -> torch.dtype | None:
    """The dtype a plan keeps this name in; None when it says nothing of it.

    The matching is transformers' own (``build_glob_alternation``: a search, ``*`` standing for anything).
    """
    from transformers.core_model_loading import build_glob_alternation

    if not plan:
        return None
    alternation, by_group, _ = build_glob_alternation(list(plan))
    found = alternation.search(name)
    return plan[by_group[found.lastgroup]] if found and found.lastgroup else None


def tie(model: PreTrainedModel, missing: set[str], untied: set[str]) -> None:
    """Tie as ``from_pretrained`` does once it knows which names the checkpoint lacks.

    ``untied`` are declared targets that the checkpoint holds with values of their own: they stay untied.
    """
    for name in untied:
        model.all_tied_weights_keys.pop(name, None)
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)


def record_conversions(model: nn.Module, transforms: Sequence[Any]) -> None:
    """Leave on the model what saving reads: the conversions that matched a key."""
    if isinstance(model, PreTrainedModel):
        model._weight_conversions = [item for item in transforms if item.was_used()]  # type: ignore[assignment]


def attention_of(model: nn.Module) -> str | None:
    """How a model computes its attention ("sdpa", "flash_attention_2", ...), whoever chose it."""
    found = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return found if isinstance(found, str) else None


def choose_implementations(
    config: PreTrainedConfig,
    attention: str | Mapping[str, str] | None,
    experts: str | Mapping[str, str] | None,
) -> None:
    """Have a config, and those in it, name how attention and experts are computed; None leaves it to the model."""
    if attention is not None:
        config._attn_implementation = attention  # type: ignore[assignment]
    if experts is not None:
        config._experts_implementation = experts  # type: ignore[assignment]


def saved_conversions(model: nn.Module) -> list[Any]:
    """The renames and converters to run backwards for saving: those that loading used, else the class's own.

    As in ``revert_weight_conversion``: a model that was not loaded has no legacy names, and no prefix to restore.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    with original_classes(model):
        found = get_model_conversion_mapping(model, add_legacy=False)
    return [item for item in found if not isinstance(item, PrefixChange)]


def revert(model: Any, transforms: Sequence[Any], values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run conversions backwards: a state dict as its checkpoint has it. ``model`` is what converters may ask."""
    if not transforms:
        return dict(values)
    holder: Any = _WithConversions(model, transforms)
    return dict(revert_weight_conversion(holder, dict(values)))


class _WithConversions:
    """A model with these conversions left on it by loading."""

    def __init__(self, model: Any, transforms: Sequence[Any]) -> None:
        self._model = model
        self._weight_conversions = list(transforms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def quantised_parts(config: Any) -> list[Any]:
    """The config and its parts, such as ``text_config``, as far as these have a ``quantization_config``."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return [part for part in parts if getattr(part, "quantization_config", None) is not None]


def save_small_files(model: nn.Module, dtype: torch.dtype | None, folder: Path) -> None:
    """What ``save_pretrained`` writes beside the weights: config, generation config, and code of the model's own.

    ``dtype`` is what the config is to name. A quantised checkpoint's ``quantization_config`` is left out where a
    model has been made of its numbers. The model's own config is not touched. Nothing for other modules.
    """
    if not isinstance(model, PreTrainedModel):
        return
    kind: Any = original_class(model)
    config: Any = deepcopy(model.config)
    config.architectures = [kind.__name__]
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    if not getattr(model, "is_quantized", False):
        for part in quantised_parts(config):
            del part.quantization_config
    if kind.is_remote_code():
        custom_object_save(model, str(folder), config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def names_never_saved(model: nn.Module) -> frozenset[str]:
    """Names that a model's class leaves out when it is saved."""
    return frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ())


def tie_targets(model: nn.Module) -> frozenset[str]:
    """Regexes, searched in names, of those that are declared tied to another by any module in a model."""
    return frozenset(_get_tied_weight_keys(model)) if isinstance(model, PreTrainedModel) else frozenset()


def fsdp_plan(model: nn.Module) -> dict[str, str]:
    """The model's own FSDP plan: module name (with ``*`` for numbers) to style; empty when it has none."""
    return dict(getattr(model, "_fsdp_plan", None) or {})


def no_split_classes(model: nn.Module) -> set[str]:
    """Class names of blocks that must stay whole."""
    return set(getattr(model, "_no_split_modules", None) or ())


def mark_sharded(model: nn.Module) -> None:
    """What generation reads to keep ranks in step (``is_fsdp_managed_module``)."""
    model._is_fsdp_managed_module = True  # type: ignore[assignment]


# Initialising


def outermost_pretrained(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """The transformers models in a module that no other of them contains, with their prefixes."""
    if isinstance(model, PreTrainedModel):
        return [("", model)]
    found: list[tuple[str, PreTrainedModel]] = []
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and not any(prefix.startswith(f"{outer}.") for outer, _ in found):
            found.append((prefix, module))
    return found


def mark_initialized(tensor: torch.Tensor) -> None:
    """The mark by which transformers' initialisers pass over a tensor."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def run_initializers(model: PreTrainedModel, modules: Collection[nn.Module]) -> None:
    """``_init_weights`` for those of a model's modules, children first, each by the model it belongs to."""
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = module not in modules  # the mark by which the others are passed over
    with torch.no_grad(), original_classes(model), hf_init.guard_torch_init_functions():
        model.initialize_weights()


@contextlib.contextmanager
def init_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have transformers' initialisers call ``function`` where they would call torch's of this name."""
    original = hf_init.TORCH_INIT_FUNCTIONS[name]
    hf_init.TORCH_INIT_FUNCTIONS[name] = function
    try:
        yield
    finally:
        hf_init.TORCH_INIT_FUNCTIONS[name] = original


def not_initialising() -> contextlib.AbstractContextManager[None]:
    """For the time of the block, torch's functions that initialise do nothing: what is on meta has no values."""
    return hf_init.no_init_weights()


def built_without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Another model of the same class and config: parameters on meta, all else as the constructor computes it.

    Memory: buffers, and the address space of one parameter at a time; no parameter's memory is touched.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            parameters_of(module)[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    model_class: Any = original_class(model)
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        with not_initialising():
            fresh: PreTrainedModel = model_class._from_config(model.config)
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
    return fresh


def are_fused_experts(module: nn.Module) -> bool:
    """Whether this is what transformers makes of a mixture's experts: stacked weights, and one way to gate."""
    facts = [getattr(module, fact, None) for fact in ("has_gate", "has_bias", "is_transposed")]
    return None not in facts and hasattr(module, "_apply_gate")


def eager_experts(kind: type[nn.Module]) -> Callable[..., torch.Tensor]:
    """How a class of fused experts computes one after the other, whatever the config would have computed."""
    forward: Any = kind.forward
    found: Callable[..., torch.Tensor] = getattr(forward, "__wrapped__", forward)  # use_experts_implementation
    return found


def are_parted_experts(module: nn.Module) -> bool:
    """Whether ranks have experts of their own."""
    return bool(getattr(module, "_is_expert_parallel", False))


def activated(experts: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What fused experts make of the first product, (tokens, 2 * width) or (tokens, width): (tokens, width)."""
    found: torch.Tensor = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return found


# Loading later


def loading_door() -> tuple[Any, str]:
    """The class and the name of the function by which ``from_pretrained`` fills a model that is on meta.

    It is given the model, a state dict or None, the files or None, and a config of the load.
    """
    return PreTrainedModel, "_load_pretrained_model"


def placing_door() -> tuple[Any, str]:
    """The class and the name of the function by which what no file has gets memory, to be initialised.

    It is given the model, the names of what is missing, and more. Under FSDP it treats the first rank and others
    apart, and in transformers 5.17 gives all of a model memory on the others.
    """
    return PreTrainedModel, "_move_missing_keys_from_meta_to_device"


def loads_for_fsdp() -> bool:
    """Whether ``from_pretrained`` is to leave ranks without weights, for FSDP to bring (by the environment)."""
    return bool(is_fsdp_enabled())


def is_plain_load(config: Any) -> bool:
    """Whether a load is neither quantised, nor dealt to devices by a map or a mesh."""
    return not config.is_quantized and config.device_map is None and config.device_mesh is None


def dtype_of_load(config: Any) -> torch.dtype:
    """The dtype in which a model is loaded."""
    return config.dtype or torch.get_default_dtype()


def load_outcome(missing: set[str], unexpected: set[str], mismatched: set[tuple[str, Any, Any]]) -> Any:
    """What a load tells of itself, from which transformers goes on: ties, initialises, reports."""
    return LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=mismatched,
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def forget_tie(model: PreTrainedModel, target: str) -> None:
    """Have a name that is declared tied stay untied."""
    model.all_tied_weights_keys.pop(target, None)
