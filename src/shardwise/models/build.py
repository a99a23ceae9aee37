"""Construction of a transformers model on meta, and transformers' own functions that load one."""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from shardwise.core.errors import ConfigError, FormatError, private
from shardwise.core.expression import Bindings, Expression, Unstored, concat, slice_dim
from shardwise.core.tensors import DType
from shardwise.files.checkpoint_index import parse_object
from shardwise.files.peft_adapter import ADAPTER_CONFIG
from shardwise.files.urls import shown
from shardwise.fsdp.named_tensors import TensorRef, collect_tensors
from shardwise.fsdp.torch_private import to_torch
from shardwise.models import pretrained
from shardwise.models.pretrained import get_model_mapping


def read_config(
    directory: Path, model_class: Any = None, *, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """Return the model's config with ``overrides`` applied, read by the config class of a model class.

    Raises:
        ConfigError: there is none, it cannot be read, or it does not have an override.
        FormatError: the folder is that of an adapter, whose config is invalid.
    """
    if directory.is_dir() and not (directory / "config.json").is_file():
        if (adapter := directory / ADAPTER_CONFIG).is_file():
            base = parse_object(adapter.read_bytes(), what=str(adapter)).get("base_model_name_or_path") or "BASE"
            raise ConfigError(
                f"{directory}: is an adapter. Merge it (shardwise merge-adapter {shown(str(base))} {directory} "
                "OUT) and pass OUT or, in Python, pass its base and tuning=ExistingLora(...)"
            )
        raise ConfigError(
            f"no usable config in {directory}: there is no config.json, so the model's class is unknown. Copy the "
            "model's into it or, in Python, pass config= (a distributed checkpoint has none of its own)"
        )
    try:
        content = json.loads((directory / "config.json").read_text("utf-8"))
        _require_moderate(content)
        # Only AutoConfig may run the checkpoint's own code for its config.
        config_class: Any = _config_class(model_class)
        keywords = {**overrides} if config_class else {**overrides, "trust_remote_code": trust_remote_code}
        config, unused = (config_class or AutoConfig).from_pretrained(
            directory, return_unused_kwargs=True, **keywords
        )
        # The config class of a text model reads its part, and the whole says what is stored in four bits.
        if "quantization_config" in content and not hasattr(config, "quantization_config"):
            config.quantization_config = content["quantization_config"]
    except Exception as error:  # the content is untrusted, and errors are of many kinds
        cause = " ".join(str(error).split()).removesuffix(".")
        raise ConfigError(f"no usable config in {directory}: {cause}. Check config.json") from error
    if unused:
        raise ConfigError(
            f"{type(config).__name__} has no {', '.join(sorted(unused))}. Check the keyword arguments"
        )
    return cast(PreTrainedConfig, config)


_COUNTS: Final = re.compile(r".*(?:layers?|blocks|depths?|experts|codebooks|(labels))")
_MOST: Final = 10_000
_MOST_LABELS: Final = 1_000_000


def _require_moderate(content: object, name: str = "") -> None:
    """Check numbers of layers, experts and labels, of each of which transformers makes a list or a module.

    Raises:
        ValueError: there are more than of any model.
    """
    if isinstance(content, dict):
        for key, value in content.items():
            _require_moderate(value, key)
    elif isinstance(content, list):
        for value in content:
            _require_moderate(value, name)
    elif isinstance(content, int) and (count := _COUNTS.fullmatch(name)):
        most = _MOST_LABELS if count[1] else _MOST
        if content > most:
            raise ValueError(f"{name} is {content}, and no model has more than {most:,}")


def resolve_class(
    config: PreTrainedConfig, model_class: Any, directory: Path, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the model class and its config.

    ``model_class`` is a model class, an Auto class, or None for the class named by ``config.architectures``.

    Raises:
        ConfigError: no class is found, or it is the checkpoint's own code without ``trust_remote_code``.
    """
    if model_class is None:
        return _class_from_config(config, directory, trust_remote_code=trust_remote_code)
    if pretrained.get_model_mapping(model_class) is not None:
        remote = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
        if remote is not None and trust_remote_code:
            return import_remote_class(remote, str(directory), model_class.__name__), config
        return find_auto_class(config, model_class)
    if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
        kind = model_class.config_class or PreTrainedConfig
        configs = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        return model_class, next((item for item in configs if isinstance(item, kind)), config)
    raise ConfigError(f"model_class must be a model class or an Auto class of transformers, not {model_class!r}")


def _config_class(model_class: Any) -> type[PreTrainedConfig] | None:
    """Return the config class of a model class, or None to let ``AutoConfig`` find it."""
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    kind = model_class.config_class if is_model else None
    return None if kind is PreTrainedConfig else kind


def _class_from_config(
    config: PreTrainedConfig, directory: Path, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    names: object = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"the config in {directory} has architectures {names!r:.80}. Write a list of names")
    auto_map = getattr(config, "auto_map", None) or {}
    # In this order: the checkpoint's own class, if its code may run, a class of transformers that architectures
    # names, and a class of the user. Of the own classes, one that architectures names is preferred, then the causal
    # language model, then the one without a head. Others of its classes are those of a config or a tokenizer.
    autos = [auto for auto in ("AutoModelForCausalLM", "AutoModel", *auto_map) if auto in auto_map]
    autos = [auto for auto in autos if auto.startswith("AutoModel")]
    named = [auto for auto in autos if str(auto_map[auto]).rpartition(".")[2] in names]
    auto = next(iter(named + autos), "")
    remote = auto_map.get(auto)
    if remote is not None and trust_remote_code:
        return import_remote_class(remote, str(directory), auto), config
    for name in names:
        model_class = getattr(transformers, name, None)
        if isinstance(model_class, type) and issubclass(model_class, PreTrainedModel):
            return model_class, config
    if (registered := find_registered_class(config, names)) is not None:
        return registered, config
    if remote is not None:
        raise ConfigError(
            f"{directory}: contains its own model code ({remote}). Pass trust_remote_code=True to run it, if "
            "you trust it"
        )
    unknown = "no architecture"
    if names:
        unknown = f"{', '.join(names)}, which transformers {transformers.__version__} does not have"
    raise ConfigError(f"the config in {directory} names {unknown}. Pass model_class=")


def resolve_dtype(
    dtype: str | torch.dtype, config: PreTrainedConfig, stored: Iterable[DType], named: str | None = None
) -> torch.dtype:
    """Return the dtype of the model, for "auto" that of transformers' ``from_pretrained``.

    That is the dtype of the config, otherwise the one ``named`` by the checkpoint's index, otherwise the first
    float of at least 16 bits in ``stored``. It is also set on the config and its sub-configs.
    """
    resolved: object = dtype
    if dtype == "auto":
        floats = (to_torch(each) for each in stored if each.kind == "float" and each.bits >= 16)
        resolved = getattr(config, "dtype", None) or named or next(floats, torch.get_default_dtype())
    requested = resolved
    if isinstance(resolved, str):
        resolved = getattr(torch, resolved, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigError(
            f"dtype={requested!r}: is not a floating dtype of torch. Pass 'auto', 'bfloat16' or torch.bfloat16, say"
        )
    config.dtype = resolved
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if sub_config is not None:
            sub_config.dtype = resolved
    return resolved


def build_on_meta(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype, directory: Path | None
) -> PreTrainedModel:
    """Build the model on meta, without ties, in evaluation mode.

    ``directory`` is that of its checkpoint. None if it has none.

    Raises:
        ConfigError: the class cannot be built from the config.
        FormatError: the checkpoint's ``generation_config.json`` cannot be read.
    """
    get_contexts = private("transformers:PreTrainedModel.get_init_context")
    patch_outputs = private("transformers.monkey_patching:patch_output_recorders")
    try:
        # Neither quantized, nor under DeepSpeed, and without a choice of kernels. The contexts are those of meta,
        # of the dtype, and of no ties: these follow once it is known which names the checkpoint has.
        with contextlib.ExitStack() as stack:
            for context in get_contexts(dtype, False, False, None):
                stack.enter_context(context)
            model = model_class(config)
            patch_outputs(model)
    except Exception as error:  # of a model's own code, for values that are untrusted
        cause = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(".")
        raise ConfigError(
            f"{model_class.__name__} cannot be built from {type(config).__name__}: {cause}. Check its config"
        ) from error
    model.eval()
    if directory is not None and model.can_generate():
        kind = getattr(model, "generation_config_class", GenerationConfig)
        model.generation_config = _generation_config(directory, kind) or model.generation_config
    return model


def _generation_config(directory: Path, kind: type[GenerationConfig]) -> GenerationConfig | None:
    """Return the checkpoint's generation config, in old checkpoints the generation fields of its model config.

    A model with a class of its own for it has no such old checkpoints.

    Raises:
        FormatError: it cannot be read.
    """
    keywords: dict[str, Any] = {"config_file_name": "generation_config.json"}
    if not (directory / "generation_config.json").is_file():
        if kind is not GenerationConfig:
            return None
        keywords = {"config_file_name": "config.json", "_from_model_config": True}
    file = keywords["config_file_name"]
    if not (directory / file).is_file():
        return None
    try:
        return kind.from_pretrained(directory, **keywords)
    except Exception as error:  # the content is untrusted, and errors are of many kinds
        raise FormatError(
            f"{file} in {directory}: is not a generation config ({error}). It is damaged: restore the file"
        ) from error


def keep_dtypes(model: PreTrainedModel, dtype: torch.dtype, siblings: Mapping[str, str]) -> None:
    """Change the dtype of tensors on meta that the model keeps in another dtype, such as float32.

    As in transformers, the result of a conversion follows the conversion's first result: ``siblings`` maps its name
    to that one's. Tensors without a sibling keep their dtype.
    """
    kept_dtype = pretrained.get_kept_dtypes(model, dtype)
    for item in collect_tensors(model):
        if item.kind.is_saved and item.fqn in siblings:
            dtype_to_keep = kept_dtype(siblings[item.fqn])
            if dtype_to_keep is not None and dtype_to_keep != item.tensor.dtype:
                item.recast(dtype_to_keep)


def set_vocab_size(config: PreTrainedConfig, size: int) -> None:
    """Set the number of tokens in a config.

    Raises:
        ConfigError: the config has no vocabulary, or the size is not a number of tokens.
    """
    if type(size) is not int or size < 1:
        raise ConfigError(f"resize_vocab={size!r}: is not a number of tokens. Pass an int of 1 or more")
    text = config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise ConfigError(f"{type(config).__name__} has no vocab_size. Leave out resize_vocab")
    text.vocab_size = size
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = size


def find_vocabulary_tensors(model: PreTrainedModel, tensors: list[TensorRef]) -> set[str]:
    """Return the names of tensors with a row for each token: the input embedding, the head, and its bias.

    Raises:
        ConfigError: the model has no input embedding.
    """
    try:
        modules = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError as error:
        raise ConfigError(f"{type(model).__name__} has no embedding of tokens. Leave out resize_vocab") from error
    # By identity: a head that is tied to the embedding has the same parameter.
    ids = {id(p) for module in modules if module is not None for p in module.parameters(recurse=False)}
    return {name for item in tensors if id(item.tensor) in ids for name in item.names}


def resize_vocabulary(bindings: Bindings, names: set[str], size: int) -> Bindings:
    """Return the bindings for a model with ``size`` tokens. ``names`` are its tensors with a row for each token."""
    matched = dict(bindings.matched)
    for name in names & matched.keys():
        matched[name] = tuple(_with_rows(expression, size) for expression in matched[name])
    return replace(bindings, matched=matched)


def _with_rows(expression: Expression, size: int) -> Expression:
    # Fewer tokens are the first rows of what is stored. More tokens are all of them, and rows that are initialized.
    rows = expression.shape[0]
    if rows >= size:
        return slice_dim(expression, 0, 0, size)
    return concat([expression, Unstored((size - rows, *expression.shape[1:]), expression.dtype)], 0)


def find_registered_class(config: PreTrainedConfig, names: Collection[str]) -> Any:
    """Return a class of one of these names that a user has registered with an Auto class, or None."""
    for auto_class in list(vars(private("transformers.models.auto:modeling_auto")).values()):
        registered = getattr(get_model_mapping(auto_class), "_extra_content", {})
        model_class = registered.get(type(config)) if isinstance(registered, dict) else None
        if model_class is not None and model_class.__name__ in names:
            return model_class
    return None


def find_auto_class(config: PreTrainedConfig, auto_class: Any) -> tuple[Any, PreTrainedConfig]:
    """Return the model class of an Auto class for this config, and the config of that class.

    Raises:
        ConfigError: the Auto class does not have the config.
    """
    mapping = auto_class._model_mapping
    if type(config) not in mapping:
        raise ConfigError(f"{auto_class.__name__} has no model for {type(config).__name__}")
    model_class = private("transformers.models.auto.auto_factory:_get_model_class")(config, mapping)
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(model_class, "config_class", None) == text:
        return model_class, config.get_text_config()
    return model_class, config


def import_remote_class(reference: str, folder: str, auto: str) -> Any:
    """Import the model class in a checkpoint's own code, with the user's consent.

    ``auto`` is the name of its Auto class, by which transformers knows that a save copies the code.
    """
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    model_class: Any = get_class_from_dynamic_module(reference, folder)
    # As register_for_auto_class, which refuses Auto classes of other versions of transformers.
    model_class._auto_class = auto
    return model_class


def set_implementations(
    config: PreTrainedConfig, attention: str | Mapping[str, str] | None, experts: str | Mapping[str, str] | None
) -> None:
    """Set the attention and expert implementations in a config and its parts. None keeps the model's default."""
    if attention is not None:
        config._attn_implementation = attention  # type: ignore[assignment]
    if experts is not None:
        config._experts_implementation = experts  # type: ignore[assignment]


LOADING_FUNCTION: Final = "transformers:PreTrainedModel._load_pretrained_model"
"""The function by which ``from_pretrained`` fills a model on meta.

Its arguments are the model, a state dict or None, the files or None, and a config of the load.
"""

ALLOCATING_FUNCTION: Final = "transformers:PreTrainedModel._move_missing_keys_from_meta_to_device"
"""The function by which transformers allocates missing tensors for initialization.

Its first arguments are the model and the names of missing tensors. Under FSDP it differs between ranks, and in
transformers 5.17 allocates the full model on all but the first.
"""


def loads_for_fsdp() -> bool:
    """Return whether the environment requests that ``from_pretrained`` loads weights on the first rank only."""
    return bool(private("transformers.distributed.fsdp:is_fsdp_enabled")())


def is_plain_load(config: Any) -> bool:
    """Return whether a load is neither quantized nor has a device map or a mesh."""
    return not config.is_quantized and config.device_map is None and config.device_mesh is None


def get_load_dtype(config: Any) -> torch.dtype:
    """Return the dtype in which a model is loaded."""
    return config.dtype or torch.get_default_dtype()


def load_outcome(missing: set[str], unexpected: set[str], mismatched: set[tuple[str, Any, Any]]) -> Any:
    """Return the loading info with which transformers ties, initializes and reports."""
    return private("transformers.utils.loading_report:LoadStateDictInfo")(
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched_keys=mismatched,
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
