"""A transformers model on meta and what a checkpoint offers for it: all that is known before a tensor is read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from typing_extensions import TypedDict

from shardwise.conversion import Bindings
from shardwise.errors import ConfigError
from shardwise.execution.garbage import collected_later
from shardwise.formats import CheckpointIndex
from shardwise.layout import ModelLayout, Origin
from shardwise.models import build
from shardwise.models import transformers_compat as compat
from shardwise.models.dtypes import to_torch
from shardwise.models.rules import bind
from shardwise.models.view import layout_of, look_inside
from shardwise.models.vocabulary import ResizeVocab, resized, set_vocab_size, vocabulary_tensors
from shardwise.planning import stored_tensors


class ModelOptions(TypedDict, total=False):
    """Which model is built, of the checkpoint's config and keys. Each is optional.

    Attributes:
        model_class: a model class or an Auto class; by default the class named by the config.
        config: a config to use instead of the checkpoint's.
        config_overrides: attributes of the checkpoint's config to replace.
        dtype: "auto" (the config's, else the stored one), or a floating dtype or its name.
        trust_remote_code: run model code that the checkpoint brings along.
        key_mapping: regex to replacement, applied to the checkpoint's keys before the model's own renames.
    """

    model_class: Any
    config: PreTrainedConfig
    config_overrides: Mapping[str, Any]
    dtype: str | torch.dtype
    trust_remote_code: bool
    key_mapping: Mapping[str, str]


@dataclass
class Outline:
    """A model on meta, and what the checkpoint offers for it. ``equal_ties`` are stored twice with equal values."""

    model: PreTrainedModel
    transforms: list[Any]
    layout: ModelLayout
    bindings: Bindings
    equal_ties: frozenset[str] = frozenset()

    def ties_stored_twice(self) -> list[tuple[str, str]]:
        """(name, other name) where both are stored and declared tied, so that their values have to be compared.

        Of all names tied to one source, the first that is stored (the source before its targets) stands for them,
        as in transformers' ``tie_weights``; it is the other name of every pair.
        """
        families: dict[str, list[str]] = {}
        for target, origin in compat.declared_ties(self.model).items():
            families.setdefault(origin, [origin]).append(target)
        present = [[name for name in members if self.bindings.offers.get(name)] for members in families.values()]
        return [(other, names[0]) for names in present for other in names[1:]]

    def bindings_less_ties(self) -> Bindings:
        """What the checkpoint offers, less the second copies of tied tensors, which have been found equal."""
        offers = {name: found for name, found in self.bindings.offers.items() if name not in self.equal_ties}
        return replace(self.bindings, offers=offers)

    def tie(self, untied: set[str]) -> None:
        """Tie what is declared tied, but for the names ``untied``; still on meta."""
        saved = {name for tensor in self.layout.saved() for name in tensor.names}
        offered = set(self.bindings.offers) - self.equal_ties
        compat.tie(self.model, saved - offered, untied)


def config_of(directory: Path, options: ModelOptions) -> PreTrainedConfig:
    """The config given, or that of the checkpoint with the overrides applied."""
    given = options.get("config")
    overrides = options.get("config_overrides", {})
    if given is not None:
        if overrides:
            raise ConfigError(
                "config_overrides change the checkpoint's config; with config= change that config itself"
            )
        return copy.deepcopy(given)
    return build.read_config(
        _folder(directory), trust_remote_code=options.get("trust_remote_code", False), overrides=overrides
    )


def class_of(
    directory: Path, config: PreTrainedConfig, options: ModelOptions
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The model class and the config it takes."""
    trust = options.get("trust_remote_code", False)
    return build.resolve_class(config, options.get("model_class"), _folder(directory), trust_remote_code=trust)


@collected_later()
def outline(
    directory: Path,
    config: PreTrainedConfig,
    index: CheckpointIndex,
    options: ModelOptions,
    resize: ResizeVocab | None = None,
) -> Outline:
    """Build the model on meta, nothing tied yet, and bind the checkpoint's keys to it."""
    model_class, config = class_of(directory, config, options)
    if resize is not None:
        set_vocab_size(config, resize.size)
    stored = stored_tensors(index)
    dtype = build.resolve_dtype(options.get("dtype", "auto"), config, stored.values())
    model = build.build_on_meta(model_class, config, dtype, _folder(directory))
    transforms = compat.conversion_transforms(model, options.get("key_mapping"))
    held = look_inside(model)
    layout = layout_of(held, lambda item: Origin.NOWHERE)
    plan = compat.dtype_plan(model, dtype)

    def dtype_of(name: str) -> torch.dtype:
        return compat.planned_dtype(plan, name) or to_torch(layout.by_name[name].dtype)

    bindings = bind(model, stored, layout, transforms, dtype_of)
    if resize is not None:
        bindings = resized(bindings, vocabulary_tensors(model, held), resize.size)
    build.keep_dtypes(model, dtype, bindings.leaders)
    return Outline(model, transforms, layout, bindings)


def _folder(directory: Path) -> Path:
    return directory if directory.is_dir() else directory.parent
