"""A transformers model on meta, as ``from_pretrained`` would build it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from shardwise.conversion import Bindings, Expression, Hole, concat, slice_dim
from shardwise.errors import ConfigError, FormatError
from shardwise.models import pretrained
from shardwise.models.torch_words import to_torch
from shardwise.models.view import Held, look_inside
from shardwise.tensors import DType


def read_config(
    directory: Path, model_class: Any = None, *, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """The model's config with ``overrides`` applied.

    ``model_class`` reads it by a config class of its own, where it is a model class that has one for this type of
    model, or for a type that transformers does not know.

    Raises:
        ConfigError: when there is none, it cannot be read, or an override is unknown to it.
    """
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ConfigError(
            f"no usable config in {directory}: there is no config.json, so nothing says what model it is; put the "
            "model's there or, in Python, pass config= (a distributed checkpoint has none of its own)"
        )
    try:
        own: Any = pretrained.own_config_class(model_class, directory)
        keywords = {**overrides} if own else {**overrides, "trust_remote_code": trust_remote_code}
        config, unused = (own or AutoConfig).from_pretrained(directory, return_unused_kwargs=True, **keywords)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"no usable config in {directory}: {error}") from error
    if unused:
        raise ConfigError(
            f"{type(config).__name__} has no {', '.join(sorted(unused))}; check the keyword arguments"
        )
    return cast(PreTrainedConfig, config)


def resolve_class(
    config: PreTrainedConfig, model_class: Any, directory: Path, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The model class and the config it takes.

    ``model_class`` is a model class, an Auto class, or None for the class named by ``config.architectures``.

    Raises:
        ConfigError: when no class is found, or it is the checkpoint's own code and there is no consent to run it.
    """
    if model_class is None:
        return _class_from_config(config, directory, trust_remote_code=trust_remote_code)
    if pretrained.models_of(model_class) is not None:
        remote = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
        if remote is not None and trust_remote_code:
            return pretrained.remote_model_class(remote, str(directory)), config
        return pretrained.auto_model_class(config, model_class)
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        return model_class, _part_for(model_class, config)
    raise ConfigError(f"model_class must be a model class or an Auto class of transformers, not {model_class!r}")


def _part_for(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedConfig:
    """The config, or that part of it which is of the kind that the class takes.

    Raises:
        ConfigError: several parts are.
    """
    kind = model_class.config_class
    if kind is None or isinstance(config, kind):
        return config
    parts = [(name, part) for name, part in _parts_of(config) if isinstance(part, kind)]
    if len(parts) > 1:
        raise ConfigError(
            f"{model_class.__name__} takes a {kind.__name__}, and {type(config).__name__} has several: "
            f"{', '.join(name for name, _ in parts)}; pass config= with the one that is meant"
        )
    return parts[0][1] if parts else config


def _parts_of(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield name, part
            yield from ((f"{name}.{inner}", found) for inner, found in _parts_of(part))


def _class_from_config(
    config: PreTrainedConfig, directory: Path, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    names = config.architectures or []
    auto_map = getattr(config, "auto_map", None) or {}
    own = next(
        (auto_map[auto] for auto in ("AutoModelForCausalLM", "AutoModel", *auto_map) if auto in auto_map), None
    )
    if own is not None and trust_remote_code:
        return pretrained.remote_model_class(own, str(directory)), config
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found, config
    if (registered := pretrained.registered_model_class(config, names)) is not None:
        return registered, config
    if own is not None:
        raise ConfigError(
            f"{directory} brings its own model code ({own}); pass trust_remote_code=True if you have read it and "
            "want it run"
        )
    raise ConfigError(
        f"the config in {directory} names {', '.join(names) or 'no architecture'}, which transformers "
        f"{transformers.__version__} does not have; pass model_class="
    )


def resolve_dtype(
    dtype: str | torch.dtype, config: PreTrainedConfig, stored: Iterable[DType], named: str | None = None
) -> torch.dtype:
    """The dtype of the model: the one given, or for "auto" what ``from_pretrained`` of transformers finds.

    That is the dtype of the config, else the one ``named`` by the checkpoint's index, else the first floating one
    of ``stored`` that a model can be built in. It is also set on the config and its sub-configs.
    """
    if dtype == "auto":
        found = getattr(config, "dtype", None) or named or _first_floating(stored)
    else:
        found = dtype
    if isinstance(found, str):
        found = getattr(torch, found, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r} is not 'auto' or a floating dtype of torch")
    config.dtype = found
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None:
            sub_config.dtype = found
    return found


def _first_floating(stored: Iterable[DType]) -> torch.dtype:
    for dtype in stored:
        if dtype.kind == "float" and dtype.bits >= 16:
            return to_torch(dtype)
    return torch.get_default_dtype()


def build_on_meta(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, directory: Path
) -> PreTrainedModel:
    """The model with every tensor on meta and nothing tied, in evaluation mode.

    Raises:
        ConfigError: when the class cannot be built from the config.
        FormatError: when the checkpoint's ``generation_config.json`` cannot be read.
    """
    try:
        with pretrained.building_on_meta(dtype):
            model = model_class(config)
            pretrained.finish_building(model)
    except (AttributeError, TypeError, ValueError, ImportError) as error:
        raise ConfigError(
            f"{model_class.__name__} cannot be built from {type(config).__name__}: {error}"
        ) from error
    model.eval()
    if model.can_generate():
        model.generation_config = _generation_config(directory) or model.generation_config
    return model


def _generation_config(directory: Path) -> GenerationConfig | None:
    """The checkpoint's own; else what its model config says of generating, as checkpoints of old have it.

    Raises:
        FormatError: it cannot be read.
    """
    own: dict[str, Any] = {"config_file_name": "generation_config.json"}
    of_model: dict[str, Any] = {"config_file_name": "config.json", "_from_model_config": True}
    keywords = own if (directory / "generation_config.json").is_file() else of_model
    file = keywords["config_file_name"]
    if not (directory / file).is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(directory, **keywords)
    except Exception as error:  # of many kinds, of whatever a stranger wrote there
        raise FormatError(
            f"{file} in {directory}: is no generation config ({error}); it is damaged: restore the file"
        ) from error


def keep_dtypes(model: PreTrainedModel, dtype: torch.dtype, siblings: Mapping[str, str]) -> None:
    """Give the tensors the model keeps in float32 that dtype, still on meta.

    As in transformers, a tensor made by a conversion follows the first tensor that the conversion makes:
    ``siblings`` maps its name to that one's. Tensors that are in neither mapping nor checkpoint keep the dtype
    they were built with.
    """
    plan = pretrained.dtype_plan(model, dtype)
    if not plan:
        return
    for item in look_inside(model):
        if item.kind.is_saved and item.fqn in siblings:
            kept = pretrained.planned_dtype(plan, siblings[item.fqn])
            if kept is not None and kept != item.tensor.dtype:
                item.recast(kept)


NewRows: TypeAlias = Literal["initialized", "mean"]
"""Values of new rows of an embedding: as the model's class initializes it, or the mean of the stored rows."""


@dataclass(frozen=True, slots=True)
class ResizeVocab:
    """The number of tokens a model is to have, and how those that the checkpoint lacks begin."""

    size: int
    rows: NewRows = "initialized"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"resize_vocab={self.size}: a vocabulary has at least one token")


def set_vocab_size(config: PreTrainedConfig, size: int) -> None:
    """Have a model of this config built with so many tokens.

    Raises:
        ConfigError: the config has no vocabulary.
    """
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"{type(config).__name__} has no vocab_size; leave out resize_vocab")
    text.vocab_size = size
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = size


def vocabulary_tensors(model: PreTrainedModel, held: list[Held]) -> set[str]:
    """Names of what has a row for each token: the embedding of the input, the head, and the head's bias.

    Raises:
        ConfigError: the model's class does not tell its embedding.
    """
    try:
        modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError as error:
        raise ConfigError(f"{type(model).__name__} has no embedding of tokens; leave out resize_vocab") from error
    own = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    return {name for item in held if id(item.tensor) in own for name in item.names}


def resized(bindings: Bindings, names: set[str], size: int) -> Bindings:
    """The bindings of a model with ``size`` tokens: rows are left away, or left to be filled."""

    def fitted(expression: Expression) -> Expression:
        rows = expression.shape[0]
        if rows >= size:
            return slice_dim(expression, 0, 0, size)
        return concat([expression, Hole((size - rows, *expression.shape[1:]), expression.dtype)], 0)

    offers: Mapping[str, tuple[Expression, ...]] = {
        name: tuple(map(fitted, found)) if name in names else found for name, found in bindings.offers.items()
    }
    return replace(bindings, offers=offers)


@dataclass(frozen=True, slots=True)
class RowNorms:
    """A vector that begins as the norm of each row of a matrix (the magnitude of DoRA).

    ``of`` maps some whole rows to their values; any rows give what all of them would give there.
    """

    matrix: str
    of: Callable[[torch.Tensor], torch.Tensor]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Additions:
    """What was added to a model; by default nothing.

    Attributes:
        base: the model of transformers inside, whose class's rules count; None for the model itself.
        known_as: names in the model to those in the base, by which users and the base's class know the tensors. A
            copy is known as what it is a copy of. What was added has no such name.
        initialised: names of what ``initialise`` writes.
        initialise: runs the initialisers of what was added, on whatever tensors are in its place.
        copies: names of parameters that begin with the values of others, to the others' names.
        norms: names of vectors that begin as the norms of a matrix' rows.
        new_rows: how rows begin that the checkpoint lacks, of tensors of which it has the others.
        nested: names of what scales of weights in four bits become, once these have been read whole.
    """

    base: nn.Module | None = None
    known_as: Mapping[str, str] = field(default_factory=dict)
    initialised: frozenset[str] = frozenset()
    initialise: Callable[[], None] = _nothing
    copies: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, RowNorms] = field(default_factory=dict)
    new_rows: NewRows = "initialized"
    nested: frozenset[str] = frozenset()

    @property
    def begun(self) -> frozenset[str]:
        """Names of the tensors whose values come from the tuning, rather than from a checkpoint or the base."""
        return self.initialised.union(self.norms, self.nested)

    def begun_elsewhere(self) -> Additions:
        """The same, where all values of what was added come from a checkpoint."""
        return replace(self, initialised=frozenset(), norms={})


NOTHING_ADDED = Additions()
