"""Properties of a transformers model, and the binding of a checkpoint's keys to its tensors.

This file, ``build`` and ``revert`` use transformers' unexported names (checked with 5.17 and 5.23). Each is looked
up when it is used. A module that is not of transformers needs none of them.

[Note: Keys] The order of steps is that of transformers' loader (``convert_and_load_state_dict_in_model``): keys in
natural order, all renames, at most one converter, the retry for keys that are already the model's, the base-model
prefix. In addition, two keys for one tensor, gaps in a list of experts, and conversions that fail are errors.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.core.errors import ConfigError, FormatError, private
from shardwise.core.expression import Bindings, Expression, Stored, get_stored_key, permute, substitute
from shardwise.core.formatting import canonical_name, join_names, plain_key
from shardwise.core.layout import ModelLayout
from shardwise.files.packed import find_quant_type
from shardwise.files.urls import shown
from shardwise.fsdp.torch_private import original_classes, to_torch

if TYPE_CHECKING:
    from shardwise.models.tracing import Conversion


def get_declared_ties(model: nn.Module) -> dict[str, str]:
    """Return the declared ties of the class and config, each name with the name it is tied to."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def get_settings(model: nn.Module) -> dict[str, str]:
    """Return the fields of a model's config as text by name, except for its origin."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        return {}
    fields = {**config.to_dict(), "attn_implementation": get_attention_implementation(model)}
    return {name: repr(value) for name, value in sorted(fields.items()) if name != "_name_or_path"}


def count_text_layers(model: nn.Module) -> int | None:
    """Return the number of layers of the text model according to its config, or None."""
    count = getattr(_text_config(model), "num_hidden_layers", None)
    return count if isinstance(count, int) else None


def has_other_models(model: nn.Module) -> bool:
    """Return whether the config has parts other than the text model, such as a vision tower."""
    return _text_config(model) is not getattr(model, "config", None)


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether the model has an encoder and a decoder."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False) is True


def _text_config(model: nn.Module) -> object:
    """Return the config of the text part, or None if there are several."""
    config = getattr(model, "config", None)
    try:
        return config.get_text_config() if isinstance(config, PreTrainedConfig) else config
    except ValueError:
        return None


def get_unquantized_names(model: nn.Module) -> list[str]:
    """Return patterns of names of modules that transformers never quantizes, because the class says so.

    The classes read the dtype of their weights.
    """
    if not isinstance(model, PreTrainedModel):
        return []
    return sorted(private("transformers:PreTrainedModel._keep_in_fp32_modules", model) or ())


def get_kept_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype | None]:
    """Return a function from a name to the dtype that a model of ``dtype`` keeps it in, or None for any dtype."""
    plan = dict(private("transformers:PreTrainedModel._get_dtype_plan", model)(dtype))
    # The keys of the plan are globs. They become one regex with a group for each, so the group that matched gives
    # the key of the plan.
    build_alternation = private("transformers.core_model_loading:build_glob_alternation")
    alternation, by_group, _ = build_alternation(list(plan))

    def get_kept_dtype(name: str) -> torch.dtype | None:
        match = alternation.search(name)
        return plan[by_group[match.lastgroup]] if match and match.lastgroup else None

    return get_kept_dtype


def mark_loaded(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Mark loaded tensors, so that a later ``initialize_weights`` skips them."""
    if outermost_pretrained(model):
        for tensor in tensors:
            mark_initialized(tensor)


def get_conversion_transforms(model: nn.Module, key_mapping: Mapping[str, str] | None) -> list[Any]:
    """Return the renames and converters for a model, those of ``key_mapping`` (regex to replacement) first.

    Raises:
        ConfigError: a key of ``key_mapping`` is no regex, or a replacement has another group than the first.
    """
    mapping = dict(key_mapping) if key_mapping else None
    for source, target in (mapping or {}).items():
        try:
            re.compile(source)
        except re.error as error:
            raise ConfigError(f"key_mapping: {source!r} is no valid regex ({error})") from error
        if re.search(r"\\([02-9]|g<)", target):
            raise ConfigError(
                rf"key_mapping: the replacement {target!r} has a group other than \1, which is the only one that "
                "transformers fills in. Match the part that changes alone; several entries are applied in order"
            )
    if isinstance(model, PreTrainedModel):
        # transformers finds the conversions by the name of the model's class, which fully_shard has changed.
        with original_classes(model):
            return list(private("transformers.conversion_mapping:get_model_conversion_mapping")(model, mapping))
    if not mapping:
        return []
    rename = private("transformers.core_model_loading:WeightRenaming")
    return [rename(source, target) for source, target in mapping.items()]


def rename_keys(keys: Iterable[str], key_mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a checkpoint of an unknown model with their names under ``key_mapping``."""
    renamings = get_conversion_transforms(nn.Module(), key_mapping)
    return {key: _rename(key, renamings, [], None, {})[0] for key in keys}


def _rename(
    key: str, renamings: Sequence[Any], converters: Sequence[Any], prefix: str | None, names: Mapping[str, object]
) -> tuple[str, str | None]:
    """Return a key under the renames, and the pattern of the converter that takes it. ``prefix`` is the base's."""
    if not renamings and not converters and prefix is None:
        return key, None
    rename = private("transformers.core_model_loading:rename_source_key")
    name, pattern = rename(key, renamings, converters, prefix, names)
    return name, pattern


def get_model_mapping(auto_class: Any) -> Any:
    """Return the mapping from config classes to model classes of an Auto class, or None for others."""
    return getattr(auto_class, "_model_mapping", None)


def ignore_patterns(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return regexes of missing and of unexpected names that the model class ignores.

    Those for rotary frequencies and position ids are from ``_adjust_missing_and_unexpected_keys``.
    """
    if not isinstance(model, PreTrainedModel):
        return (), ()
    missing = tuple(sorted(private("transformers:PreTrainedModel._keys_to_ignore_on_load_missing", model) or ()))
    ignored = private("transformers:PreTrainedModel._keys_to_ignore_on_load_unexpected", model)
    unexpected = tuple(sorted(ignored or ()))
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected += (r"rotary_emb\.inv_freq",)
    if any(name.endswith("position_ids") for name in buffers):
        unexpected += (r"(^|\.)position_ids$",)
    return missing, unexpected


def tie(model: PreTrainedModel, missing: set[str], untied: set[str]) -> None:
    """Tie weights like ``from_pretrained``, given the names that are missing in the checkpoint.

    ``untied`` are declared targets that are not tied, because the checkpoint has other values for them.
    """
    for name in untied:
        model.all_tied_weights_keys.pop(name, None)
    model.tie_weights(missing_keys=set(missing), recompute_mapping=False)


def record_conversions(model: nn.Module, transforms: Sequence[Any], *, is_distributed: bool = False) -> None:
    """Record on the model the conversions that matched a key, which saving uses.

    Without any, a save keeps the names of the checkpoint. Those of a distributed one are the model's own in any
    case, and say nothing about the hub's, so that nothing is recorded.
    """
    used = [item for item in transforms if item.was_used()]
    if isinstance(model, PreTrainedModel) and (used or not is_distributed):
        model._weight_conversions = used  # type: ignore[assignment]


def get_attention_implementation(model: nn.Module) -> str | None:
    """Return the attention implementation of a model ("sdpa", "flash_attention_2", ...)."""
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return implementation if isinstance(implementation, str) else None


def quantized_configs(config: Any) -> list[Any]:
    """Return the config and its parts, such as ``text_config``, that have a ``quantization_config``."""
    configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    return [item for item in configs if getattr(item, "quantization_config", None) is not None]


def outermost_pretrained(model: nn.Module, prefix: str = "") -> list[tuple[str, PreTrainedModel]]:
    """Return the outermost transformers models in a module, with their prefixes."""
    if isinstance(model, PreTrainedModel):
        return [(prefix.removesuffix("."), model)]
    models: list[tuple[str, PreTrainedModel]] = []
    for name, child in model.named_children():
        models += outermost_pretrained(child, f"{prefix}{name}.")
    return models


def mark_initialized(tensor: torch.Tensor) -> None:
    """Mark a tensor, so that transformers' initializers skip it."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def run_initializers(model: PreTrainedModel, modules: Collection[nn.Module]) -> None:
    """Run ``_init_weights`` on these modules of a model, children first, of the model that each belongs to."""
    for module in model.modules():
        vars(module)["_is_hf_initialized"] = module not in modules  # initialize_weights skips marked modules
    guard = private("transformers.initialization:guard_torch_init_functions")
    with torch.no_grad(), original_classes(model), guard():
        model.initialize_weights()


@contextlib.contextmanager
def replace_init_function(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace torch's initializer of this name in transformers' initializers within the block."""
    functions = private("transformers.initialization:TORCH_INIT_FUNCTIONS")
    original = functions[name]
    functions[name] = function
    try:
        yield
    finally:
        functions[name] = original


def not_initializing() -> Any:
    """Return a context that disables torch's initializers, because meta tensors have no values."""
    return private("transformers.initialization:no_init_weights")()


def build_from_config(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Any:
    """Build a model by transformers' function for models without weights."""
    return private("transformers:PreTrainedModel._from_config", model_class)(config)


@dataclass
class Assignment:
    """Keys by name of the model (``plain``), conversions by the name of their first result, and other keys.

    ``wrapped`` are those that match without what wrappers add to names.
    """

    plain: dict[str, list[str]] = field(default_factory=dict)
    conversions: dict[str, Conversion] = field(default_factory=dict)
    unmatched: dict[str, str] = field(default_factory=dict)
    wrapped: list[str] = field(default_factory=list)


def _natural_order(key: str) -> Any:
    try:
        return private("transformers.core_model_loading:dot_natural_key")(key)
    except ValueError as error:  # of int(), for thousands of digits, or for ², which str.isdigit() accepts
        raise FormatError(f"{shown(key)}: has a number that cannot be read. Rename this tensor") from error


def assign_keys(
    model: nn.Module, keys: Sequence[str], names: Mapping[str, object], transforms: Sequence[Any]
) -> Assignment:
    """Apply the renames to every key. ``names`` are the tensors that the model saves."""
    prefix = model.base_model_prefix if isinstance(model, PreTrainedModel) else None
    renaming = "transformers.core_model_loading:WeightRenaming"
    converter = "transformers.core_model_loading:WeightConverter"
    renamings = [item for item in transforms if isinstance(item, private(renaming))]
    converters = [item for item in transforms if isinstance(item, private(converter))]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    result = Assignment()
    is_renamed = bool(transforms) or prefix is not None
    # Natural order: a converter that stacks experts takes its keys in this order, and needs experts.2 before
    # experts.10. Keys that are not renamed need no order, and so no private name.
    for key in sorted(keys, key=_natural_order if is_renamed else None):
        name, pattern = _rename(key, renamings, converters, prefix, names)
        # A key that is the model's already is not renamed, as in transformers (a checkpoint saved with own names).
        if name not in names and key in names:
            name, pattern = _rename(key, [], [], prefix, names)
        # Wrapper parts come last: a model may have a module that is called "module" itself.
        if name not in names and (plain := plain_key(key)) != key:
            name, pattern = _rename(plain, renamings, converters, prefix, names)
            if name in names:
                result.wrapped.append(key)
        if name not in names:
            result.unmatched[key] = name
        elif pattern is None:
            result.plain.setdefault(name, []).append(key)
        else:
            from shardwise.models.tracing import Conversion  # only for models whose weights are converted

            conversion = result.conversions.setdefault(name, Conversion(name, by_pattern[pattern]))
            conversion.sources.setdefault(pattern, []).append(key)
    return result


def bind(
    model: nn.Module,
    stored: Mapping[str, Expression],
    layout: ModelLayout,
    transforms: Sequence[Any],
    get_dtype: Callable[[str], torch.dtype] | None = None,
    extra: Mapping[str, Expression] = MappingProxyType({}),
) -> Bindings:
    """Bind the expressions of a checkpoint to the model's tensors, under ``transforms``.

    ``stored`` are expressions by key. ``extra`` are further ones, which are ignored unless they match a tensor of
    the model. ``get_dtype`` returns the dtype of a conversion by its first result, by default that tensor's in
    ``layout``.
    """
    names = {name: tensor for tensor in layout.saved() for name in tensor.names}
    assignment = assign_keys(model, list(stored), names, transforms)
    # Further keys are tried only if they end like a tensor of the model: there may be many, and few match.
    ends = {name.rpartition(".")[2] for name in names}
    if keys_of_extra := [key for key in extra if key.rpartition(".")[2] in ends]:
        stored = {**stored, **extra}
        for name, keys in assign_keys(model, keys_of_extra, names, transforms).plain.items():
            assignment.plain.setdefault(name, []).extend(keys)
    matched = {name: [stored[key] for key in keys] for name, keys in assignment.plain.items()}
    primary = {name: name for name in assignment.plain}
    unmatched = dict(assignment.unmatched)
    faults: dict[str, list[str]] = {}
    if assignment.conversions:
        from shardwise.models.tracing import trace_conversions

        # Conversions are traced on leaves. Composed expressions are substituted afterwards.
        leaves = {key: Stored(key, item.shape, item.dtype) for key, item in stored.items()}
        composed = {key for key, item in stored.items() if get_stored_key(item) is None}
        dtypes = get_dtype or (lambda name: to_torch(layout.by_name[name].dtype))
        # A conversion may have results that the model lacks. Their keys then count as unmatched.
        for conversion, expressions, why in trace_conversions(
            model, layout, leaves, dtypes, assignment.conversions.values()
        ):
            if why:
                faults[why] = conversion.targets
            for name, expression in expressions.items():
                if name in names:
                    if not composed.isdisjoint(conversion.keys):
                        expression = substitute(expression, stored)
                    matched.setdefault(name, []).append(expression)
                    primary[name] = conversion.target
                else:
                    unmatched.update(dict.fromkeys(conversion.keys, name))
    # bitsandbytes packs the weight of a Conv1D (GPT-2), which is (in, out), as (out, in).
    for name, module in model.named_modules():
        weight = join_names(canonical_name(name), "weight")
        if isinstance(module, Conv1D) and weight in matched:
            items = matched[weight]
            matched[weight] = [permute(item, (1, 0)) if find_quant_type(item) else item for item in items]
    return Bindings(
        matched={name: tuple(items) for name, items in matched.items()},
        primary=primary,
        unmatched=unmatched,
        errors=faults,
        leftover={name: stored[key] for key, name in assignment.unmatched.items()},
        wrapped=tuple(assignment.wrapped),
    )
