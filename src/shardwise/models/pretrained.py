"""What transformers says of a model, and does to one: for whoever loads, saves or trains it.

Of other modules it says nothing. What takes transformers' unexported names is in ``transformers_compat``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from shardwise.models import transformers_compat as compat
from shardwise.models.transformers_compat import (
    activated,
    are_fused_experts,
    are_parted_experts,
    attention_of,
    choose_implementations,
    conversion_transforms,
    dtype_of_load,
    eager_experts,
    forget_tie,
    ignore_patterns,
    is_plain_load,
    load_outcome,
    loading_door,
    loads_for_fsdp,
    mark_initialized,
    not_initialising,
    placing_door,
    quantised_parts,
    record_conversions,
    save_small_files,
    tie,
)

__all__ = [
    "activated",
    "are_fused_experts",
    "are_parted_experts",
    "attention_of",
    "base_model_prefix",
    "choose_implementations",
    "conversion_transforms",
    "declared_ties",
    "dtype_of_load",
    "eager_experts",
    "forget_tie",
    "has_other_parts",
    "ignore_patterns",
    "is_encoder_decoder",
    "is_plain_load",
    "is_pretrained",
    "kept_dtypes",
    "load_outcome",
    "loading_door",
    "loads_for_fsdp",
    "mark_initialized",
    "mark_loaded",
    "not_initialising",
    "placing_door",
    "progress_bars_enabled",
    "quantised_parts",
    "record_conversions",
    "save_small_files",
    "settings_of",
    "text_decoder",
    "text_layers",
    "tie",
]


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
    plan = compat.dtype_plan(model, dtype)
    return lambda name: compat.planned_dtype(plan, name)


def mark_loaded(model: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Leave the marks by which a later ``initialize_weights`` passes over what is loaded."""
    if compat.outermost_pretrained(model):
        for tensor in tensors:
            compat.mark_initialized(tensor)


def progress_bars_enabled() -> bool:
    """transformers' own switch (``transformers.utils.logging.disable_progress_bar``)."""
    return bool(hf_logging.is_progress_bar_enabled())
